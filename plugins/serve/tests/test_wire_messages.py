"""Anthropic Messages: what a body means, and what official clients make of the replies."""

import pytest
from hypothesis import given, settings

from ludic.http.errors import ErrorFacts
from ludic_serve.gateway.wire.canonical import ModelRequest
from ludic_serve.gateway.wire.messages import Messages
from plugins.serve.tests.dialects import (
    FULL,
    REQUEST,
    TOKEN,
    Wire,
    assert_same_message,
    cleaned,
    events_of,
    make_reply,
    pieces_of,
    replies,
    streamed,
)

MESSAGES = Messages()
HI = {"role": "user", "content": "Hi"}
FUNCTION = {"name": "add", "description": "Add.", "input_schema": {"type": "object"}}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
MARK = {"cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1, "b": "é"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


def read(**body) -> ModelRequest:
    return MESSAGES.read({"max_tokens": 9, "messages": [HI], **body})


def text(value: str) -> dict:
    return {"type": "text", "text": value}


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_plain_body():
    request = read(model="small", system="Be brief.", temperature=0.5, top_k=5, stop_sequences=["END"], stream=True)
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (request.model, request.max_tokens, request.stop) == ("small", 9, ("END",))
    assert request.sampling == {"temperature": 0.5, "top_k": 5}
    assert request.stream and request.include_usage and request.without_effect == ()


def test_blocks_are_joined_and_cache_marks_dropped():
    request = read(
        system=[{**text("Be "), **MARK}, text("brief.")],
        messages=[{"role": "user", "content": [text("H"), {**text("i"), **MARK}]}],
    )
    assert [message.content for message in request.messages] == ["Be brief.", "Hi"]


@pytest.mark.parametrize("content", ["Now.", [text("Now.")]])
def test_a_system_message_in_the_middle(content):
    messages = read(messages=[HI, {"role": "system", "content": content}, HI]).messages
    assert [(message.role, message.content) for message in messages][1] == ("system", "Now.")


def test_thinking_text_and_calls_are_one_message():
    blocks = [{"type": "thinking", "thinking": "I add.", "signature": "sig_1"}, text("Adding."), {**USE, **MARK}]
    message = read(
        messages=[HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": [RESULT]}]
    ).messages[1]
    assert (message.reasoning, message.content, message.ids) == ("I add.", "Adding.", ("sig_1", "toolu_1"))
    assert message.tool_calls == [
        {"id": "toolu_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é"}'}}
    ]


def test_thinking_without_a_signature():
    blocks = [{"type": "thinking", "thinking": "I add.", "signature": None}, text("2")]
    message = read(messages=[HI, {"role": "assistant", "content": blocks}, HI]).messages[1]
    assert (message.reasoning, message.content, message.ids) == ("I add.", "2", ())


def test_the_fields_of_a_coding_agent():
    """As Claude Code 2.1 sends them: a system message in the middle, once as blocks and later as a text."""
    tools = [{**FUNCTION, "name": f"Tool{i}", "eager_input_streaming": True} for i in range(12)]
    always = {
        "stream": True, "max_tokens": 32000, "tools": tools, "thinking": {"type": "adaptive"}, "metadata": {"user_id": "u"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "output_config": {"effort": "medium"},
    }  # fmt: skip
    first = read(messages=[HI, {"role": "system", "content": [{**text("Note."), **MARK}]}], **always)
    second = read(
        messages=[
            HI,
            {"role": "system", "content": "Note."},
            {"role": "assistant", "content": [USE]},
            {"role": "user", "content": [RESULT]},
        ],
        **always,
    )
    assert first.messages == second.messages[:2] and first.tools == second.tools and len(first.tools) == 12
    assert first.without_effect == ("context_management", "metadata", "thinking", "output_config")


def test_results_become_tool_messages_and_the_text_a_user_message():
    blocks = [RESULT, {**RESULT, "tool_use_id": "toolu_2", "content": [text("3")], "is_error": True}, text("And?")]
    found = read(messages=[HI, {"role": "assistant", "content": [USE]}, {"role": "user", "content": blocks}]).messages[
        2:
    ]
    assert [(message.role, message.content, message.tool_call_id) for message in found] == [
        ("tool", "2", "toolu_1"), ("tool", "3", "toolu_2"), ("user", "And?", None),
    ]  # fmt: skip
    empty = {"type": "tool_result", "tool_use_id": "toolu_1"}
    assert [message.content for message in read(messages=[{"role": "user", "content": [empty]}]).messages] == [""]


def test_tools_get_the_chat_format():
    assert read(tools=[{**FUNCTION, **MARK}]).tools == [TOOL]
    assert read(tools=[{**FUNCTION, "type": "custom"}], tool_choice={"type": "auto"}).tools == [TOOL]
    assert read(tools=[FUNCTION], tool_choice={"type": "none"}).tools == []
    assert read(tools=[]).tools == []


def test_a_body_of_count_tokens_has_no_max_tokens_and_may_end_with_the_assistant():
    request = MESSAGES.read({"model": "small", "messages": [HI, {"role": "assistant", "content": "Hello"}]})
    assert request.max_tokens is None and len(request.messages) == 2


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_whole_reply():
    body = MESSAGES.whole(FULL, REQUEST)
    assert (body["id"], body["stop_reason"]) == (f"msg_{TOKEN}", "tool_use")
    assert [block["type"] for block in body["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert body["content"][0]["signature"] == f"sig_{TOKEN}"
    assert (body["content"][2]["id"], body["content"][2]["input"]) == (f"toolu_{TOKEN}_0", {"city": "Bonn"})
    assert body["usage"] == {
        "input_tokens": 7, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4, "output_tokens": 7,
    }  # fmt: skip


@pytest.mark.parametrize(("finish", "stop"), [("stop", "end_turn"), ("length", "max_tokens")])
def test_stop_reasons(finish, stop):
    body = MESSAGES.whole(make_reply(finish_reason=finish), REQUEST)
    assert (body["stop_reason"], body["content"]) == (stop, [{"type": "text", "text": ""}])


def test_the_events_of_a_stream():
    events = [*events_of(streamed(MESSAGES, FULL, pieces_of(FULL)))]
    assert all(name == data["type"] for name, data in events)
    kinds = [name for name, _ in events if name != "ping"]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert list(dict.fromkeys(kinds)) == ["message_start", *block, "message_delta", "message_stop"]
    assert kinds[-8:] == [*block, *block, "message_delta", "message_stop"]
    deltas = [data["delta"]["type"] for name, data in events if name == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert deltas.count("text_delta") == 6
    assert [data["index"] for name, data in events if name == "content_block_stop"] == [0, 1, 2, 3]
    assert events[0][1]["message"]["usage"]["input_tokens"] == 11


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (401, "authentication_error"), (404, "not_found_error"), (429, "rate_limit_error"),
     (413, "request_too_large"), (500, "api_error"), (503, "overloaded_error")],
)  # fmt: skip
def test_an_error_has_the_kind_of_its_status(status, kind):
    body = MESSAGES.error(ErrorFacts(status, "server_error", None, "No."))
    assert body == {"type": "error", "error": {"type": kind, "message": "No."}}


# --- the official client -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def client(wire):
    anthropic = pytest.importorskip("anthropic", reason="the agents extra is not installed")
    return wire.client(anthropic, kind="Anthropic", base_url="http://gateway")


@pytest.fixture(scope="module")
def event_type(client):
    from anthropic.types import RawMessageStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(RawMessageStreamEvent)


@settings(max_examples=40)
@given(replies())
def test_a_streamed_reply_is_the_whole_reply_and_comes_back_as_it_was(client, wire, event_type, made):
    from anthropic.types import Message

    reply, pieces = made
    wire.answer = MESSAGES.whole(reply, REQUEST)
    Message.model_validate(wire.answer)
    whole = client.messages.create(model="small", max_tokens=9, messages=[HI])
    wire.answer = streamed(MESSAGES, reply, pieces)
    for name, data in events_of(wire.answer):
        assert name == "ping" or event_type.validate_python(data)
    with client.messages.stream(model="small", max_tokens=9, messages=[HI]) as stream:
        assert cleaned(stream.get_final_message()) == cleaned(whole)
    calls = [block for block in whole.content if block.type == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "1"} for call in calls]
    history = [
        HI,
        {"role": "assistant", "content": whole.content},
        {"role": "user", "content": [*results, text("And?")]},
    ]
    client.messages.create(model="small", max_tokens=9, messages=history, tools=[FUNCTION])
    request = MESSAGES.read(wire.bodies[-1])
    assert [message.role for message in request.messages] == ["user", "assistant", *["tool"] * len(results), "user"]
    ids = {f"toolu_{TOKEN}_{i}" for i in range(len(calls))} | ({f"sig_{TOKEN}"} if reply.reasoning else set())
    assert_same_message(request.messages[1], reply, ids)


def test_the_client_counts_tokens(client, wire):
    wire.answer = {"input_tokens": 5}
    assert client.messages.count_tokens(model="small", messages=[HI], tools=[FUNCTION]).input_tokens == 5
    assert MESSAGES.read(wire.bodies[-1]).tools == [TOOL]
