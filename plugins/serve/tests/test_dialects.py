"""What every dialect does alike: fields that it accepts and refuses by name, hostile bodies, and errors that its client raises."""

import contextlib
import copy
import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.http.errors import ErrorFacts
from ludic.types import ConfigError
from ludic_serve.gateway.wire.canonical import Dialect, drop_constraints
from ludic_serve.gateway.wire.chat import Chat
from ludic_serve.gateway.wire.messages import Messages
from ludic_serve.gateway.wire.responses import Responses
from ludic_serve.request import MAX_MESSAGES, MAX_TOOLS
from plugins.serve.tests.dialects import FAILED, HEAD, JSON, REQUEST, Wire, make_reply, pieces_of, streamed

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
    ("logit_bias", {"5": 1}, "logit_bias"),
    ("logprobs", True, "logprobs"),
    ("top_logprobs", 2, "top_logprobs"),
    ("functions", [TOOL["function"]], "functions"),
    ("modalities", ["audio"], "modalities"),
    ("audio", {"voice": "a"}, "audio"),
    ("web_search_options", {}, "web_search_options"),
    ("tool_choice", "required", "tool_choice='required'"),
    ("tool_choice", {"type": "function", "function": {"name": "add"}}, "tool_choice"),
    ("tools", [{"type": "custom", "custom": {"name": "x"}}], r"tools\[0\].type: Invalid enum value 'custom'"),
    ("tools", [{"type": "function", "function": {}}], r"tools\[0\].function.*name"),
    ("tools", [TOOL] * (MAX_TOOLS + 1), "tools has 257 tools"),
    ("max_tokens", 0, "max_tokens"),
    ("max_tokens", "9", "max_tokens: Expected `int"),
    ("temperature", "hot", "temperature"),
    ("stop", [""], "stop"),
    ("stream", "yes", "stream"),
    ("model", 5, "model"),
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
    ("messages", [{"role": "assistant", "function_call": {"name": "a"}}], "function_call"),
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
    ("conversation", "conv_1", "conversation"),
    ("prompt", {"id": "p"}, "prompt"),
    ("top_logprobs", 3, "top_logprobs"),
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
    ("messages", [HI], "Unknown field 'messages'"),
    ("input", [], "input must be a list with at least one message"),
    ("input", [HI] * (MAX_MESSAGES + 1), "input has 4097 messages"),
    ("input", 5, "input: Expected"),
    (
        "input",
        [{"type": "item_reference", "id": "msg_1"}],
        r"input\[0\].type: Invalid value 'item_reference'. It is message",
    ),
    ("input", [{"type": "web_search_call", "id": "ws_1"}], "web_search_call"),
    ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}], "input_image"),
    ("input", [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}], r"content\[0\].type"),
    ("input", [{"role": "tool", "content": "x"}], r"input\[0\].role: Invalid enum value 'tool'"),
    ("input", [{"type": "function_call_output", "output": "x"}], "call_id"),
    ("input", [{**CALL_ITEM, "arguments": "no"}], "input must be .*JSON object"),
    ("previous_response_id", 5, "previous_response_id"),
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
    ("container", "c", "container"),
    ("mcp_servers", [{"url": "x"}], "mcp_servers"),
    ("tool_choice", {"type": "any"}, "tool_choice"),
    ("tool_choice", {"type": "tool", "name": "add"}, "tool_choice"),
    ("tools", [{"type": "bash_20250124", "name": "bash"}], r"tools\[0\].type: Invalid enum value 'bash_20250124'"),
    ("tools", [{"type": "web_search_20250305", "name": "web_search"}], "web_search_20250305"),
    ("tools", [{"name": "add"}], "input_schema"),
    ("max_tokens", 0, "max_tokens"),
    ("stop", ["a"], "Unknown field 'stop'"),
    ("stop_sequence", ["a"], "Did you mean 'stop_sequences'?"),
    ("messages", [], "messages must be a list with at least one message"),
    ("messages", [HI] * (MAX_MESSAGES + 1), "messages has 4097 messages"),
    ("messages", [{"role": "tool", "content": "x"}], r"messages\[0\].role: Invalid value 'tool'. It is system"),
    ("messages", [HI, {"role": "assistant", "content": "The answer is ("}], "asks to continue it"),
    ("messages", [{"role": "user", "content": [{"type": "image", "source": {}}]}], r"content\[0\].type.*'image'"),
    ("messages", [{"role": "user", "content": [{"type": "document"}]}], "document"),
    ("messages", [{"role": "user", "content": [USE]}], "tool_use"),
    ("messages", [{"role": "assistant", "content": [RESULT]}, HI], "tool_result"),
    ("messages", [{"role": "assistant", "content": [{"type": "server_tool_use"}]}, HI], "server_tool_use"),
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
