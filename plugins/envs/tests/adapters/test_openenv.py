"""The client of OpenEnv's protocol without its package, with small servers: one of our envs, one of typed actions and tools.

plugins/envs/tests/test_openenv_package.py repeats the important parts against the package itself.
"""

import asyncio
import json
import pickle
import random
import sys

import pytest
from aiohttp import web

from ludic import registry
from ludic.envs import check_env
from ludic.tools import Tool
from ludic.types import ConfigError, MissingExtra, StepOutcome
from ludic_envs.adapters.openenv import OpenEnvEnv, OpenEnvError
from ludic_envs.adapters.openenv_actions import ActionFormat, UnreadableAction
from tests.openenv_server import OpenEnvServer

ME = "agent_0"


def action_schema(required=("number",), **fields):
    return {"action": {"properties": {**fields, "metadata": {"type": "object"}}, "required": list(required)}}


class CountingServer:
    """Add numbers up to ten: a typed action, a tool that earns 0.25, an error at 13; it refuses the first `busy` sessions."""

    def __init__(self, *, busy=0, schema=None):
        self.busy, self.hangs_up, self.calls = busy, False, []
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
                self.calls.append(data["arguments"])
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


def served(id):
    return OpenEnvServer(lambda: registry.envs.make(id, **registry.envs.spec(id).example))


# --- our envs behind the protocol ---


@pytest.mark.parametrize(("id", "seed"), [("tic_tac_toe", 4), ("key_door", 1), ("gsm8k", 0), ("twenty_forty_eight", 2)])
async def test_an_episode_over_the_wire_equals_the_episode_in_process(id, seed):
    example = registry.envs.spec(id).example
    server = await served(id).__aenter__()
    alone, there = registry.envs.make(id, **example), OpenEnvEnv(server.url)
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
    await server.__aexit__()


async def test_tools_of_an_env_travel_as_mcp_tools():
    alone = registry.envs.make("musique_search", **registry.envs.spec("musique_search").example)
    await alone.async_reset(seed=0)
    async with served("musique_search") as server:
        there = OpenEnvEnv(server.url, tools=True)
        await there.async_reset(seed=0)
        tools, same = (
            [fn if isinstance(fn, Tool) else Tool.from_callable(fn) for fn in env.episode_tools(env.agent_ids[0])]
            for env in (there, alone)
        )
        assert [(t.name, sorted(t.parameters["properties"])) for t in tools] == [
            (t.name, sorted(t.parameters["properties"])) for t in same
        ]
        asked = {"query": "Alder Street Observatory"}
        assert (await tools[0].call(asked)).content == (await same[0].call(asked)).content
        assert (await act(there, "1871")).reward == 1.0
        await there.async_close()


async def test_an_env_behind_the_protocol_passes_check_env():
    async with served("tic_tac_toe") as server:
        await check_env(lambda: OpenEnvEnv(server.url), seeds=(0, 1))


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
        assert await peek.fn(twice=True) == str(server.luck)
        assert (await peek.call({"twice": None})).content == str(server.luck)
        assert server.calls[-1] == {} and (await peek.call({"twice": "maybe"})).is_error
        copy = pickle.loads(pickle.dumps(env))
        await env.async_close()
        end = await act(copy, "done")
        assert (end.reward, end.terminated) == (0.5, True)  # of two calls
        await copy.async_close()


async def test_tool_calls_go_through_mcp_where_actions_are_of_another_kind():
    async with CountingServer() as server:
        env = OpenEnvEnv(server.url, tools=True)
        await env.async_reset(seed=5)
        (peek,) = env.episode_tools(ME)
        assert (await peek.call({})).content == f"luck is {server.luck}"
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
        assert await asyncio.gather(peek.fn(), peek.fn(), peek.fn()) == [f"luck is {server.luck}"] * 3
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
        await OpenEnvEnv("http://127.0.0.1:9").async_reset(seed=0)


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
