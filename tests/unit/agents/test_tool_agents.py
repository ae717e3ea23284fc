import asyncio
import json

import pytest

from ludic.agents import ReActAgent
from ludic.inference import ByteTemplate, HermesToolParser, ScriptedClient, XMLToolParser
from ludic.tools import Tool
from ludic.types import ConfigError
from tests.fakes import RecordingClient, make_agent


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def ask(question: str) -> str:
    """Ask an expert."""
    raise AssertionError("external tools are not run by the agent")


def react(replies, **kwargs) -> ReActAgent:
    kwargs.setdefault("tools", [add])
    agent = make_agent(replies, cls=kwargs.pop("cls", ReActAgent), **kwargs)
    agent.reset()
    agent.on_env_reset("obs", {})
    return agent


def shown(step):
    return [(m["role"], m["content"]) for m in step.prompt_messages]


async def test_every_model_call_is_a_step_and_a_valid_tool_call_is_no_parse_error():
    agent = react(["thinking " + call("add", a=1, b=2), "<a>3</a>"])
    tool_step, final = (await agent.act()).steps
    assert tool_step.action_target == "internal" and tool_step.parse_result is None
    assert tool_step.tool_results == [
        {
            "tool_call_id": "call00000", "tool_name": "add", "arguments_json": '{"a": 1, "b": 2}', "content": "3",
            "is_error": False,
        }
    ]  # fmt: skip
    assert final.action_target == "env" and final.parse_result.action == "3" and final.loop_index == 1
    assert shown(final)[-2:] == [("assistant", "thinking"), ("tool", "3")]


async def test_each_prompt_of_the_loop_extends_the_last_one():
    client = RecordingClient(ScriptedClient([call("add", a=1, b=2), call("add", a=3, b=4), "<a>7</a>", "<a>8</a>"]))
    agent = react(client, max_react_steps=3)
    await agent.act()
    agent.on_after_step("next", {})
    await agent.act()
    assert len(client.calls) == 4
    for (prompt, completion), (following, _) in zip(client.calls, client.calls[1:], strict=False):
        so_far = [*prompt, *completion]
        assert following[: len(so_far)] == so_far


async def test_last_react_step_asks_for_an_answer_and_takes_any_reply():
    agent = react([call("add", a=1, b=2), call("add", a=1, b=2)], max_react_steps=2, final_answer_prompt="NOW")
    _tool_step, final = (await agent.act()).steps
    assert shown(final)[-1] == ("tool", "3\n\nNOW")
    assert final.action_target == "env" and final.parse_result.action is None  # a call is no action
    assert agent.ctx.messages[-1]["content"] == call("add", a=1, b=2)


async def test_with_one_react_step_the_final_prompt_is_appended_to_the_observation():
    agent = react(["<a>x</a>"], max_react_steps=1, final_answer_prompt="NOW")
    (only,) = (await agent.act()).steps
    assert shown(only) == [("user", "obs\n\nNOW")] and only.parse_result.action == "x"


async def test_a_malformed_tool_call_is_a_failed_action_with_tool_parse_error_penalty():
    agent = react(['<tool_call>{"name": </tool_call>'], tool_parse_error_penalty=-0.7)
    (step,) = (await agent.act()).steps
    assert step.action_target == "env" and step.parse_result.action is None and step.parse_result.reward == -0.7
    assert step.info["tool_parse_error"] is True and "could not be read" in step.parse_result.obs


@pytest.mark.parametrize(
    ("arguments", "reply"),
    [
        ({"name": "substract", "arguments": {}}, "no tool named 'substract'. Available tools: add"),
        ({"name": "add", "arguments": {"a": 1}}, "b"),
        ({"name": "add", "arguments": {"a": "x", "b": 2}}, "a"),
    ],
)
async def test_tool_errors_are_reported_to_the_model_and_the_loop_continues(arguments, reply):
    agent = react([f"<tool_call>{json.dumps(arguments)}</tool_call>", "<a>x</a>"])
    steps = (await agent.act()).steps
    content = steps[0].tool_results[0]["content"]
    assert content.startswith("Error") and reply in content
    assert steps[-1].parse_result.action == "x"


async def test_a_tool_that_raises_or_hangs_returns_an_error_to_the_model():
    def explode() -> str:
        """Explode."""
        raise ValueError("boom")

    async def hang() -> str:
        """Hang."""
        await asyncio.sleep(60)
        return "never"

    tools = [explode, Tool.from_callable(hang, timeout_s=0.01)]
    agent = react([call("explode") + call("hang"), "<a>x</a>"], tools=tools)
    first, _ = (await agent.act()).steps
    texts = [result["content"] for result in first.tool_results]
    assert "boom" in texts[0] and texts[1].startswith("Error") and "0.01" in texts[1]


async def test_external_calls_go_to_the_protocol_after_internal_ones_have_run():
    agent = react([call("add", a=1, b=1) + call("ask", question="why")], external_tools=[ask])
    (step,) = (await agent.act()).steps
    assert step.action_target == "external" and step.parse_result is None
    assert [r["tool_name"] for r in step.tool_results] == ["add"]
    assert [c["function"]["name"] for c in step.tool_calls] == ["add", "ask"]
    assert agent.get_tool_scope("add") == "internal" and agent.get_tool_scope("ask") == "external"
    assert agent.get_tool_scope("nope") is None and agent.is_external_tool("ask")
    assert agent.has_external_tool_call(step.tool_calls)


async def test_tool_call_ids_do_not_repeat_within_an_episode():
    agent = react([call("add", a=1, b=1), call("add", a=2, b=2), "<a>x</a>"])
    steps = (await agent.act()).steps
    assert [s.tool_calls[0]["id"] for s in steps[:2]] == ["call00000", "call00001"]
    agent.reset()
    assert agent._num_tool_calls == 0


def test_tools_need_a_template_that_can_read_calls():
    with pytest.raises(ConfigError, match="tool_parser"):
        react([], chat_template=ByteTemplate())


async def test_calls_of_one_message_run_in_order():
    state = {"x": 0}

    async def put(x: int) -> str:
        """Put."""
        await asyncio.sleep(0.01)
        state["x"] = x
        return "ok"

    def get() -> int:
        """Get."""
        return state["x"]

    agent = react([call("put", x=7) + call("get"), "<a>x</a>"], tools=[put, get])
    first, _ = (await agent.act()).steps
    assert [r["content"] for r in first.tool_results] == ["ok", "7"]


class Silent(ByteTemplate):
    def apply(self, messages, *, tools=None, add_generation_prompt=True):
        return super().apply(messages, add_generation_prompt=add_generation_prompt)


def test_tools_in_the_system_message_need_a_parser_of_the_form_that_it_asks_for():
    with pytest.raises(ConfigError, match=r"no place for tools.*HermesToolParser\(\)"):
        react([], chat_template=Silent(tool_parser=XMLToolParser()))
    react([], chat_template=Silent(tool_parser=XMLToolParser()), tools_in_prompt=False)


async def test_tools_stand_in_the_system_message_where_the_template_has_no_place_for_them():
    template = Silent(tool_parser=HermesToolParser())
    agent = react([call("add", a=1, b=2), "<a>3</a>"], chat_template=template)
    first, final = (await agent.act()).steps
    role, text = shown(final)[0]
    assert role == "system" and json.dumps(agent.tool_schemas[0]["function"]) in text
    assert shown(final)[: len(shown(first))] == shown(first) and final.parse_result.action == "3"
    assert final.trace.prompt_token_ids[: len(first.trace.prompt_token_ids)].tolist() == [*first.trace.prompt_token_ids]
    (alone,) = (await react(["<a>3</a>"], chat_template=template, tools_in_prompt=False).act()).steps
    assert shown(alone) == [("user", "obs")]
