"""One of our envs behind OpenEnv's protocol, for tests of the client: each WebSocket is a session with its env."""

import json
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ludic.tools import as_tool

SCHEMAS = {"action": {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["text"]}}


class OpenEnvServer:
    """Serves from `async with` on; `url` is its address."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make = make

    async def __aenter__(self) -> "OpenEnvServer":
        app = web.Application()
        app.add_routes([web.get("/schema", self.schemas), web.get("/ws", self.socket)])
        self.runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.runner.cleanup()

    async def schemas(self, request: web.Request) -> web.Response:
        return web.json_response(SCHEMAS)

    async def socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        env = self.make()
        async for message in socket:
            said = json.loads(message.data)
            await socket.send_json(await reply(env, said["type"], said.get("data", {})))
        await env.async_close()
        return socket


async def reply(env: Any, kind: str, data: dict[str, Any]) -> dict[str, Any]:
    (agent,) = env.agent_ids
    if kind == "reset":
        obs, info = (await env.async_reset(seed=data.get("seed")))[agent]
        prompt = env.suggested_sysprompt
        return shown(env, obs, None, {"info": info, **({} if prompt is None else {"system_prompt": prompt})})
    if kind == "step":
        out = (await env.async_step({agent: data["text"]}))[agent]
        facts = {"info": out.info, "terminated": out.terminated, "truncated": out.truncated}
        return shown(env, out.obs, out.reward, facts, is_done=out.terminated or out.truncated)
    assert kind == "mcp"
    tools = {tool.name: tool for tool in map(as_tool, env.episode_tools(agent))}
    if data["method"] == "tools/list":
        listed = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.parameters}
            for tool in tools.values()
        ]
        return rpc({"tools": listed})
    answer = await tools[data["params"]["name"]].call(data["params"]["arguments"])
    return rpc({"content": [{"type": "text", "text": answer.content}], "isError": answer.is_error})


def shown(
    env: Any, obs: Any, reward: float | None, metadata: dict[str, Any], *, is_done: bool = False
) -> dict[str, Any]:
    legal = None if is_done else env.legal_actions(env.agent_ids[0])
    seen = {"text": obs, "legal_actions": legal, "metadata": metadata}
    data = {"observation": seen, "reward": reward, "done": is_done, "metadata": metadata}
    return {"type": "observation", "data": data}


def rpc(result: dict[str, Any]) -> dict[str, Any]:
    return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": result}}
