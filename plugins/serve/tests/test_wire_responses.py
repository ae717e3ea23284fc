"""The Responses API: what a body means, and what official clients make of the replies."""

import pytest
from hypothesis import given, settings

from ludic.types import ConfigError
from ludic_serve.gateway.wire.canonical import ModelRequest
from ludic_serve.gateway.wire.responses import Responses, put_items
from plugins.serve.tests.dialects import (
    FULL,
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

RESPONSES = Responses()
HI = {"role": "user", "content": "Hi"}
OTHER = "f" * 24
FUNCTION = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": False}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}


def read(**body) -> ModelRequest:
    return RESPONSES.read({"input": [HI], **body})


def assistant(text: str, id: str | None = None) -> dict:
    return {"type": "message", "role": "assistant", "id": id, "content": [{"type": "output_text", "text": text}]}


def function_call(call_id: str, id: str | None = None) -> dict:
    return {"type": "function_call", "call_id": call_id, "id": id, "name": "add", "arguments": '{"a":1}'}


def reasoning(text: str, id: str | None = None) -> dict:
    return {"type": "reasoning", "id": id, "summary": [{"type": "summary_text", "text": text}]}


def space(name: str, tool: str) -> dict:
    return {"type": "namespace", "name": name, "tools": [{**FUNCTION, "name": tool}]}


# --- reading -----------------------------------------------------------------------------------------------------


def test_a_plain_body():
    request = read(input="Hi", model="small", instructions="Be brief.", max_output_tokens=9, top_p=0.9, stream=True)
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be brief."),
        ("user", "Hi"),
    ]
    assert (request.model, request.max_tokens, request.sampling, request.stream) == ("small", 9, {"top_p": 0.9}, True)
    assert request.include_usage and request.previous_id is None and request.without_effect == ()
    assert read(previous_response_id=f"resp_{TOKEN}").previous_id == f"resp_{TOKEN}"


def test_items_of_one_turn_are_one_message():
    items = [
        HI,
        reasoning("I add.", "rs_1"),
        assistant("Adding.", "msg_1"),
        function_call("call_1", "fc_1"),
        function_call("call_2", "fc_2"),
        {"type": "function_call_output", "call_id": "call_1", "output": "2"},
        {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "3"}]},
        assistant("Done.", "msg_2"),
    ]
    messages = read(input=items).messages
    assert [message.role for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    turn = messages[1]
    assert (turn.content, turn.reasoning) == ("Adding.", "I add.")
    assert [call["id"] for call in turn.tool_calls] == ["call_1", "call_2"]
    assert turn.tool_calls[0] == {
        "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'},
    }  # fmt: skip
    assert turn.ids == ("rs_1", "msg_1", "fc_1", "call_1", "fc_2", "call_2")
    assert [(message.content, message.tool_call_id) for message in messages[2:4]] == [("2", "call_1"), ("3", "call_2")]


def test_items_of_two_replies_are_two_messages():
    items = [HI, assistant("One.", f"msg_{TOKEN}"), assistant("Two.", f"msg_{OTHER}"), function_call(f"call_{OTHER}_0")]
    messages = read(input=items).messages
    assert [(message.content, len(message.tool_calls)) for message in messages[1:]] == [("One.", 0), ("Two.", 1)]


def test_items_without_ids_belong_to_the_turn_they_are_in():
    items = [HI, reasoning("I add."), assistant("One."), function_call(f"call_{TOKEN}_0")]
    assert [message.ids for message in read(input=items).messages] == [(), (f"call_{TOKEN}_0",)]


def test_encrypted_content_is_an_id():
    item = {"type": "reasoning", "summary": [], "encrypted_content": f"enc_{TOKEN}", "content": None}
    message = read(input=[HI, item, assistant("One.")]).messages[1]
    assert (message.ids, message.reasoning, message.content) == ((f"enc_{TOKEN}",), "", "One.")


def test_whole_reasoning_wins_over_its_summary():
    item = {**reasoning("short"), "content": [{"type": "reasoning_text", "text": "long"}]}
    assert read(input=[HI, item]).messages[1].reasoning == "long"


def test_developer_is_system_and_parts_are_joined():
    parts = [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."}]
    message = read(input=[{"type": None, "role": "developer", "content": parts}, HI]).messages[0]
    assert (message.role, message.content) == ("system", "Be brief.")


def test_tools_get_the_chat_format():
    assert read(tools=[FUNCTION]).tools == [TOOL]
    assert read(tools=[{**FUNCTION, "strict": True}]).without_effect == ("tools.strict",)
    assert read(tools=[FUNCTION], tool_choice="none").tools == []


def test_hosted_tools_are_left_out_and_named():
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "mcp", "server_label": "x"}]
    request = read(tools=[hosted[0], FUNCTION, *hosted])
    assert request.tools == [TOOL] and request.without_effect == ("tools.web_search", "tools.mcp")


@pytest.mark.parametrize("kind", ["local_shell", "computer_use_preview", "shell", "apply_patch"])
def test_tools_that_only_the_models_of_openai_know_are_left_out_and_named(kind):
    request = read(tools=[FUNCTION, {"type": kind, "display_width": 1024}])
    assert request.tools == [TOOL] and request.without_effect == (f"tools.{kind}",)


def test_hosted_tools_in_a_namespace_are_left_out_and_named():
    space = {"type": "namespace", "name": "a", "tools": [FUNCTION, {"type": "web_search"}]}
    request = read(tools=[space])
    assert [tool["function"]["name"] for tool in request.tools] == ["a__add"]
    assert request.without_effect == ("tools.web_search",)


@pytest.mark.parametrize(
    "tools",
    [
        [space("a", "b__c"), space("a__b", "c")],
        [space("a", "b"), {**FUNCTION, "name": "a__b"}],
        [space("a", "b"), space("a__", "b")],
    ],
)
def test_tools_with_the_same_name_after_flattening_are_refused(tools: list):
    with pytest.raises(ConfigError, match=r"tools: two are called 'a__b.*'; rename one"):
        read(tools=tools)


def test_tools_of_a_namespace_are_functions_and_calls_name_the_namespace():
    space = {"type": "namespace", "name": "agents", "description": "Sub-agents.", "tools": [FUNCTION]}
    request = read(tools=[FUNCTION, space, {**space, "name": "mcp__sums__"}])
    names = [tool["function"]["name"] for tool in request.tools]
    assert names == ["add", "agents__add", "mcp__sums__add"]
    reply = make_reply(
        tool_calls=[make_call(i, name, "{}") for i, name in enumerate(names)], finish_reason="tool_calls"
    )
    output = RESPONSES.whole(reply, request)["output"]
    places = [("add", None), ("add", "agents"), ("add", "mcp__sums__")]
    assert [(item["name"], item.get("namespace")) for item in output] == places
    events = [data for _, data in events_of(streamed(RESPONSES, reply, [], request))]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output
    sent_back = read(input=[HI, *output]).messages[1]
    assert [call["function"]["name"] for call in sent_back.tool_calls] == names


def test_a_reference_is_replaced_by_the_item_that_it_names():
    output = RESPONSES.whole(FULL, REQUEST)["output"]
    body = {"input": [HI, *({"type": "item_reference", "id": item["id"]} for item in output)]}
    put_items(body, {item["id"]: FULL for item in output}.get)
    assert body["input"] == [HI, *output]


# --- writing -----------------------------------------------------------------------------------------------------


def test_a_whole_reply():
    body = RESPONSES.whole(FULL, REQUEST)
    assert (body["id"], body["status"], body["incomplete_details"]) == (f"resp_{TOKEN}", "completed", None)
    kinds = [("reasoning", "rs"), ("message", "msg"), ("function_call", "fc"), ("function_call", "fc")]
    assert [(item["type"], item["id"].split("_")[0]) for item in body["output"]] == kinds
    assert [item["call_id"] for item in body["output"][2:]] == [f"call_{TOKEN}_0", f"call_{TOKEN}_1"]
    assert body["output"][0]["summary"][0]["text"] == FULL.reasoning
    assert body["usage"]["input_tokens_details"]["cached_tokens"] == 4 and body["usage"]["total_tokens"] == 18


def test_a_reply_that_was_cut_is_incomplete():
    body = RESPONSES.whole(make_reply(content="Half", finish_reason="length"), REQUEST)
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert body["output"][0]["status"] == "incomplete"


def test_a_reply_without_calls_has_a_message():
    assert RESPONSES.whole(make_reply(), REQUEST)["output"][0]["content"][0]["text"] == ""


def test_the_response_names_what_it_follows():
    request = read(previous_response_id=f"resp_{OTHER}", temperature=0.5, max_output_tokens=9)
    body = RESPONSES.whole(FULL, request)
    assert (body["previous_response_id"], body["temperature"], body["max_output_tokens"]) == (f"resp_{OTHER}", 0.5, 9)


def test_the_events_of_a_stream():
    events = [*events_of(streamed(RESPONSES, FULL, pieces_of(FULL)))]
    assert all(name == data["type"] for name, data in events)
    assert [data["sequence_number"] for _, data in events] == [*range(len(events))]
    kinds = [name.removeprefix("response.") for name, _ in events]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert list(dict.fromkeys(kinds)) == [
        "created", "in_progress", "output_item.added", "reasoning_summary_part.added", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done", "output_item.done", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done", *call[1:3], "completed",
    ]  # fmt: skip
    assert kinds[-9:] == [*call, *call, "completed"] and kinds.count("output_text.delta") == 6
    assert events[-1][1]["response"] == RESPONSES.whole(FULL, REQUEST)
    added = [data["item"] for name, data in events if name.endswith("item.done")]
    assert added == RESPONSES.whole(FULL, REQUEST)["output"]
    assert [data["output_index"] for name, data in events if name.endswith("item.added")] == [0, 1, 2, 3]


def test_a_stream_that_was_cut_ends_with_incomplete():
    reply = make_reply(content="Half", finish_reason="length")
    events = [*events_of(streamed(RESPONSES, reply, pieces_of(reply)))]
    assert events[-1][0] == "response.incomplete" and events[-2][1]["item"]["status"] == "incomplete"


# --- the official client -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire()


@pytest.fixture(scope="module")
def client(wire):
    openai = pytest.importorskip("openai", reason="the agents extra is not installed")
    return wire.client(openai, kind="OpenAI", base_url="http://gateway/v1")


@pytest.fixture(scope="module")
def event_type(client):
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(ResponseStreamEvent)


@settings(max_examples=40)
@given(replies())
def test_a_streamed_reply_is_the_whole_reply_and_comes_back_as_it_was(client, wire, event_type, made):
    from openai.types.responses import Response

    reply, pieces = made
    wire.answer = RESPONSES.whole(reply, REQUEST)
    Response.model_validate(wire.answer)
    whole = client.responses.create(model="small", input=[HI])
    assert whole.output_text == reply.content
    wire.answer = streamed(RESPONSES, reply, pieces)
    for _, data in events_of(wire.answer):
        event_type.validate_python(data)
    with client.responses.stream(model="small", input=[HI]) as stream:
        seen = [*stream]
    assert cleaned(seen[-1].response) == cleaned(whole)
    grown = [event.snapshot for event in seen if event.type == "response.output_text.delta"]
    assert grown[-1:] == ([reply.content] if reply.content else [])
    calls = [item for item in whole.output if item.type == "function_call"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "1"} for call in calls]
    client.responses.create(model="small", input=[HI, *whole.output, *results], tools=[FUNCTION])
    request = RESPONSES.read(wire.bodies[-1])
    assert [message.role for message in request.messages] == ["user", "assistant", *["tool"] * len(results)]
    ids = {f"{kind}_{TOKEN}_{i}" for kind in ("fc", "call") for i in range(len(calls))}
    ids |= {f"rs_{TOKEN}", f"enc_{TOKEN}"} if reply.reasoning else set()
    ids |= {f"msg_{TOKEN}"} if reply.content or not calls else set()
    assert_same_message(request.messages[1], reply, ids)
    assert request.messages[1].tool_calls == reply.tool_calls, "byte by byte"
