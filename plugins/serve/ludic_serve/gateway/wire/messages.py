"""The Anthropic Messages API, also its count_tokens bodies. Reasoning is a thinking block, and its signature is an id."""

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from msgspec import Struct

from ludic.http.errors import ErrorFacts
from ludic.types import ConfigError
from ludic.util.files import parse_json
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
from ludic_serve.request import NonEmpty, TextPart, check_count, read_fields, unsupported

_TAKES = TAKES | {
    "role": "It is system, user or assistant.",
    "type": "This server reads only text, thinking and tool use.",
}
_encode = json.JSONEncoder(ensure_ascii=False).encode
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ERROR_KINDS = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip
"""Kinds of errors by HTTP status; others are invalid_request_error below 500 and api_error from there."""


# --- fields ---


class _Text(Struct, tag="text"):
    text: str


class _Thinking(Struct, tag="thinking"):
    thinking: str
    signature: str | None = None


class _ToolUse(Struct, tag="tool_use"):
    id: NonEmpty
    name: str
    input: JSONObject = {}


class _ToolResult(Struct, tag="tool_result"):
    tool_use_id: NonEmpty
    content: str | list[TextPart] | None = None


class _System(Struct, tag_field="role", tag="system"):
    content: str | list[TextPart]


class _User(Struct, tag_field="role", tag="user"):
    content: str | list[_Text | _ToolResult]


class _Assistant(Struct, tag_field="role", tag="assistant"):
    content: str | list[_Text | _Thinking | _ToolUse]


_Message = _System | _User | _Assistant


class _Tool(Function, kw_only=True):
    type: Literal["custom"] | None = None
    input_schema: JSONObject

    def __post_init__(self) -> None:
        self.parameters = self.input_schema


class _Fields(Fields):
    messages: tuple[_Message, ...] = ()
    tools: tuple[_Tool, ...] = ()
    system: str | list[TextPart] | None = None
    max_tokens: Count | None = None
    """Required by the API, but not for counting."""
    stop_sequences: tuple[NonEmpty, ...] = ()
    output_config: JSONObject | None = None


def _read_user(message: _User) -> list[ClientMessage]:
    """The tools' results, then the text."""
    if isinstance(message.content, str):
        return [ClientMessage(role="user", content=flat(message.content))]
    results = [block for block in message.content if isinstance(block, _ToolResult)]
    texts = [block for block in message.content if isinstance(block, _Text)]
    found = [ClientMessage(role="tool", content=flat(one.content), tool_call_id=one.tool_use_id) for one in results]
    return [*found, ClientMessage(role="user", content=flat(texts))] if texts or not results else found


def _read_assistant(message: _Assistant) -> ClientMessage:
    if isinstance(message.content, str):
        return ClientMessage(role="assistant", content=flat(message.content))
    thinking = [block for block in message.content if isinstance(block, _Thinking)]
    uses = [block for block in message.content if isinstance(block, _ToolUse)]
    return ClientMessage(
        role="assistant",
        content=flat([block for block in message.content if isinstance(block, _Text)]),
        reasoning=flat("".join([block.thinking for block in thinking])),
        tool_calls=[tool_call(use.id, use.name, _encode(use.input)) for use in uses],
        ids=tuple([block.signature for block in thinking if block.signature] + [use.id for use in uses]),
    )


def _read_messages(messages: Sequence[_Message]) -> list[ClientMessage]:
    check_count(messages, "messages")
    found: list[ClientMessage] = []
    for message in messages:
        if isinstance(message, _User):
            found += _read_user(message)
        elif isinstance(message, _Assistant):
            found.append(_read_assistant(message))
        else:
            found.append(ClientMessage(role="system", content=flat(message.content)))
    return found


# --- the dialect ---


class _MessagesEvents(EventWriter):
    """The message without content, the events of each block, then the stop reason and the counts."""

    PING: ClassVar[bytes] = sse({"type": "ping"}, "ping")

    def begin(self) -> bytes:
        usage = {"input_tokens": self.head.num_prompt_tokens, "output_tokens": 0}
        return _event("message_start", message=_message(self.head, None, [], usage))

    def fail(self, error: ErrorFacts) -> bytes:
        return sse(_error(error), "error")

    def _opened(self, kind: PieceKind) -> bytes:
        if kind == "reasoning":
            return self._start({"type": "thinking", "thinking": "", "signature": ""})
        return self._start({"type": "text", "text": ""})

    def _delta(self, kind: PieceKind, text: str) -> bytes:
        if kind == "reasoning":
            return self._grow({"type": "thinking_delta", "thinking": text})
        return self._grow({"type": "text_delta", "text": text})

    def _closed(self, kind: PieceKind, text: str, is_incomplete: bool) -> bytes:
        signed = {"type": "signature_delta", "signature": f"sig_{self.head.token}"}
        return (self._grow(signed) if kind == "reasoning" else b"") + self._stop()

    def _call(self, index: int, name: str, arguments: str) -> bytes:
        start = self._start(_tool_use(self.head.token, index, name, {}))
        return start + self._grow({"type": "input_json_delta", "partial_json": arguments}) + self._stop()

    def _finish(self, reply: Reply) -> bytes:
        delta = {"stop_reason": _STOP_REASONS[reply.finish_reason], "stop_sequence": None}
        return _event("message_delta", delta=delta, usage=_usage(reply)) + _event("message_stop")

    def _start(self, block: JSONObject) -> bytes:
        return _event("content_block_start", index=self.num_parts, content_block=block)

    def _grow(self, delta: JSONObject) -> bytes:
        return _event("content_block_delta", index=self.num_parts, delta=delta)

    def _stop(self) -> bytes:
        return _event("content_block_stop", index=self.num_parts)


class Messages(Dialect):
    """`POST /v1/messages` and `/v1/messages/count_tokens`"""

    name = "messages"
    events = _MessagesEvents

    def read(self, body: JSONObject) -> ModelRequest:
        fields, without_effect = read_fields(body, _Fields, ACCEPTED, UNSUPPORTED, _TAKES)
        if fields.output_config is not None:
            if fields.output_config.get("format") is not None:
                raise unsupported("output_config.format", fields.output_config["format"])
            without_effect.append("output_config")
        messages = _read_messages(fields.messages)
        if messages[-1].role == "assistant" and fields.max_tokens is not None:
            raise ConfigError(
                "messages: the last one is the assistant's, which asks to continue it; this server does not. "
                "End with a user message."
            )
        if fields.system is not None:
            messages.insert(0, ClientMessage(role="system", content=flat(fields.system)))
        return fields.request(
            messages,
            fields.tools,
            without_effect,
            where="messages",
            stop=fields.stop_sequences,
            max_tokens=fields.max_tokens,
        )

    def whole(self, reply: Reply, request: ModelRequest) -> JSONObject:
        content: list[JSONObject] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": f"sig_{reply.token}"})
        if reply.content or not reply.tool_calls:
            content.append({"type": "text", "text": reply.content})
        for index, call in enumerate(reply.tool_calls):
            function = call["function"]
            content.append(_tool_use(reply.token, index, function["name"], parse_json(function["arguments"])))
        stop = _STOP_REASONS[reply.finish_reason]
        return _message(reply, stop, content, _usage(reply))

    def error(self, error: ErrorFacts) -> JSONObject:
        return _error(error)


def _error(error: ErrorFacts) -> JSONObject:
    kind = _ERROR_KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _message(
    reply: Reply | ReplyHead, stop_reason: str | None, content: list[JSONObject], usage: JSONObject
) -> JSONObject:
    return {
        "id": f"msg_{reply.token}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": content,
        "stop_reason": stop_reason,
        "stop_sequence": None,
        "usage": {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0, **usage},
    }


def _tool_use(token: str, index: int, name: str, input: JSONObject) -> JSONObject:
    return {"type": "tool_use", "id": f"toolu_{token}_{index}", "name": name, "input": input}


def _usage(reply: Reply) -> JSONObject:
    """The API counts cached tokens apart."""
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "output_tokens": reply.num_completion_tokens,
    }
