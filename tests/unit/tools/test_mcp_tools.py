"""Tools of a real MCP server process. It takes seconds to start, so one test asks it for everything."""

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ludic.agents import ReActAgent
from ludic.interaction import SingleAgentProtocol
from ludic.tools import Tool
from ludic.tools.mcp_tools import mcp_tools
from ludic.types import ConfigError, MissingExtra
from tests.fakes import CountingEnv, make_agent
from tests.unit.agents.test_tool_agents import call

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
            "my_add",
            "my_geo_mirror",
            "my_refuse",
            "my_sleep",
            "my_picture",
            "my_environment",
            "my_die",
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

        slept = await replace(by_name["my_sleep"], timeout_s=0.3).call({})
        assert slept.is_error and "did not finish within 0.3 s" in slept.content
        assert (await add.call({"a": 1})).content == "2", "the server goes on"

        died = await by_name["my_die"].call({})
        assert died.is_error and "Its last line on stderr: I have lost my database" in died.content
        assert (await add.call({"a": 1})).is_error
        raise LookupError("a mistake of the caller's comes out as it is")


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


async def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(MissingExtra, match=r"ludic-rl\[mcp\]"):
        async with mcp_tools(SERVER):
            raise AssertionError("there is nothing to call")
