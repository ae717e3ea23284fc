"""Tools of a real MCP server process. It takes seconds to start, so one test asks it for everything."""

import asyncio
import json
import random
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ludic.agents import ReActAgent
from ludic.envs import SingleAgentEnv, check_env
from ludic.interaction import SingleAgentProtocol
from ludic.tools import Tool
from ludic.types import ConfigError, MissingExtra, StepOutcome
from ludic_envs.mcp_tools import mcp_tools
from tests.contract.pages import BLOCK, DOCS
from tests.fakes import CountingEnv, make_agent
from tests.unit.agents.test_tool_agents import call

pytestmark = pytest.mark.slow

pytest.importorskip("mcp", reason="the mcp extra is not installed")

SERVER = [sys.executable, str(Path(__file__).with_name("mcp_server.py"))]


async def test_server_tools_are_called_and_report_timeouts_and_a_dead_server():
    kept: list[Tool] = []
    with pytest.raises(LookupError):
        await use_everything(kept)
    afterwards = await kept[0].call({"a": 1})
    assert afterwards.is_error and "add could not be called" in afterwards.content


async def use_everything(kept: list[Tool]) -> None:
    async with mcp_tools(SERVER, env={"TOLD": "a secret"}, prefix="my_", timeout_s=20) as tools:
        by_name = {tool.name: tool for tool in tools}
        assert set(by_name) == {
            f"my_{name}" for name in ["add", "geo_mirror", "refuse", "sleep", "picture", "environment", "die"]
        }
        add = by_name["my_add"]
        kept.append(add)
        assert add.description == "Add two numbers." and add.parameters["required"] == ["a"]
        assert add.parameters["properties"]["a"]["type"] == "integer"
        assert "$ref" not in str(by_name["my_geo_mirror"].parameters), "templates do not follow references"

        assert (await add.call({"a": 2, "b": 3})).content == "5"
        assert (await add.call('{"a": "2"}')).content == "3", "a number may come as text"
        wrong = await add.call({"a": "two", "c": 1})
        assert wrong.is_error and "unknown argument 'c'" in wrong.content and "argument 'a'" in wrong.content
        assert '"x": -1' in (await by_name["my_geo_mirror"].call({"point": {"x": 1}})).content
        refused = await by_name["my_refuse"].call({"what": "tea"})
        assert refused.is_error and "no tea today" in refused.content
        assert (await by_name["my_picture"].call({})).content == "[image, which cannot be shown as text]"
        assert (await by_name["my_environment"].call({})).content == "a secret"
        together = await asyncio.gather(*(add.call({"a": n, "b": 0}) for n in range(20)))
        assert [result.content for result in together] == [str(n) for n in range(20)]

        agent = make_agent([call("my_add", a=40, b=2), "<a>inc</a>"], cls=ReActAgent, tools=tools)
        (rollout,) = await SingleAgentProtocol(agent).run(env=CountingEnv(1), max_steps=1)
        assert rollout.agent_steps[0].tool_results[0]["content"] == "42"

        await use_envs(by_name)

        slept = await replace(by_name["my_sleep"], timeout_s=0.3).call({})
        assert slept.is_error and "did not finish within 0.3 s" in slept.content
        assert (await add.call({"a": 1})).content == "2", "the server goes on"

        died = await by_name["my_die"].call({})
        assert died.is_error and "Its last line on stderr: I have lost my database" in died.content
        assert (await add.call({"a": 1})).is_error
        raise LookupError("a mistake of the caller's comes out as it is")


async def use_envs(tools: dict[str, Tool]) -> None:
    """One env offers a tool of the server to its agent, the other calls one in its step."""
    sums, Mirrored.mirror = page_env(), tools["my_geo_mirror"]
    sums.tools = (tools["my_add"],)
    for env in (sums, Mirrored):
        assert (await check_env(env)).num_steps > 0
    agent = make_agent([call("my_add", a=864, b=394), "<a>1258</a>"], cls=ReActAgent)
    (rollout,) = await SingleAgentProtocol(agent).run(env=sums(), max_steps=1, env_seed=0)
    assert rollout.agent_steps[0].tool_results[0]["content"] == "1258"
    assert rollout.env_steps[-1].reward_components["env"] == 1.0


def page_env() -> Any:
    """The class of docs/envs/mcp.md, importable, so that it can be pickled."""
    ((_, program),) = [block for block in BLOCK.findall((DOCS / "envs" / "mcp.md").read_text()) if block[0] == "python"]
    module = sys.modules["sums"] = types.ModuleType("sums")
    exec(program, vars(module))
    return module.Sums


class Mirrored(SingleAgentEnv):
    """The number across zero, which the server knows, too."""

    mirror: Tool

    def env_reset(self, *, seed=None):
        self.x = random.Random(seed).randrange(100)
        return str(self.x), {}

    async def async_env_step(self, action):
        seen = json.loads((await self.mirror.call({"point": {"x": self.x}})).content)
        return StepOutcome("", float(action == str(seen["x"])), terminated=True)

    def reference_action(self, agent_id):
        return str(-self.x)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["no-such-server"], "'no-such-server' could not be started: .*No such file"),
        (
            [sys.executable, "-c", "raise SystemExit('no licence')"],
            "could not be started: .* Its last line on stderr: no licence",
        ),
        ([sys.executable, "-c", "input(); input()"], "did not answer within 0.5 s"),
        ("python server.py", "a list of words"),
    ],
    ids=["missing", "ends", "silent", "text"],
)
async def test_a_server_that_does_not_start_says_why(command, message):
    with pytest.raises(ConfigError, match=message):
        async with mcp_tools(command, start_timeout_s=0.5 if "input" in str(command) else 30):
            raise AssertionError("there is nothing to call")


MISBEHAVING = """
import json, sys
for line in sys.stdin:
    asked = json.loads(line)
    result = {"protocolVersion": asked["params"].get("protocolVersion"), "capabilities": {"tools": {}}, "serverInfo": SERVER}
    if asked["method"] == "tools/list":
        DO
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
""".replace("SERVER", '{"name": "x", "version": "1"}')


@pytest.mark.parametrize(
    "deed", ["sys.exit('no licence')", "result = {}", "result = {'tools': [{'name': 'f', 'inputSchema': [1]}]}"]
)
async def test_a_server_that_breaks_the_protocol_is_one_error_with_its_command(deed):
    command = [sys.executable, "-c", MISBEHAVING.replace("DO", deed)]
    with pytest.raises(ConfigError, match="The MCP server .* could not be started: "):
        async with mcp_tools(command):
            raise AssertionError("there is nothing to call")


async def test_an_exception_group_of_the_body_is_raised_unchanged():
    mine = ExceptionGroup("mine", [ValueError("my own")])
    with pytest.raises(ExceptionGroup, match="mine") as raised:
        async with mcp_tools(SERVER):
            raise mine
    assert raised.value is mine


async def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"ludic-rl\[mcp\]"):
        async with mcp_tools(SERVER):
            raise AssertionError("there is nothing to call")
