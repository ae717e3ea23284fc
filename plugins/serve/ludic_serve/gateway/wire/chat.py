"""OpenAI chat completions. Reasoning is the field `reasoning_content` of a message, as vLLM writes it and most clients read it."""

from typing import Literal

from msgspec import Struct

from ludic.http.errors import ErrorFacts
from ludic_serve.gateway.wire.canonical import (
    ACCEPTED,
    TAKES,
    UNSUPPORTED,
    ClientMessage,
    Count,
    Dialect,
    EventWriter,
    Fields,
    Function,
    JSONObject,
    ModelRequest,
    PieceKind,
    Reply,
    ReplyHead,
    flat,
    sse,
    tool_call,
)
from ludic_serve.request import NonEmpty, StreamOptions, TextPart, check_count, read_fields

# --- fields ---


class _System(Struct, tag_field="role", tag="system", kw_only=True):
    content: str | list[TextPart] | None = None


class _Developer(_System, tag="developer"):
    """Newer clients' name of the system role."""


class _User(_System, tag="user"):
    pass


class _ToolResult(_System, tag="tool"):
    tool_call_id: NonEmpty


class _CalledFunction(Struct):
    name: str
    arguments: str = ""


class _Call(Struct):
    id: NonEmpty
    function: _CalledFunction
    type: Literal["function"] = "function"


class _Assistant(_System, tag="assistant"):
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of it."""
    tool_calls: list[_Call] | None = None
    refusal: None = None
    function_call: None = None
    audio: None = None


_Message = _System | _Developer | _User | _ToolResult | _Assistant


class _Tool(Struct):
    type: Literal["function"]
    function: Function


class _Fields(Fields):
    messages: tuple[_Message, ...] = ()
    tools: tuple[_Tool, ...] = ()
    max_tokens: Count | None = None
    """The older name of the next."""
    max_completion_tokens: Count | None = None
    stop: NonEmpty | tuple[NonEmpty, ...] = ()
    stream_options: StreamOptions | None = None


def _read_message(message: _Message, where: str) -> ClientMessage:
    content = flat(message.content)
    match message:
        case _Assistant():
            calls = message.tool_calls or []
            return ClientMessage(
                role="assistant",
                content=content,
                reasoning=flat(message.reasoning_content or message.reasoning),
                tool_calls=[
                    tool_call(call.id, call.function.name, call.function.arguments, f"{where}.tool_calls")
                    for call in calls
                ],
                ids=tuple([call.id for call in calls]),
            )
        case _ToolResult():
            return ClientMessage(role="tool", content=content, tool_call_id=message.tool_call_id)
        case _User():
            return ClientMessage(role="user", content=content)
    return ClientMessage(role="system", content=content)


# --- the dialect ---


class _ChatEvents(EventWriter):
    """Chunks that a client adds up, and at last `[DONE]`."""

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": None})

    def fail(self, error: ErrorFacts) -> bytes:
        return sse(error.openai_body())

    def _opened(self, kind: PieceKind) -> bytes:
        return b""

    def _delta(self, kind: PieceKind, text: str) -> bytes:
        return self._chunk({"content" if kind == "content" else "reasoning_content": text})

    def _closed(self, kind: PieceKind, text: str, is_incomplete: bool) -> bytes:
        return self._chunk({"content": ""}) if kind == "content" and not text else b""

    def _call(self, index: int, name: str, arguments: str) -> bytes:
        id = f"call_{self.head.token}_{index}"
        start = {"index": index, "id": id, "type": "function", "function": {"name": name, "arguments": ""}}
        rest = {"index": index, "function": {"arguments": arguments}}
        return self._chunk({"tool_calls": [start]}) + self._chunk({"tool_calls": [rest]})

    def _finish(self, reply: Reply) -> bytes:
        events = self._chunk({}, reply.finish_reason)
        if self.request.include_usage:
            events += sse({**_head("chat.completion.chunk", self.head), "choices": [], "usage": _usage(reply)})
        return events + b"data: [DONE]\n\n"

    def _chunk(self, delta: JSONObject, finish_reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return sse({**_head("chat.completion.chunk", self.head), "choices": [choice]})


class Chat(Dialect):
    """`POST /v1/chat/completions`"""

    name = "chat"
    events = _ChatEvents

    def read(self, body: JSONObject) -> ModelRequest:
        fields, without_effect = read_fields(body, _Fields, ACCEPTED, UNSUPPORTED, TAKES)
        check_count(fields.messages, "messages")
        if fields.stream_options is not None and not fields.stream:
            without_effect.append("stream_options")
        return fields.request(
            [_read_message(message, f"messages[{i}]") for i, message in enumerate(fields.messages)],
            [tool.function for tool in fields.tools],
            without_effect,
            where="messages",
            stop=fields.stop,
            max_tokens=fields.max_completion_tokens or fields.max_tokens,
            include_usage=not fields.stream or bool(fields.stream_options and fields.stream_options.include_usage),
        )

    def whole(self, reply: Reply, request: ModelRequest) -> JSONObject:
        message: JSONObject = {"role": "assistant", "content": reply.content, "refusal": None}
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["content"] = reply.content or None
            message["tool_calls"] = [
                {"id": f"call_{reply.token}_{index}", "type": "function", "function": {**call["function"]}}
                for index, call in enumerate(reply.tool_calls)
            ]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reply.finish_reason}
        return {**_head("chat.completion", reply), "choices": [choice], "usage": _usage(reply)}


def _head(kind: str, reply: Reply | ReplyHead) -> JSONObject:
    return {"id": f"chatcmpl-{reply.token}", "object": kind, "created": reply.created, "model": reply.model}


def _usage(reply: Reply) -> JSONObject:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_completion_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},  # not counted apart
    }
