"""One shape for the requests and replies of all dialects, and the ids that a reply carries.

Every reply has a token; all ids in the reply contain it. Clients send these ids back with the history, so the gateway knows which
of its replies an assistant message is, however the client spells the text.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from ludic.http.errors import ErrorFacts
from ludic.types import ConfigError, ToolCall
from ludic.types.errors import encodable
from ludic_serve.request import ONLY_AS, WITHOUT_EFFECT, Number, Whole, check_arguments, check_count, check_tools
from ludic_serve.request import TAKES as SERVER_TAKES

JSONObject = dict[str, Any]
FinishReason = Literal["stop", "length", "tool_calls"]
PieceKind = Literal["reasoning", "content"]


@dataclass(kw_only=True, slots=True)
class ClientMessage:
    """One message as a client sent it, in one form for all dialects: text blocks are joined, null is "", developer is system."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    reasoning: str = ""
    """Reasoning of an assistant message; empty if the client does not send it back."""
    tool_calls: list[ToolCall] = field(default_factory=list)
    """In the OpenAI chat format; ids and arguments (JSON text) as the client sent them."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    ids: tuple[str, ...] = ()
    """Every id in an assistant message, those of its tool calls included; the gateway may have made them."""


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
    """The events of a stream end with the token counts."""
    previous_id: str | None = None
    """The id of the reply that `messages` follow (`previous_response_id` of the Responses API)."""
    without_effect: tuple[str, ...] = ()
    """Names of accepted fields that change nothing here."""
    namespaces: Mapping[str, JSONObject] = field(default_factory=dict)
    """Places of the tools that came in a namespace: the name in `tools` -> {"namespace": …, "name": the one in it}."""


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


@dataclass(kw_only=True, slots=True)
class ReplyHead:
    """The facts of a reply that are known before its first token."""

    token: str
    model: str
    created: int
    num_prompt_tokens: int = 0
    """0 until the prompt is rendered."""


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


# --- reading, for all dialects ---

ACCEPTED = WITHOUT_EFFECT | {
    "betas", "cache_control", "client_metadata", "context_management", "diagnostics", "include", "inference_geo", "max_tool_calls",
    "parallel_tool_calls", "prediction", "prompt_cache_options", "prompt_cache_retention", "reasoning", "reasoning_effort",
    "speed", "stream_options", "thinking", "truncation", "user_profile_id", "verbosity", "workspace_id",
}  # fmt: skip
"""Fields without effect: SDKs and coding agents always send some of them."""
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **ONLY_AS, "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "min_tokens": (0,), "ignore_eos": (False,),
    "stop_token_ids": ([],), "return_token_ids": (False,), "audio": (), "web_search_options": (), "moderation": (),
    "background": (False,), "conversation": (), "prompt": (), "image": (), "access_programs": (), "container": (),
    "mcp_servers": ([],), "output_format": (), "compaction": (), "fallbacks": ([],), "fallback_credit_token": (), "thread": (),
}  # fmt: skip
"""Fields that would change the answer, and their values without effect."""
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)]
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
)  # fmt: skip


_CONSTRAINTS = ("response_format", "text.format", "output_config.format", "output_format", "tool_choice")


def drop_constraints(body: JSONObject) -> tuple[str, ...]:
    """Remove the fields that a grammar would enforce (answer formats, forced tools); returns their names."""
    dropped = []
    for path in _CONSTRAINTS:
        outer, _, name = path.rpartition(".")
        place = body.get(outer) if outer else body
        value = place.get(name) if isinstance(place, dict) else None
        is_constraint = isinstance(value, dict) and value.get("type") not in ("text", "auto", "none")
        if isinstance(place, dict) and (is_constraint or value == "required"):
            del place[name]
            dropped.append(path)
    return tuple(dropped)


class Fields(Struct, kw_only=True):
    """The fields that every API has or takes as an extension. `null` is the same as absent."""

    model: str | None = None
    stream: bool = False
    seed: Whole | None = None
    tool_choice: Any = "auto"
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Whole | None = None
    min_p: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    repetition_penalty: Number | None = None

    def sampling(self) -> JSONObject:
        named = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        return named | {"top_k": 0} if self.top_k == -1 else named  # vLLM's way to say "all"

    def request(
        self,
        messages: list[ClientMessage],
        functions: Sequence["Function"],
        without_effect: list[str],
        *,
        where: str,
        stop: str | tuple[str, ...],
        **more: Any,
    ) -> ModelRequest:
        """The request of the body; `where` is the field with the messages. ConfigError if names and ids in it are no text."""
        made = ModelRequest(
            messages=messages,
            model=self.model,
            tools=_read_tools(functions, self.tool_choice, without_effect),
            stop=(stop,) if isinstance(stop, str) else stop,
            sampling=self.sampling(),
            seed=self.seed,
            stream=self.stream,
            without_effect=tuple(without_effect),
            **more,
        )
        check_count(messages, where)
        named = [(message.ids, message.tool_calls, message.tool_call_id) for message in messages]
        try:
            msgspec.json.encode((made.model, made.previous_id, made.stop, made.tools, named))
        except (UnicodeEncodeError, OverflowError, RecursionError) as error:
            raise ConfigError(f"A name, an id or a tool in the body cannot be encoded: {error}"[:300]) from error
        return made


class Function(Struct, kw_only=True):
    """A function that the model may call."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: JSONObject | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None

    def schema(self) -> JSONObject:
        """In the OpenAI chat format, and the order of keys that models know."""
        given = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


TAKES = {**SERVER_TAKES, "tools.type": "Only functions can be offered; this server runs no tools."}


def _read_tools(functions: Sequence[Function], choice: Any, without_effect: list[str]) -> list[JSONObject]:
    """The tools in the OpenAI chat format; none with tool_choice "none"."""
    if isinstance(choice, dict) and choice.get("type") in ("auto", "none"):  # Anthropic's form
        choice = choice["type"]
    check_tools(functions, choice)
    if any(function.strict for function in functions):
        without_effect.append("tools.strict")
    return [] if choice == "none" else [function.schema() for function in functions]


def flat(content: str | list[Any] | None) -> str:
    """The text of a message, its blocks joined. Lone surrogates, which a tool may print, are replaced."""
    if content is None:
        return ""
    return encodable(content if isinstance(content, str) else "".join([block.text for block in content]))


def tool_call(id: str, name: str, arguments: str, where: str | None = None) -> ToolCall:
    """Checks the arguments if it is told where they are in the body."""
    arguments = encodable(arguments) or "{}"
    if where is not None:
        check_arguments(arguments, where)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


# --- writing, for all dialects ---

_SEPARATORS = [(text.encode(), f"\\u{ord(text):04x}".encode()) for text in "\x85\u2028\u2029"]


def sse(data: JSONObject, event: str | None = None) -> bytes:
    """One server-sent event."""
    text = msgspec.json.encode(data)
    for separator, escaped in _SEPARATORS:  # some clients take these characters for the end of a line
        text = text.replace(separator, escaped)
    return b"data: %b\n\n" % text if event is None else b"event: %b\ndata: %b\n\n" % (event.encode(), text)


class EventWriter:
    """The order of a streamed reply: reasoning, text, calls. A dialect writes the events of each part.

    A reply without calls has a text part, if an empty one: agents read the text without looking.
    """

    PING: ClassVar[bytes] = b": ping\n\n"
    """An event (or a comment) that clients ignore; sent while the model is silent."""

    def __init__(self, head: ReplyHead, request: ModelRequest) -> None:
        self.head = head
        self.request = request
        self.num_parts = 0
        """Parts that are closed, so the index of the open one."""
        self._open: PieceKind | None = None
        self._pieces: dict[PieceKind, list[str]] = {}

    def begin(self) -> bytes:
        """Events before the first text."""
        raise NotImplementedError

    def push(self, kind: PieceKind, text: str) -> bytes:
        """The next piece of text. All reasoning comes before all content."""
        if not text:
            return b""
        opening = b"" if self._open == kind else self._change(kind)
        self._pieces[kind].append(text)
        return opening + self._delta(kind, text)

    def fail(self, error: ErrorFacts) -> bytes:
        """An error in the middle of the stream; nothing follows."""
        raise NotImplementedError

    def end(self, reply: Reply) -> bytes:
        """The text that was not pushed, the tool calls, the counts and everything that closes the stream."""
        events = []
        for kind, text in self._unsent(reply):
            events.append(self.push(kind, text))
        if "content" not in self._pieces and not reply.tool_calls:
            events.append(self._change("content"))
        events.append(self._change(None, is_incomplete=is_cut(reply)))
        for index, call in enumerate(reply.tool_calls):
            events.append(self._call(index, call["function"]["name"], call["function"]["arguments"]))
            self.num_parts += 1
        return b"".join([*events, self._finish(reply)])

    def _unsent(self, reply: Reply) -> Iterable[tuple[PieceKind, str]]:
        # By position: a tokenizer with byte tokens may replace a shown character when bytes that are not UTF-8 follow it.
        texts: list[tuple[PieceKind, str]] = [("reasoning", reply.reasoning), ("content", reply.content)]
        for kind, text in texts[self._open == "content" :]:
            yield kind, text[sum(map(len, self._pieces.get(kind, ()))) :]

    def _change(self, kind: PieceKind | None, is_incomplete: bool = False) -> bytes:
        """Close the open part and open the next."""
        events = b""
        if self._open is not None:
            events = self._closed(self._open, "".join(self._pieces[self._open]), is_incomplete)
            self.num_parts += 1
        self._open = kind
        if kind is not None:
            self._pieces[kind] = []
            events += self._opened(kind)
        return events

    def _opened(self, kind: PieceKind) -> bytes:
        raise NotImplementedError

    def _delta(self, kind: PieceKind, text: str) -> bytes:
        raise NotImplementedError

    def _closed(self, kind: PieceKind, text: str, is_incomplete: bool) -> bytes:
        raise NotImplementedError

    def _call(self, index: int, name: str, arguments: str) -> bytes:
        raise NotImplementedError

    def _finish(self, reply: Reply) -> bytes:
        raise NotImplementedError


def is_cut(reply: Reply) -> bool:
    """True if the limit of tokens ended the reply within its text."""
    return reply.finish_reason == "length" and not reply.tool_calls


class Dialect:
    """One API: reads its bodies, writes its replies and errors."""

    name: ClassVar[str]
    events: ClassVar[type[EventWriter]]

    def read(self, body: JSONObject) -> ModelRequest:
        """The request in a body; ConfigError for a wrong or unsupported field, by name."""
        raise NotImplementedError

    def whole(self, reply: Reply, request: ModelRequest) -> JSONObject:
        """The body of a reply that is not streamed."""
        raise NotImplementedError

    def stream(self, head: ReplyHead, request: ModelRequest) -> EventWriter:
        return self.events(head, request)

    def error(self, error: ErrorFacts) -> JSONObject:
        return error.openai_body()
