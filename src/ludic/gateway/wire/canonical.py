"""One shape for the requests and replies of all dialects, and the ids that a reply carries.

Every reply has a token; all ids in the reply contain it. Clients send these ids back with the history, so the gateway knows which
of its replies an assistant message is, however the client spells the text.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

from ludic.inference.serving.request import ErrorFacts
from ludic.types import ToolCall

JSONObject = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls"]
PieceKind = Literal["reasoning", "content"]


@dataclass(kw_only=True, slots=True)
class ClientMessage:
    """One message as a client sent it, in one form for all dialects: text blocks are joined, null is "", developer is system."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    """Of an assistant message; empty if the client does not send it back."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """In the OpenAI chat format; ids and arguments (JSON text) as the client sent them."""
    tool_call_id: str | None = None
    """Of a tool message: the call that it answers."""
    ids: tuple[str, ...] = ()
    """Of an assistant message: every id in it, those of its tool calls included, which the gateway may have made."""


@dataclass(kw_only=True, slots=True)
class ModelRequest:
    """One model call as a client asked for it."""

    messages: list[ClientMessage]
    model: str | None = None
    tools: list[JSONObject] = field(default_factory=list)
    """In the OpenAI chat format; empty if the client asked for none to be called."""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: JSONObject = field(default_factory=dict)
    """Settings of `SamplingParams` that the body names: temperature, top_p, top_k, min_p and the penalties."""
    seed: int | None = None
    stream: bool = False
    include_usage: bool = True
    """Whether the events of a stream end with the token counts."""
    previous_id: str | None = None
    """The id of the reply that `messages` follow (`previous_response_id` of the Responses API)."""
    without_effect: tuple[str, ...] = ()
    """Names of accepted fields that change nothing here."""


@dataclass(kw_only=True, slots=True)
class Reply:
    """A model's answer, before a dialect writes it."""

    token: str
    """Part of every id in the reply; see `new_token`."""
    model: str
    """The name that the client asked for."""
    created: int
    """Unix time in seconds."""
    reasoning: str = ""
    content: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """Their ids are `f"call_{token}_{index}"`; a dialect may write another prefix."""
    finish_reason: FinishReason = "stop"
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens that are the history of the session."""
    num_completion_tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyHead:
    """What is known of a reply before its first token."""

    token: str
    model: str
    created: int
    num_prompt_tokens: int = 0


class EventStream(Protocol):
    """Writes one streamed reply as server-sent events, in a dialect."""

    PING: ClassVar[bytes]
    """An event (or a comment) that clients ignore; sent while the model is silent."""

    def begin(self) -> bytes:
        """Events before the first text."""
        ...

    def push(self, kind: PieceKind, text: str) -> bytes:
        """The next piece of text. All reasoning comes before all content."""
        ...

    def end(self, reply: Reply) -> bytes:
        """The tool calls, the counts and everything that closes the stream. The pieces add up to the reply's texts."""
        ...

    def fail(self, error: ErrorFacts) -> bytes:
        """An error in the middle of the stream; nothing follows."""
        ...


class Dialect(Protocol):
    """One API: reads its bodies, writes its replies and errors."""

    name: ClassVar[str]

    def read(self, body: JSONObject) -> ModelRequest:
        """ConfigError for a wrong or unsupported field, by name."""
        ...

    def whole(self, reply: Reply, request: ModelRequest) -> JSONObject: ...

    def stream(self, head: ReplyHead, request: ModelRequest) -> EventStream: ...

    def error(self, error: ErrorFacts) -> JSONObject: ...


# --- ids ---

_MINTED = re.compile(r"(?:[a-z]+[_-])?([0-9a-f]{24})(?:_\d+)?\Z")


def new_token() -> str:
    """A reply's token: 24 random hex digits."""
    return os.urandom(12).hex()


def token_in(id: str) -> str | None:
    """The reply's token in an id that a dialect made from it; None for an id of another form."""
    found = _MINTED.match(id)
    return None if found is None else found[1]


def tokens_in(message: ClientMessage) -> Iterator[str]:
    """The tokens of replies whose ids the message has."""
    return (token for id in message.ids if (token := token_in(id)) is not None)
