"""Chat completions: what a body means, and what official clients make of the replies."""

import pytest
from hypothesis import given, settings

from ludic_serve.gateway.wire.canonical import ModelRequest
from ludic_serve.gateway.wire.chat import Chat
from plugins.serve.tests.dialects import (
    FAILED,
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

CHAT = Chat()
HI = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}


def read(**body) -> ModelRequest:
    return CHAT.read({"messages": HI, **body})


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_plain_body():
    request = read(model="small", temperature=0.5, top_k=-1, max_tokens=9, stop="END", seed=3)
    assert (request.model, request.max_tokens, request.stop, request.seed) == ("small", 9, ("END",), 3)
    assert request.sampling == {"temperature": 0.5, "top_k": 0}
    assert not request.stream and request.include_usage and request.without_effect == ()
    assert read(max_tokens=9, max_completion_tokens=5).max_tokens == 5


def test_text_blocks_are_joined_null_is_empty_and_developer_is_system():
    messages = read(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "Hi", "name": "Ann"},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "content": [{"type": "text", "text": "1"}], "tool_call_id": "call_1"},
        ]
    ).messages
    assert [(message.role, message.content) for message in messages] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", ""), ("tool", "1"),
    ]  # fmt: skip
    assert messages[2].tool_calls == [CALL] and messages[2].ids == ("call_1",)
    assert messages[3].tool_call_id == "call_1"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_has_two_names(name):
    message = read(messages=[*HI, {"role": "assistant", "content": "4", name: "2 and 2"}]).messages[1]
    assert (message.content, message.reasoning) == ("4", "2 and 2")


def test_empty_arguments_are_an_empty_object():
    call = {"id": "call_1", "function": {"name": "now", "arguments": ""}}
    message = read(messages=[*HI, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    assert message.tool_calls[0]["function"] == {"name": "now", "arguments": "{}"}


def test_lone_surrogates_in_texts_are_replaced():
    assert read(messages=[{"role": "user", "content": "a\ud800b"}]).messages[0].content == "a?b"


def test_tools_keep_the_keys_that_templates_show():
    tool = {**TOOL, "function": {**TOOL["function"], "strict": True}, "cache_control": {"type": "ephemeral"}}
    assert read(tools=[tool]).tools == [TOOL]
    assert read(tools=[tool]).without_effect == ("tools.strict",)
    assert read(tools=[tool], tool_choice="none").tools == []
    assert read(tools=[]).tools == []


def test_usage_is_streamed_if_asked_for():
    assert read(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).include_usage
    assert not read(stream=True).include_usage
    assert read(stream_options={"include_usage": True}).without_effect == ("stream_options",)


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_whole_reply():
    body = CHAT.whole(FULL, REQUEST)
    message = body["choices"][0]["message"]
    assert body["id"] == f"chatcmpl-{TOKEN}" and body["choices"][0]["finish_reason"] == "tool_calls"
    assert message["reasoning_content"] == "I look it up." and message["content"] == "One moment."
    assert [call["id"] for call in message["tool_calls"]] == [f"call_{TOKEN}_0", f"call_{TOKEN}_1"]
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 and body["usage"]["total_tokens"] == 18


def test_a_reply_without_calls_has_a_text():
    assert CHAT.whole(make_reply(), REQUEST)["choices"][0]["message"]["content"] == ""
    assert "tool_calls" not in CHAT.whole(make_reply(), REQUEST)["choices"][0]["message"]


def test_the_events_of_a_stream():
    events = [data for _, data in events_of(streamed(CHAT, FULL, pieces_of(FULL)))]
    assert events[-1] == "[DONE]" and events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 7
    assert events[-3]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "tool_calls"}
    texts = [delta["content"] for e in events[1:-2] if (delta := e["choices"][0]["delta"]).get("content")]
    assert len(texts) == 6 and "".join(texts) == FULL.content
    assert {event["id"] for event in events[:-1]} == {f"chatcmpl-{TOKEN}"}


def test_a_stream_without_usage():
    request = ModelRequest(messages=REQUEST.messages, stream=True, include_usage=False)
    assert b"usage" not in streamed(CHAT, FULL, pieces_of(FULL), request)


def test_a_reply_that_was_not_pushed_is_streamed_at_the_end():
    events = [*events_of(streamed(CHAT, FULL, []))][1:3]
    texts = [data["choices"][0]["delta"] for _, data in events]
    assert texts == [{"reasoning_content": FULL.reasoning}, {"content": FULL.content}]


def test_an_error():
    assert CHAT.error(FAILED)["error"]["code"] == "engine_closed"


# --- the official client -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def client(wire):
    openai = pytest.importorskip("openai", reason="the agents extra is not installed")
    return wire.client(openai, kind="OpenAI", base_url="http://gateway/v1")


@settings(max_examples=40)
@given(replies())
def test_a_streamed_reply_is_the_whole_reply_and_comes_back_as_it_was(client, wire, made):
    from openai.types.chat import ChatCompletion, ChatCompletionChunk

    reply, pieces = made
    wire.answer = CHAT.whole(reply, REQUEST)
    ChatCompletion.model_validate(wire.answer)
    whole = client.chat.completions.create(model="small", messages=HI)
    wire.answer = streamed(CHAT, reply, pieces)
    for _, data in events_of(wire.answer):
        assert data == "[DONE]" or ChatCompletionChunk.model_validate(data)
    with client.chat.completions.stream(model="small", messages=HI) as stream:
        stream.until_done()
        assert cleaned(stream.current_completion_snapshot) == cleaned(whole)
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "1"} for call in whole.choices[0].message.tool_calls or []
    ]
    client.chat.completions.create(
        model="small", messages=[*HI, whole.choices[0].message, *results], stream=True, tools=[TOOL]
    )
    request = CHAT.read(wire.bodies[-1])
    assert [message.role for message in request.messages] == ["user", "assistant", *["tool"] * len(results)]
    assert_same_message(request.messages[1], reply, {f"call_{TOKEN}_{i}" for i in range(len(results))})
    assert request.messages[1].tool_calls == reply.tool_calls, "byte by byte"
