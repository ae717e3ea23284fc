"""The three dialects: what bodies mean, fields that are accepted or refused by name, hostile bodies, and what official clients make
of replies, streams and errors."""

import contextlib
import copy
import functools
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.http.errors import ErrorFacts
from ludic.types import ConfigError
from ludic_serve.gateway.wire.canonical import ClientMessage, Dialect, ModelRequest, drop_constraints
from ludic_serve.gateway.wire.chat import Chat
from ludic_serve.gateway.wire.messages import Messages
from ludic_serve.gateway.wire.responses import Responses, put_items
from ludic_serve.request import MAX_MESSAGES, MAX_TOOLS
from plugins.serve.tests.dialects import (
    FAILED,
    FULL,
    HEAD,
    JSON,
    REQUEST,
    TOKEN,
    Wire,
    assert_same_message,
    cleaned,
    events_of,
    make_call,
    make_reply,
    pieces_of,
    replies,
    streamed,
)

pytestmark = pytest.mark.slow

HI = {"role": "user", "content": "Hi"}
NO_KEY = ErrorFacts(401, "authentication_error", None, "No such key.")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A dialect, and how its official client asks."""

    dialect: Dialect
    body: dict[str, Any]
    """The least that can be asked."""
    messages: str
    """The field with the messages."""
    accepted: list[tuple[str, Any]]
    """Fields without effect, with a value that is accepted."""
    refused: list[tuple[str, Any, str]]
    """Fields and values that are refused, and what is said."""
    fields: list[str]
    message: st.SearchStrategy[Any]
    """For hostile bodies."""
    client: tuple[str, str, str]
    """Package, class, address."""
    ask: Callable[..., Any]


# --- chat completions ---

TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
CHAT_ACCEPTED = [
    ("user", "ann"), ("metadata", {"a": "b"}), ("store", False), ("service_tier", "auto"), ("prompt_cache_key", "k"),
    ("parallel_tool_calls", False), ("reasoning_effort", "low"), ("n", 1), ("response_format", {"type": "text"}),
    ("logprobs", False), ("logit_bias", {}), ("verbosity", "low"), ("modalities", ["text"]), ("thinking", {"type": "enabled"}),
]  # fmt: skip
CHAT_REFUSED = [
    ("n", 2, "n=2 is not supported"),
    ("response_format", {"type": "json_object"}, "response_format"),
    ("logprobs", True, "logprobs"),
    ("modalities", ["audio"], "modalities"),
    ("tool_choice", "required", "tool_choice='required'"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}, "tool_choice"),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}], r"tools\[0\].type: Invalid enum value 'custom'"),
    ("tools", [{"type": "function", "function": {}}], r"tools\[0\].function.*name"),
    ("tools", [TOOL] * (MAX_TOOLS + 1), "tools has 257 tools"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "9", "max_tokens: Expected `int"),
    ("stop", [""], "stop"),
    ("model", "\ud800", "cannot be encoded"),
    ("temprature", 1, "Unknown field 'temprature'. Did you mean 'temperature'?"),
    ("messages", [], "messages must be a list with at least one message"),
    ("messages", [HI] * (MAX_MESSAGES + 1), "messages has 4097 messages"),
    ("messages", "Hi", "messages: Expected `array`"),
    ("messages", [{"role": "robot"}], r"messages\[0\].role: Invalid value 'robot'. It is system"),
    ("messages", [{"content": "Hi"}], r"messages\[0\].*role"),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "reads only text"),
    ("messages", [{"role": "user", "content": [{"type": "input_audio"}]}], r"content\[0\].type.*input_audio"),
    ("messages", [{"role": "tool", "content": "1"}], "tool_call_id"),
    ("messages", [{"role": "assistant", "tool_calls": [{"function": CALL["function"]}]}], "id"),
    ("messages", [{"role": "assistant", "refusal": "No."}], "refusal"),
    (
        "messages",
        [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "a", "arguments": "[1]"}}]}],
        r"messages\[0\].tool_calls must be .*JSON object",
    ),
]
CHAT_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"])},
    optional=dict.fromkeys(("content", "tool_calls", "tool_call_id", "reasoning"), JSON),
)

# --- Responses ---

FUNCTION = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": False}
CALL_ITEM = {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": '{"a":1}'}
RESPONSES_ACCEPTED = [
    ("metadata", {}), ("store", False), ("include", ["reasoning.encrypted_content"]), ("parallel_tool_calls", True),
    ("reasoning", {"effort": "low", "summary": "auto"}), ("text", {"format": {"type": "text"}, "verbosity": "low"}),
    ("truncation", "auto"), ("service_tier", "auto"), ("prompt_cache_key", "k"), ("stream_options", {"include_obfuscation": False}),
    ("user", "ann"), ("background", False), ("top_logprobs", 0), ("max_tool_calls", 4), ("client_metadata", {"a": "b"}),
]  # fmt: skip
RESPONSES_REFUSED = [
    ("text", {"format": {"type": "json_schema", "name": "a", "schema": {}}}, "text.format="),
    ("include", ["message.output_text.logprobs"], "include="),
    ("background", True, "background=True"),
    ("tool_choice", "required", "tool_choice"),
    ("tool_choice", {"type": "function", "name": "add"}, "tool_choice"),
    (
        "tools",
        [{"type": "custom", "name": "patch"}],
        r"tools\[0\].type: Invalid value 'custom'. It is function or namespace",
    ),
    ("tools", [{"type": "namespace", "name": "", "tools": []}], r"tools\[0\].name"),
    ("tools", [{"type": "namespace", "name": "a", "tools": [{"type": "namespace"}]}], r"tools\[0\].tools\[0\].type"),
    ("tools", [{"type": "namespace", "name": "a", "tools": [FUNCTION] * (MAX_TOOLS + 1)}], "tools has 257 tools"),
    ("tools", [{"name": "add"}], r"tools\[0\].*type"),
    ("tools", [{**FUNCTION, "defer_loading": True}], "defer_loading"),
    ("max_tokens", 9, "Unknown field 'max_tokens'. Did you mean 'max_output_tokens'?"),
    ("input", [], "input must be a list with at least one message"),
    ("input", [HI] * (MAX_MESSAGES + 1), "input has 4097 messages"),
    ("input", 5, "input: Expected"),
    (
        "input",
        [{"type": "item_reference", "id": "msg_1"}],
        r"input\[0\].type: Invalid value 'item_reference'. It is message",
    ),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input_image"),
    ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], r"content\[0\].type"),
    ("input", [{"role": "tool", "content": "x"}], r"input\[0\].role: Invalid enum value 'tool'"),
    ("input", [{"type": "function_call_output", "output": "x"}], "call_id"),
    ("input", [{**CALL_ITEM, "arguments": "no"}], "input must be .*JSON object"),
]
KINDS = ["message", "reasoning", "function_call", "function_call_output", "item_reference"]
ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS)},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        **dict.fromkeys(("content", "id", "call_id", "name", "arguments", "output", "summary"), JSON),
    },
)

# --- Anthropic messages ---

USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}
MESSAGES_ACCEPTED = [
    ("thinking", {"type": "adaptive"}), ("context_management", {"edits": []}), ("output_config", {"effort": "high"}),
    ("metadata", {"user_id": "u"}), ("service_tier", "auto"), ("betas", ["x"]), ("cache_control", {"type": "ephemeral"}),
    ("inference_geo", "eu"), ("speed", "fast"), ("mcp_servers", []),
]  # fmt: skip
MESSAGES_REFUSED = [
    ("output_config", {"format": {"type": "json_schema", "schema": {}}}, "output_config.format="),
    ("mcp_servers", [{"url": "x"}], "mcp_servers"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("tool_choice", {"type": "tool", "name": "add"}, "tool_choice"),
    ("tools", [{"type": "bash_20250124", "name": "bash"}], r"tools\[0\].type: Invalid enum value 'bash_20250124'"),
    ("tools", [{"name": "add"}], "input_schema"),
    ("stop_sequence", ["a"], "Did you mean 'stop_sequences'?"),
    ("messages", [], "messages must be a list with at least one message"),
    ("messages", [HI] * (MAX_MESSAGES + 1), "messages has 4097 messages"),
    ("messages", [{"role": "tool", "content": "x"}], r"messages\[0\].role: Invalid value 'tool'. It is system"),
    ("messages", [HI, {"role": "assistant", "content": "The answer is ("}], "asks to continue it"),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], r"content\[0\].type.*'image'"),
    ("messages", [{"role": "user", "content": [USE]}], "tool_use"),
    ("messages", [{"role": "assistant", "content": [RESULT]}, HI], "tool_result"),
    ("messages", [{"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}], "image"),
    ("messages", [{"role": "assistant", "content": [{**USE, "input": [1]}]}, HI], r"content\[0\].input"),
    ("messages", [{"role": "assistant", "content": [{**USE, "id": "\ud800"}]}, HI], "cannot be encoded"),
    ("system", [{"type": "image"}], r"system\[0\].type"),
]
BLOCK = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])},
    optional=dict.fromkeys(("text", "thinking", "signature", "id", "name", "input", "tool_use_id", "content"), JSON),
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.lists(BLOCK, max_size=2) | JSON}
)

CASES = {
    "chat": Case(
        dialect=Chat(), body={"messages": [HI]}, messages="messages", accepted=CHAT_ACCEPTED, refused=CHAT_REFUSED,
        fields=["messages", "tools", "tool_choice", "stop", "model", "stream", "stream_options", "max_tokens", "seed", "n", "text"],
        message=CHAT_MESSAGE, client=("openai", "OpenAI", "http://gateway/v1"),
        ask=lambda client, **more: client.chat.completions.create(model="small", messages=[HI], **more),
    ),
    "responses": Case(
        dialect=Responses(), body={"input": [HI]}, messages="input", accepted=RESPONSES_ACCEPTED, refused=RESPONSES_REFUSED,
        fields=["input", "instructions", "tools", "tool_choice", "text", "include", "stream", "max_output_tokens", "previous_response_id"],
        message=ITEM, client=("openai", "OpenAI", "http://gateway/v1"),
        ask=lambda client, **more: client.responses.create(model="small", input=[HI], **more),
    ),
    "messages": Case(
        dialect=Messages(), body={"max_tokens": 9, "messages": [HI]}, messages="messages", accepted=MESSAGES_ACCEPTED,
        refused=MESSAGES_REFUSED,
        fields=["messages", "system", "tools", "tool_choice", "stop_sequences", "max_tokens", "output_config", "thinking", "stream"],
        message=MESSAGE, client=("anthropic", "Anthropic", "http://gateway"),
        ask=lambda client, **more: client.messages.create(model="small", max_tokens=9, messages=[HI], **more),
    ),
}  # fmt: skip
each_dialect = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.mark.parametrize(
    ("case", "name", "value"),
    [pytest.param(case, *pair, id=f"{dialect}-{pair[0]}") for dialect, case in CASES.items() for pair in case.accepted],
)
def test_accepted_fields_without_effect(case: Case, name: str, value: Any):
    assert case.dialect.read({**case.body, name: value}).without_effect == (name,)
    assert case.dialect.read({**case.body, name: None}).without_effect == ()


@pytest.mark.parametrize(
    ("case", "name", "value", "said"),
    [pytest.param(case, *row, id=f"{dialect}-{row[0]}") for dialect, case in CASES.items() for row in case.refused],
)
def test_refused_fields_are_named(case: Case, name: str, value: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        case.dialect.read({**case.body, name: value})


# --- what a body means ---


MARK = {"cache_control": {"type": "ephemeral"}}
OTHER = "f" * 24
FULL_ID, OTHER_ID = f"msg_{TOKEN}", f"msg_{OTHER}"


def said(role: str, content: str = "", **more: Any) -> ClientMessage:
    return ClientMessage(role=role, content=content, **more)


def text(value: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, "text": value}


def assistant(value: str, id: str | None = None) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "id": id, "content": [text(value, "output_text")]}


def reasoning(value: str, id: str | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "reasoning", "id": id, "summary": [text(value, "summary_text")], **more}


def function_call(call_id: str, id: str | None = None) -> dict[str, Any]:
    return {**CALL_ITEM, "call_id": call_id, "id": id}


def tool_call(id: str, arguments: str = '{"a":1}') -> dict[str, Any]:
    return {**CALL, "id": id, "function": {"name": "add", "arguments": arguments}}


PLAIN = {
    "chat": ({"model": "small", "temperature": 0.5, "top_k": -1, "max_tokens": 9, "stop": "END", "seed": 3},
             {"sampling": {"temperature": 0.5, "top_k": 0}, "stop": ("END",), "seed": 3}),
    "responses": ({"model": "small", "max_output_tokens": 9, "top_p": 0.9, "stream": True, "previous_response_id": f"resp_{TOKEN}"},
                  {"sampling": {"top_p": 0.9}, "stream": True, "previous_id": f"resp_{TOKEN}"}),
    "messages": ({"model": "small", "temperature": 0.5, "top_k": 5, "stop_sequences": ["END"], "stream": True},
                 {"sampling": {"temperature": 0.5, "top_k": 5}, "stop": ("END",), "stream": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_plain_body(name: str):
    body, means = PLAIN[name]
    wanted = ModelRequest(messages=[said("user", "Hi")], model="small", max_tokens=9, **means)
    assert CASES[name].dialect.read({**CASES[name].body, **body}) == wanted


HISTORIES: list[tuple[str, dict[str, Any], list[ClientMessage]]] = [
    # Text blocks are joined, null is empty, and developer is system.
    ("chat", {"messages": [
        {"role": "developer", "content": [text("Be "), text("brief.")]},
        {"role": "user", "content": "H\ud800i", "name": "Ann"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": [text("1")], "tool_call_id": "call_1"},
    ]}, [said("system", "Be brief."), said("user", "H?i"), said("assistant", tool_calls=[CALL], ids=("call_1",)),
         said("tool", "1", tool_call_id="call_1")]),
    # Reasoning has two names, and empty arguments are an empty object.
    ("chat", {"messages": [
        {"role": "assistant", "content": "4", "reasoning_content": "2 and 2"},
        {"role": "assistant", "reasoning": "2 and 2", "tool_calls": [tool_call("call_1", "")]},
    ]}, [said("assistant", "4", reasoning="2 and 2"),
         said("assistant", reasoning="2 and 2", tool_calls=[tool_call("call_1", "{}")], ids=("call_1",))]),
    ("messages", {"system": [{**text("Be "), **MARK}, text("brief.")],
                  "messages": [{"role": "user", "content": [text("H"), {**text("i"), **MARK}]}]},
     [said("system", "Be brief."), said("user", "Hi")]),
    ("messages", {"messages": [HI, {"role": "system", "content": "Now."}, {"role": "system", "content": [text("Now.")]}, HI]},
     [said("user", "Hi"), said("system", "Now."), said("system", "Now."), said("user", "Hi")]),
    # Thinking, text and calls are one message, with a signature or without.
    ("messages", {"messages": [
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I add.", "signature": "sig_1"}, text("So."), {**USE, **MARK}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "I add.", "signature": None}, text("2")]},
        HI,
    ]}, [said("assistant", "So.", reasoning="I add.", ids=("sig_1", "toolu_1"),
              tool_calls=[tool_call("toolu_1", '{"a": 1, "b": "é"}')]),
         said("assistant", "2", reasoning="I add."), said("user", "Hi")]),
    # Results are tool messages, and the text after them is a user message.
    ("messages", {"messages": [{"role": "user", "content": [
        RESULT, {**RESULT, "tool_use_id": "toolu_2", "content": [text("3")], "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"}, text("And?"),
    ]}]}, [said("tool", "2", tool_call_id="toolu_1"), said("tool", "3", tool_call_id="toolu_2"),
           said("tool", tool_call_id="toolu_3"), said("user", "And?")]),
    ("responses", {"input": "Hi", "instructions": "Be brief."}, [said("system", "Be brief."), said("user", "Hi")]),
    ("responses", {"input": [{"type": None, "role": "developer", "content": [text("Be ", "input_text"), text("brief.", "input_text")]}]},
     [said("system", "Be brief.")]),
    # The items of one turn are one message.
    ("responses", {"input": [
        reasoning("I add.", "rs_1"), assistant("So.", "msg_1"), function_call("call_1", "fc_1"), function_call("call_2", "fc_2"),
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {"type": "function_call_output", "call_id": "call_2", "output": [text("3", "input_text")]},
        assistant("Done.", "msg_2"),
    ]}, [said("assistant", "So.", reasoning="I add.", tool_calls=[tool_call("call_1"), tool_call("call_2")],
              ids=("rs_1", "msg_1", "fc_1", "call_1", "fc_2", "call_2")),
         said("tool", "2", tool_call_id="call_1"), said("tool", "3", tool_call_id="call_2"), said("assistant", "Done.", ids=("msg_2",))]),
    # Items with the ids of two replies are two messages; those without ids belong to the turn they are in.
    ("responses", {"input": [assistant("One.", FULL_ID), assistant("Two.", OTHER_ID), function_call(f"call_{OTHER}_0")]},
     [said("assistant", "One.", ids=(FULL_ID,)),
      said("assistant", "Two.", tool_calls=[tool_call(f"call_{OTHER}_0")], ids=(OTHER_ID, f"call_{OTHER}_0"))]),
    ("responses", {"input": [reasoning("I add."), assistant("One."), function_call(f"call_{TOKEN}_0")]},
     [said("assistant", "One.", reasoning="I add.", tool_calls=[tool_call(f"call_{TOKEN}_0")], ids=(f"call_{TOKEN}_0",))]),
    # Encrypted content is an id, and whole reasoning wins over its summary.
    ("responses", {"input": [{"type": "reasoning", "summary": [], "encrypted_content": f"enc_{TOKEN}", "content": None}]},
     [said("assistant", ids=(f"enc_{TOKEN}",))]),
    ("responses", {"input": [reasoning("short", content=[text("long", "reasoning_text")])]}, [said("assistant", reasoning="long")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "messages"), HISTORIES)
def test_the_messages_of_a_history(name: str, body: dict[str, Any], messages: list[ClientMessage]):
    assert CASES[name].dialect.read({**CASES[name].body, **body}).messages == messages


INPUT_TOOL = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}, **MARK}
HOSTED = ["web_search", "mcp", "local_shell", "computer_use_preview", "shell", "apply_patch"]


def space(name: str, *tools: str) -> dict[str, Any]:
    return {"type": "namespace", "name": name, "tools": [{**FUNCTION, "name": tool} for tool in tools]}


@pytest.mark.parametrize(
    ("name", "body", "tools", "without_effect"),
    [
        ("chat", {"tools": [STRICT]}, [TOOL], ("tools.strict",)),
        ("chat", {"tools": [TOOL], "tool_choice": "none"}, [], ()),
        ("messages", {"tools": [{**INPUT_TOOL, **MARK}]}, [TOOL], ()),
        ("messages", {"tools": [{**INPUT_TOOL, "type": "custom"}], "tool_choice": {"type": "auto"}}, [TOOL], ()),
        ("messages", {"tools": [INPUT_TOOL], "tool_choice": {"type": "none"}}, [], ()),
        ("responses", {"tools": [FUNCTION]}, [TOOL], ()),
        ("responses", {"tools": [{**FUNCTION, "strict": True}]}, [TOOL], ("tools.strict",)),
        ("responses", {"tools": [FUNCTION], "tool_choice": "none"}, [], ()),
        # Tools that only OpenAI's servers or models know are left out and named, in a namespace too.
        *[("responses", {"tools": [FUNCTION, {"type": kind, "x": 1}]}, [TOOL], (f"tools.{kind}",)) for kind in HOSTED],
        ("responses", {"tools": [FUNCTION, {**space("a"), "tools": [{"type": "mcp"}]}]}, [TOOL], ("tools.mcp",)),
    ],
)
def test_tools_get_the_chat_format(name: str, body: dict[str, Any], tools: list[Any], without_effect: tuple[str, ...]):
    request = CASES[name].dialect.read({**CASES[name].body, **body})
    assert (request.tools, request.without_effect) == (tools, without_effect)


@pytest.mark.parametrize(
    "tools",
    [
        [space("a", "b__c"), space("a__b", "c")],
        [space("a", "b"), {**FUNCTION, "name": "a__b"}],
        [space("a", "b"), space("a__", "b")],
    ],
)
def test_tools_with_the_same_name_after_flattening_are_refused(tools: list[Any]):
    with pytest.raises(ConfigError, match=r"tools: two are called 'a__b.*'; rename one"):
        Responses().read({"input": [HI], "tools": tools})


def test_tools_of_a_namespace_are_functions_and_calls_name_the_namespace():
    spaces = [{**space("agents", "add"), "description": "Sub-agents."}, space("mcp__sums__", "add")]
    request = Responses().read({"input": [HI], "tools": [FUNCTION, *spaces]})
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["add", "agents__add", "mcp__sums__add"]
    calls = [make_call(i, name, "{}") for i, name in enumerate(names)]
    reply = make_reply(tool_calls=calls, finish_reason="tool_calls")
    output = Responses().whole(reply, request)["output"]
    places = [("add", None), ("add", "agents"), ("add", "mcp__sums__")]
    assert [(item["name"], item.get("namespace")) for item in output] == places
    events = [data for _, data in events_of(streamed(Responses(), reply, [], request))]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    sent_back = Responses().read({"input": [HI, *output]}).messages[1]
    assert [call["function"]["name"] for call in sent_back.tool_calls] == names


def test_a_reference_is_replaced_by_the_item_that_it_names():
    output = Responses().whole(FULL, REQUEST)["output"]
    body = {"input": [HI, *({"type": "item_reference", "id": item["id"]} for item in output)]}
    put_items(body, {item["id"]: FULL for item in output}.get)
    assert body["input"] == [HI, *output]


def test_usage_is_streamed_if_asked_for():
    def read(**body: Any) -> ModelRequest:
        return Chat().read({"messages": [HI], **body})

    assert read(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).include_usage
    assert not read(stream=True).include_usage
    assert read(stream_options={"include_usage": True}).without_effect == ("stream_options",)
    assert read(max_tokens=9, max_completion_tokens=5).max_tokens == 5
    assert b"usage" not in streamed(Chat(), FULL, pieces_of(FULL), replace(REQUEST, include_usage=False))


def test_the_fields_of_a_coding_agent():
    """As Claude Code 2.1 sends them: a system message in the middle, once as blocks and later as a text."""
    tools = [{**INPUT_TOOL, "name": f"Tool{i}", "eager_input_streaming": True} for i in range(12)]
    always = {
        "stream": True, "max_tokens": 32000, "tools": tools, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "medium"},
    }  # fmt: skip
    turn = [{"role": "assistant", "content": [USE]}, {"role": "user", "content": [RESULT]}]
    first = Messages().read({"messages": [HI, {"role": "system", "content": [{**text("Note."), **MARK}]}], **always})
    second = Messages().read({"messages": [HI, {"role": "system", "content": "Note."}, *turn], **always})
    assert first.messages == second.messages[:2] and first.tools == second.tools and len(first.tools) == 12
    assert first.without_effect == ("context_management", "metadata", "thinking", "output_config")


def test_a_body_of_count_tokens_has_no_max_tokens_and_may_end_with_the_assistant():
    request = Messages().read({"model": "small", "messages": [HI, {"role": "assistant", "content": "Hello"}]})
    assert request.max_tokens is None and len(request.messages) == 2


CONSTRAINTS = {
    "chat": {"response_format": {"type": "json_schema", "json_schema": {}}, "tool_choice": "required"},
    "responses": {
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {}}},
        "tool_choice": {"type": "function"},
    },
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": {}}}, "tool_choice": {"type": "any"}},
}
"""Formats of the answer and forced tools."""


@pytest.mark.parametrize("name", CASES)
def test_constraints_are_taken_out_of_a_body(name: str):
    case, given = CASES[name], CONSTRAINTS[name]
    for field, value in given.items():
        with pytest.raises(ConfigError, match=field):
            case.dialect.read({**case.body, field: value})
    body = {**case.body, **copy.deepcopy(given)}
    dropped = drop_constraints(body)
    assert [path.split(".")[0] for path in dropped] == [*given] and case.dialect.read(body)


@pytest.mark.parametrize("choice", ["auto", "none", {"type": "auto"}, {"type": "none"}, None, 5, "always"])
def test_nothing_else_is_taken_out(choice: Any):
    body = {
        "tool_choice": choice,
        "response_format": {"type": "text"},
        "text": {"verbosity": "low"},
        "output_config": None,
    }
    assert drop_constraints(body) == () and body["tool_choice"] == choice


@each_dialect
@settings(max_examples=40)
@given(data=st.data())
def test_hostile_bodies_raise_only_config_errors(case: Case, data: st.DataObject):
    body = data.draw(st.dictionaries(st.sampled_from(case.fields), JSON))
    messages = {case.messages: data.draw(st.lists(case.message | JSON, max_size=3))}
    for value in (body, {**body, **messages}, messages):
        with contextlib.suppress(ConfigError):
            case.dialect.read(value)


@each_dialect
def test_no_text_ends_a_line_of_a_stream_early(case: Case):
    reply = make_reply(content="a\x85b\u2028c\u2029d\x0be\x1cf\r\n\ndata: g\r")
    data = streamed(case.dialect, reply, pieces_of(reply)).decode()
    assert all(line.startswith(("data: ", "event: ", ": ping")) for line in data.splitlines() if line)


# --- what a reply is written as ---


@dataclass(frozen=True)
class Written:
    """Places in the body of `FULL`, of an empty reply and of a cut one, and what is there."""

    full: dict[str, Any]
    empty: dict[str, Any]
    cut: dict[str, Any]


WRITTEN = {
    "chat": Written(
        {"id": f"chatcmpl-{TOKEN}", "choices.0.finish_reason": "tool_calls", "choices.0.message.reasoning_content": FULL.reasoning,
         "choices.0.message.content": FULL.content, "choices.0.message.tool_calls.1.id": f"call_{TOKEN}_1",
         "usage.prompt_tokens_details.cached_tokens": 4, "usage.total_tokens": 18},
        {"choices.0.message": {"role": "assistant", "content": "", "refusal": None}, "choices.0.finish_reason": "stop"},
        {"choices.0.finish_reason": "length"},
    ),
    "responses": Written(
        {"id": f"resp_{TOKEN}", "status": "completed", "incomplete_details": None, "output.0.id": f"rs_{TOKEN}",
         "output.0.summary.0.text": FULL.reasoning, "output.1.id": f"msg_{TOKEN}", "output.2.id": f"fc_{TOKEN}_0",
         "output.3.call_id": f"call_{TOKEN}_1", "usage.input_tokens_details.cached_tokens": 4, "usage.total_tokens": 18},
        {"output.0.content.0.text": "", "status": "completed"},
        {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "output.0.status": "incomplete"},
    ),
    "messages": Written(
        {"id": f"msg_{TOKEN}", "stop_reason": "tool_use", "content.0.signature": f"sig_{TOKEN}", "content.1.text": FULL.content,
         "content.2.id": f"toolu_{TOKEN}_0", "content.2.input": {"city": "Bonn"}, "content.3.type": "tool_use",
         "usage": {"input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 7}},
        {"content": [text("")], "stop_reason": "end_turn"},
        {"stop_reason": "max_tokens"},
    ),
}  # fmt: skip


def at(body: Any, path: str) -> Any:
    return functools.reduce(lambda place, key: place[int(key) if key.isdigit() else key], path.split("."), body)


@pytest.mark.parametrize("name", CASES)
def test_a_whole_reply(name: str):
    made = FULL, make_reply(), make_reply(content="Half", finish_reason="length")
    written = WRITTEN[name]
    for reply, wanted in zip(made, (written.full, written.empty, written.cut), strict=True):
        body = CASES[name].dialect.whole(reply, REQUEST)
        assert {path: at(body, path) for path in wanted} == wanted


@each_dialect
def test_every_piece_of_a_text_is_an_event_of_its_own(case: Case):
    stream = case.dialect.stream(HEAD, REQUEST)
    stream.begin()
    for kind, piece in pieces_of(FULL):
        sent = stream.push(kind, piece)
        assert json.dumps(piece).encode() in sent, (piece, sent)


def test_the_events_of_a_response_are_numbered_and_the_last_one_has_the_whole():
    events = [*events_of(streamed(Responses(), FULL, pieces_of(FULL)))]
    assert [(name, data["sequence_number"]) for name, data in events] == [
        (d["type"], i) for i, (_, d) in enumerate(events)
    ]
    whole = Responses().whole(FULL, REQUEST)
    assert events[-1] == ("response.completed", {**events[-1][1], "response": whole})
    assert [data["item"] for name, data in events if name.endswith("item.done")] == whole["output"]
    assert [data["output_index"] for name, data in events if name.endswith("item.added")] == [0, 1, 2, 3]
    cut = make_reply(content="Half", finish_reason="length")
    events = [*events_of(streamed(Responses(), cut, pieces_of(cut)))]
    assert events[-1][0] == "response.incomplete" and events[-2][1]["item"]["status"] == "incomplete"


def test_the_response_names_what_it_follows():
    asked = {"input": [HI], "previous_response_id": f"resp_{OTHER}", "temperature": 0.5, "max_output_tokens": 9}
    body = Responses().whole(FULL, Responses().read(asked))
    assert (body["previous_response_id"], body["temperature"], body["max_output_tokens"]) == (f"resp_{OTHER}", 0.5, 9)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (429, "rate_limit_error"),
     (413, "request_too_large"), (500, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_an_error_of_anthropic_has_the_kind_of_its_status(status: int, kind: str):
    body = Messages().error(ErrorFacts(status, "server_error", None, "No."))
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}}


# --- the official clients ---


@functools.cache
def connected(package: str, kind: str, address: str) -> tuple[Wire, Any, Any]:
    """The network, the client and its package."""
    library = pytest.importorskip(package, reason="the agents extra is not installed")
    wire = Wire()
    return wire, wire.client(library, kind=kind, base_url=address), importlib.import_module(package)


@each_dialect
def test_the_client_raises_the_error_of_a_stream(case: Case):
    wire, client, package = connected(*case.client)
    stream = case.dialect.stream(HEAD, REQUEST)
    wire.status, wire.answer = 200, stream.begin() + stream.push("content", "Half") + stream.fail(FAILED)
    with pytest.raises(package.APIError, match="engine is closed"):
        [*case.ask(client, stream=True)]


@each_dialect
@pytest.mark.parametrize(("facts", "raised"), [(FAILED, "APIStatusError"), (NO_KEY, "AuthenticationError")])
def test_the_client_raises_the_error_of_a_reply(case: Case, facts: ErrorFacts, raised: str):
    wire, client, package = connected(*case.client)
    wire.status, wire.answer = facts.status, case.dialect.error(facts)
    with pytest.raises(getattr(package, raised), match=facts.message) as found:
        case.ask(client)
    assert found.value.status_code == facts.status


# A reply that is streamed is the whole one to the client, and comes back in the history as it was.


@settings(max_examples=40)
@given(replies())
def test_a_chat_completion_streams_and_comes_back(made):
    wire, client, _ = connected(*CASES["chat"].client)
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    (reply, pieces), dialect = made, Chat()
    wire.status, wire.answer = 200, dialect.whole(reply, REQUEST)
    ChatCompletion.model_validate(wire.answer)
    whole = client.chat.completions.create(model="small", messages=[HI])
    wire.answer = streamed(dialect, reply, pieces)
    for _, data in events_of(wire.answer):
        assert data == "[DONE]" or ChatCompletionChunk.model_validate(data)
    with client.chat.completions.stream(model="small", messages=[HI]) as stream:
        stream.until_done()
        assert cleaned(stream.current_completion_snapshot) == cleaned(whole)
    message = whole.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "1"} for call in message.tool_calls or []]
    client.chat.completions.create(model="small", messages=[HI, message, *results], stream=True, tools=[TOOL])
    sent = dialect.read(wire.bodies[-1]).messages
    assert [one.role for one in sent] == ["user", "assistant", *["tool"] * len(results)]
    assert_same_message(sent[1], reply, {f"call_{TOKEN}_{i}" for i in range(len(results))})
    assert sent[1].tool_calls == reply.tool_calls, "byte by byte"


@settings(max_examples=40)
@given(replies())
def test_a_response_streams_and_comes_back(made):
    wire, client, _ = connected(*CASES["responses"].client)
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    (reply, pieces), dialect, events = made, Responses(), TypeAdapter(ResponseStreamEvent)
    wire.status, wire.answer = 200, dialect.whole(reply, REQUEST)
    Response.model_validate(wire.answer)
    whole = client.responses.create(model="small", input=[HI])
    assert whole.output_text == reply.content
    wire.answer = streamed(dialect, reply, pieces)
    for _, data in events_of(wire.answer):
        events.validate_python(data)
    with client.responses.stream(model="small", input=[HI]) as stream:
        seen = [*stream]
    assert cleaned(seen[-1].response) == cleaned(whole)
    grown = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
    assert grown[-1:] == ([reply.content] if reply.content else [])
    calls = [item for item in whole.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
    client.responses.create(model="small", input=[HI, *whole.output, *results], tools=[FUNCTION])
    sent = dialect.read(wire.bodies[-1]).messages
    assert [one.role for one in sent] == ["user", "assistant", *["tool"] * len(results)]
    ids = {f"{kind}_{TOKEN}_{i}" for kind in ("fc", "call") for i in range(len(calls))}
    ids |= {f"rs_{TOKEN}", f"enc_{TOKEN}"} if reply.reasoning else set()
    ids |= {f"msg_{TOKEN}"} if reply.content or not calls else set()
    assert_same_message(sent[1], reply, ids)
    assert sent[1].tool_calls == reply.tool_calls, "byte by byte"


@settings(max_examples=40)
@given(replies())
def test_a_message_streams_and_comes_back(made):
    wire, client, _ = connected(*CASES["messages"].client)
    from anthropic.types import Message, RawMessageStreamEvent
    from pydantic import TypeAdapter

    (reply, pieces), dialect, asked = made, Messages(), {"model": "small", "max_tokens": 9}
    events = TypeAdapter(RawMessageStreamEvent)
    wire.status, wire.answer = 200, dialect.whole(reply, REQUEST)
    Message.model_validate(wire.answer)
    whole = client.messages.create(**asked, messages=[HI])
    wire.answer = streamed(dialect, reply, pieces)
    for name, data in events_of(wire.answer):
        assert name == "ping" or events.validate_python(data)
    with client.messages.stream(**asked, messages=[HI]) as stream:
        assert cleaned(stream.get_final_message()) == cleaned(whole)
    calls = [block for block in whole.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "1"} for call in calls]
    answer = {"role": "user", "content": [*results, text("And?")]}
    client.messages.create(
        **asked, messages=[HI, {"role": "assistant", "content": whole.content}, answer], tools=[INPUT_TOOL]
    )
    sent = dialect.read(wire.bodies[-1]).messages
    assert [one.role for one in sent] == ["user", "assistant", *["tool"] * len(results), "user"]
    ids = {f"toolu_{TOKEN}_{i}" for i in range(len(calls))} | ({f"sig_{TOKEN}"} if reply.reasoning else set())
    assert_same_message(sent[1], reply, ids)


def test_the_client_counts_tokens():
    wire, client, _ = connected(*CASES["messages"].client)
    wire.status, wire.answer = 200, {"input_tokens": 5}
    assert client.messages.count_tokens(model="small", messages=[HI], tools=[INPUT_TOOL]).input_tokens == 5
    assert Messages().read(wire.bodies[-1]).tools == [TOOL]
