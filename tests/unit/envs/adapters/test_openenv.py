"""OpenEnv's protocol without its package: our client with our server, and with a small server of typed actions and tools.

tests/integration/test_openenv_package.py repeats the important parts against the package itself.
"""

import asyncio
import json
import pickle
import random
import sys

import aiohttp
import pytest
from aiohttp import web

from ludic import registry
from ludic.envs import check_env
from ludic.envs.adapters.openenv import OpenEnvEnv, OpenEnvError
from ludic.envs.adapters.openenv.actions import ActionFormat, UnreadableAction, tool_function
from ludic.envs.adapters.openenv.server import LocalServer, openenv_app
from ludic.inference.serving.limits import ServerLimits
from ludic.inference.vllm.command import free_port
from ludic.tools import Tool
from ludic.types import ConfigError, MissingExtra, StepOutcome
from tests.fakes import status_with_header
from tests.unit.cli.runner import invoke

ME = "agent_0"


def action_schema(required=("number",), **fields):
    return {"action": {"properties": {**fields, "metadata": {"type": "object"}}, "required": list(required)}}


class CountingServer:
    """Add numbers up to ten: a typed action, a tool that earns 0.25, an error at 13; it refuses the first `busy` sessions."""

    def __init__(self, *, busy=0, schema=None):
        self.busy, self.hangs_up = busy, False
        self.schema = schema or action_schema(number={"type": "integer", "minimum": 0, "maximum": 13})

    async def __aenter__(self):
        app = web.Application()
        app.router.add_get("/schema", self.schemas)
        app.router.add_get("/ws", self.socket)
        self.runner = web.AppRunner(app, shutdown_timeout=1.0)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self.runner.cleanup()

    async def schemas(self, request):
        return web.json_response(self.schema)

    async def socket(self, request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.busy > 0:
            self.busy -= 1
            await socket.send_json({"type": "error", "data": {"message": "at capacity", "code": "CAPACITY_REACHED"}})
            await socket.close()
            return socket
        self.total = 0
        async for message in socket:
            said = json.loads(message.data)
            if self.hangs_up and said["type"] == "step":
                break
            await socket.send_json(self.reply(said["type"], said.get("data", {})))
        await socket.close()
        return socket

    def reply(self, kind, data):
        match kind:
            case "reset":
                self.total, self.luck = 0, random.Random(data["seed"]).randint(0, 3)
                return self.shows(None)
            case "mcp" if data["method"] == "tools/list":
                peek = {"type": "object", "properties": {"twice": {"type": "boolean", "default": False}}}
                return self.rpc({"tools": [{"name": "peek", "description": "Look.", "inputSchema": peek}]})
            case "mcp":
                return self.rpc({"content": [{"type": "text", "text": f"luck is {self.luck}"}]})
            case "step" if data.get("type") == "call_tool":
                seen = {"tool_name": "peek", "result": {"data": self.luck}, "error": None}
                return {"type": "observation", "data": {"observation": seen, "reward": 0.25, "done": False}}
            case "step" if not 0 <= data["number"] <= 13:
                problem = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["number"]}
                return {"type": "error", "data": problem}
            case "step" if data["number"] == 13:
                return {"type": "error", "data": {"message": "unlucky", "code": "EXECUTION_ERROR"}}
        self.total += data["number"]
        return self.shows(float(self.total))

    def rpc(self, result):
        return {"type": "mcp", "data": {"jsonrpc": "2.0", "id": 1, "result": result}}

    def shows(self, reward):
        seen = {"total": self.total, "luck": self.luck, "metadata": {}}
        return {"type": "observation", "data": {"observation": seen, "reward": reward, "done": self.total >= 10}}


async def act(env, said):
    return (await env.async_step({ME: said}))[ME]


# --- our client, our server ---


@pytest.mark.parametrize(("id", "seed"), [("tic_tac_toe", 4), ("key_door", 1), ("gsm8k", 0), ("twenty_forty_eight", 2)])
async def test_an_episode_over_the_wire_equals_the_episode_in_process(id, seed):
    example = registry.envs.spec(id).example
    alone, there = registry.envs.make(id, **example), OpenEnvEnv(f"ludic:{id}")
    obs, _ = (await alone.async_reset(seed=seed))[alone.agent_ids[0]]
    assert (await there.async_reset(seed=seed))[ME][0] == obs
    assert there.suggested_sysprompt == alone.suggested_sysprompt
    rng = random.Random(seed)
    for _ in range(12):
        legal = alone.legal_actions(alone.agent_ids[0])
        assert there.legal_actions(ME) == legal
        said = rng.choice(legal) if legal else "42"
        one, other = (await alone.async_step({alone.agent_ids[0]: said}))[alone.agent_ids[0]], await act(there, said)
        assert other == StepOutcome(
            one.obs,
            one.reward,
            one.truncated,
            one.terminated,
            {"illegal_move": False, "metadata": other.info["metadata"]},
        )
        assert other.info["metadata"]["info"] == one.info
        if not alone.active_agents:
            break
    assert alone.active_agents == [] or there.active_agents == [ME]
    await there.async_close()


async def test_tools_of_our_env_travel_as_mcp_tools():
    server = await LocalServer.start("musique_search")
    alone = registry.envs.make("musique_search", **registry.envs.spec("musique_search").example)
    await alone.async_reset(seed=0)
    there = OpenEnvEnv(server.url, tools=True)
    await there.async_reset(seed=0)
    tools, same = ([Tool.from_callable(fn) for fn in env.episode_tools(env.agent_ids[0])] for env in (there, alone))
    assert [(t.name, sorted(t.parameters["properties"])) for t in tools] == [
        (t.name, sorted(t.parameters["properties"])) for t in same
    ]
    asked = {"query": "Alder Street Observatory"}
    assert (await tools[0].call(asked)).content == (await same[0].call(asked)).content
    assert (await act(there, "1871")).reward == 1.0
    await there.async_close()
    await server.stop()


async def test_server_serves_documents_and_checks_the_token():
    server = await LocalServer.start("tic_tac_toe", token="secret")
    async with aiohttp.ClientSession() as http:
        assert (await (await http.get(f"{server.url}/health")).json()) == {"status": "healthy"}
        assert (await http.get(f"{server.url}/schema")).status == 401
    for wrong in (b"Bearer s\xe9cret", "Bearer sécret".encode()):
        assert await status_with_header(f"{server.url}/schema", "Authorization", wrong) == 401
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer secret"}) as http:
        documents = {name: await (await http.get(f"{server.url}/{name}")).json() for name in ("schema", "metadata")}
        assert documents["schema"]["action"]["required"] == ["text"]
        assert documents["metadata"]["name"] == "tic_tac_toe"
        first = await (await http.post(f"{server.url}/reset", json={"seed": 4})).json()
        assert first["done"] is False and "text" in first["observation"]
        assert (await http.post(f"{server.url}/reset", json={"seed": -1})).status == 422
        assert (await http.post(f"{server.url}/step", json={"action": {"text": "A1"}})).status == 409
    with pytest.raises(OpenEnvError, match="token"):
        await OpenEnvEnv(server.url).async_reset(seed=0)
    env = OpenEnvEnv(server.url, headers={"Authorization": "Bearer secret"})
    await env.async_reset(seed=0)
    await env.async_close()
    await server.stop()


async def test_server_answers_bad_messages_and_goes_on():
    server = await LocalServer.start("tic_tac_toe")
    async with aiohttp.ClientSession() as http, http.ws_connect(f"{server.url}/ws") as socket:

        async def code(message):
            await socket.send_str(message if isinstance(message, str) else json.dumps(message))
            return (await socket.receive_json())["data"].get("code")

        assert await code("{") == "INVALID_JSON"
        assert await code({"type": "dance"}) == "UNKNOWN_TYPE"
        assert await code({"type": "step", "data": {"text": "A1"}}) == "EXECUTION_ERROR"  # before reset
        assert await code({"type": "reset", "data": {"seed": "x"}}) == "VALIDATION_ERROR"
        assert await code({"type": "reset", "data": {"seed": 3, "episode_id": "e"}}) is None
        assert await code({"type": "step", "data": {"move": "A1"}}) == "VALIDATION_ERROR"
        assert await code({"type": "step", "data": {"text": "B2"}}) is None
        await socket.send_json({"type": "state"})
        assert (await socket.receive_json())["data"] == {"episode_id": "e", "step_count": 1}
        await socket.send_json({"type": "close"})
        assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
    await server.stop()


async def test_http_session_is_joined_by_a_websocket_and_closed():
    server = await LocalServer.start("tic_tac_toe", max_sessions=1)
    async with aiohttp.ClientSession() as http:

        async def rpc(method, **params):
            call = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params}
            return await (await http.post(f"{server.url}/mcp", json=call)).json()

        id = (await rpc("openenv/session/create"))["result"]["session_id"]
        assert "capacity" in (await rpc("openenv/session/create"))["error"]["message"]
        with pytest.raises(OpenEnvError, match="no free session"):
            await OpenEnvEnv(server.url, wait_s=0.0).async_reset(seed=0)
        async with http.ws_connect(f"{server.url}/ws?session_id={id}") as socket:
            await socket.send_json({"type": "reset", "data": {}})
            assert (await socket.receive_json())["type"] == "observation"
        assert (await rpc("tools/list", session_id=id))["result"] == {"tools": []}
        assert (await rpc("openenv/session/close", session_id=id))["result"]["closed"] is True
        assert (await rpc("tools/list", session_id=id))["error"]["code"] == -32602
        assert (await (await http.post(f"{server.url}/mcp", json={})).json())["error"]["code"] == -32600
    env = OpenEnvEnv(server.url)  # the room is free again
    await env.async_reset(seed=0)
    await env.async_close()
    await server.stop()


def test_an_env_with_several_agents_is_refused():
    with pytest.raises(ConfigError, match="one agent"):
        openenv_app("tic_tac_toe_duel")


# --- our client, typed actions ---


async def test_typed_action_is_sent_and_what_the_server_refuses_is_shown():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url, on_error="observe")
        obs, _ = (await env.async_reset(seed=5))[ME]
        assert obs == f"total: 0\nluck: {server.luck}"
        assert env.legal_actions(ME) == [str(n) for n in range(14)]
        assert (await act(env, "four")).info["illegal_move"]
        assert "VALIDATION" not in (refused := await act(env, "99")).obs and refused.info["illegal_move"]
        assert "unlucky" in (await act(env, "13")).obs
        end = await act(env, "10")
        assert (end.reward, end.terminated, env.active_agents) == (10.0, True, [])
        await env.async_close()


async def test_our_env_behind_the_protocol_passes_check_env():
    server = await LocalServer.start("tic_tac_toe")
    await check_env(lambda: OpenEnvEnv(server.url), seeds=(0, 1))
    await server.stop()


async def test_step_that_raises_on_the_server_fails_the_episode():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url)
        await env.async_reset(seed=0)
        with pytest.raises(OpenEnvError, match="unlucky"):
            await act(env, "13")
        server.hangs_up = True
        with pytest.raises(OpenEnvError, match="closed the session"):
            await act(env, "1")
        await env.async_close()


async def test_busy_server_is_asked_again():
    async with CountingServer(busy=2) as server:
        env = OpenEnvEnv(server.url)
        await env.async_reset(seed=0)
        assert server.busy == 0
        await env.async_close()


async def test_tool_calls_are_steps_where_the_server_takes_them_and_a_copy_replays_them():
    tool_call = action_schema(("tool_name",), tool_name={"type": "string"}, arguments={"type": "object"})
    async with CountingServer(schema=tool_call) as server:
        env = OpenEnvEnv(server.url, tools=True)
        await env.async_reset(seed=5)
        (peek,) = env.episode_tools(ME)
        assert await peek(twice=True) == str(server.luck)
        copy = pickle.loads(pickle.dumps(env))
        await env.async_close()
        end = await act(copy, "done")
        assert (end.reward, end.terminated) == (0.25, True)
        await copy.async_close()


async def test_tool_calls_go_through_mcp_where_actions_are_of_another_kind():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url, tools=True)
        await env.async_reset(seed=5)
        (peek,) = env.episode_tools(ME)
        assert await peek() == f"luck is {server.luck}"
        assert (await act(env, "11")).reward == 11.0
        await env.async_close()


async def test_after_a_cancelled_step_no_reply_is_taken_for_another():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url)
        await env.async_reset(seed=0)
        step = asyncio.create_task(act(env, "1"))
        await asyncio.sleep(0)
        step.cancel()
        await asyncio.wait({step})
        with pytest.raises(OpenEnvError, match="cut off"):
            await act(env, "2")
        await env.async_reset(seed=0)
        assert [(await act(env, "1")).reward, (await act(env, "1")).reward] == [1.0, 2.0]
        await env.async_close()


async def test_tools_called_at_once_take_turns():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url, tools=True)
        await env.async_reset(seed=5)
        (peek,) = env.episode_tools(ME)
        assert await asyncio.gather(peek(), peek(), peek()) == [f"luck is {server.luck}"] * 3
        await env.async_close()


async def test_unreachable_and_wrong_addresses_are_named():
    with pytest.raises(OpenEnvError, match="cannot be reached"):
        await OpenEnvEnv("http://127.0.0.1:9", timeout_s=5).async_reset(seed=0)
    with pytest.raises(ConfigError, match="no URL"):
        OpenEnvEnv("localhost:8000")
    async with CountingServer(schema={"openapi": 1}) as server:
        with pytest.raises(ConfigError, match="no OpenEnv server"):
            await OpenEnvEnv(server.url).async_reset(seed=0)
    async with CountingServer() as server:
        with pytest.raises(ConfigError, match=r"\['luck', 'metadata', 'total'\]"):
            await OpenEnvEnv(server.url, observation_field="hint").async_reset(seed=0)


async def test_without_aiohttp_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(MissingExtra, match="openenv"):
        await OpenEnvEnv("ludic:tic_tac_toe").async_reset(seed=0)


# --- reading replies ---


@pytest.mark.parametrize(
    ("fields", "required", "said", "expected"),
    [
        ({"message": {"type": "string"}}, ["message"], " hi ", {"message": " hi "}),
        ({"number": {"type": "integer"}}, ["number"], " 7\n", {"number": 7}),
        ({"number": {"type": "integer"}}, ["number"], "9" * 5000, None),
        ({"x": {"type": "number"}}, ["x"], "-1.5", {"x": -1.5}),
        ({"x": {"type": "number"}}, ["x"], "nan", None),
        ({"yes": {"type": "boolean"}}, ["yes"], "True", {"yes": True}),
        ({"way": {"enum": ["north", "south"]}}, ["way"], "South", {"way": "south"}),
        ({"way": {"enum": ["north", "south"]}}, ["way"], "up", None),
        ({"n": {"anyOf": [{"type": "integer"}, {"type": "null"}]}}, [], "3", {"n": 3}),
        ({"code": {"type": "string"}, "limit": {"type": "integer"}}, ["code"], "x = 1", {"code": "x = 1"}),
        ({"a": {"type": "string"}, "b": {"type": "string"}}, ["a", "b"], '{"a": "1", "b": "2"}', {"a": "1", "b": "2"}),
        ({"a": {"type": "string"}, "b": {"type": "string"}}, ["a"], "plain", {"a": "plain"}),
        ({"a": {"type": "string"}, "b": {"type": "string"}}, ["a", "b"], '{"a": "1"}', None),
        ({"a": {"type": "string"}, "b": {"type": "string"}}, ["a", "b"], '{"a": "1", "b": "2", "c": 3}', None),
        ({"a": {"type": "array"}}, ["a"], '```json\n{"a": [1]}\n```', {"a": [1]}),
        ({"a": {"type": "array"}}, ["a"], "[1]", None),
        ({}, [], '{"anything": 1}', {"anything": 1}),
    ],
)
def test_reply_becomes_the_action_of_the_schema(fields, required, said, expected):
    form = ActionFormat(action_schema(required, **fields), "server")
    if expected is not None:
        assert form.read(said) == expected
        return
    with pytest.raises(UnreadableAction):
        form.read(said)


def test_action_field_picks_one_of_several_and_must_exist():
    fields = {"code": {"type": "string"}, "why": {"type": "string"}}
    form = ActionFormat(action_schema(["code", "why"], **fields), "server", "code")
    assert form.read("1") == {"code": "1"}
    with pytest.raises(ConfigError, match=r"\['code', 'why'\]"):
        ActionFormat(action_schema([], **fields), "server", "program")


async def test_tool_function_has_the_signature_of_its_schema():
    calls = []

    async def call(name, arguments):
        calls.append((name, arguments))
        return "ok"

    schema = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to look for"},
            "limit": {"type": "integer", "default": 3},
            "order": {"enum": ["up", "down"]},
        },
        "required": ["query"],
    }
    tool = Tool.from_callable(tool_function({"name": "find", "description": "Search.", "parameters": schema}, call))
    assert (tool.name, tool.description, tool.parameters["required"]) == ("find", "Search.", ["query"])
    assert tool.parameters["properties"]["query"]["description"] == "what to look for"
    assert (await tool.call('{"query": "x", "limit": "2"}')).content == "ok"
    assert (await tool.call('{"query": "x", "order": "sideways"}')).is_error
    assert calls == [("find", {"query": "x", "limit": 2})]
    assert asyncio.iscoroutinefunction(tool.fn)


async def test_seed_picks_the_sample_of_a_served_dataset():
    samples = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in range(3)]
    server = await LocalServer.start("gsm8k", samples=samples)
    env = OpenEnvEnv(server.url)
    for seed in (0, 5, 1):
        obs, _ = (await env.async_reset(seed=seed))[ME]
        assert f"{seed % 3} + 1?" in obs
        assert (await act(env, str(seed % 3 + 1))).reward == 1.0
    await env.async_close()
    await server.stop()


def test_command_refuses_what_it_cannot_serve(monkeypatch):
    monkeypatch.delenv("LUDIC_OPENENV_TOKEN", raising=False)
    assert "LUDIC_OPENENV_TOKEN" in str(invoke(["openenv-server", "tic_tac_toe", "--host", "0.0.0.0"]).exception)
    assert "one agent" in str(invoke(["openenv-server", "tic_tac_toe_duel", "--port", str(free_port())]).exception)


def test_command_allows_a_connection_for_every_session(monkeypatch):
    given: list[ServerLimits] = []

    def make(app: object, limits: ServerLimits) -> None:
        given.append(limits)
        raise ConfigError("The test ends here.")

    monkeypatch.setattr("ludic.inference.serving.app.AppServer", make)
    invoke(["openenv-server", "tic_tac_toe", "--max-sessions", "5000", "--port", str(free_port())])
    assert given[0].max_connections > 5000
