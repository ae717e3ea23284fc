"""The OpenAI Responses API. A turn of the model is several items there (reasoning, a message, calls), and one message here.

Reasoning is an item whose summary is the whole text.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct, structs

from ludic.http.errors import ErrorFacts, RequestRefused
from ludic.types import ConfigError
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
    is_cut,
    sse,
    token_in,
    tool_call,
)
from ludic_serve.request import NonEmpty, check_count, read_fields, unsupported

_TAKES = TAKES | {
    "role": "It is system, developer, user or assistant.",
    "type": "It is message, reasoning, function_call, function_call_output or item_reference; this server reads only text.",
    "tools.type": "It is function or namespace; tools that only OpenAI's models know are left out.",
}
_HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "local_shell", "shell", "apply_patch", "computer",
)  # fmt: skip
"""Tools that OpenAI's servers run or only its models know; of some there are versions, such as web_search_2025_08_26."""
_TEXT = {"format": {"type": "text"}}


# --- fields ---


class _Part(Struct):
    type: Literal["input_text", "output_text", "text"]
    text: str


class _ReasoningPart(Struct):
    type: Literal["summary_text", "reasoning_text"]
    text: str


class _Message(Struct, tag="message"):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part] | None = None
    id: str | None = None


class _Reasoning(Struct, tag="reasoning"):
    summary: list[_ReasoningPart] | None = None
    content: list[_ReasoningPart] | None = None
    id: str | None = None
    encrypted_content: str | None = None


class _Call(Struct, tag="function_call"):
    call_id: NonEmpty
    name: str
    arguments: str = ""
    id: str | None = None
    namespace: str | None = None


class _Output(Struct, tag="function_call_output"):
    call_id: NonEmpty
    output: str | list[_Part]


_OfModel = _Message | _Reasoning | _Call
_Item = _OfModel | _Output


class _Tool(Function, kw_only=True, tag="function"):
    pass


class _Namespace(Struct, tag="namespace"):
    name: NonEmpty
    tools: tuple[_Tool, ...] = ()


class _Fields(Fields):
    input: str | tuple[_Item, ...] = ()
    tools: tuple[_Tool | _Namespace, ...] = ()
    instructions: str | None = None
    max_output_tokens: Count | None = None
    previous_response_id: NonEmpty | None = None
    stop: NonEmpty | tuple[NonEmpty, ...] = ()
    """Not in OpenAI's API; vLLM has it."""
    text: JSONObject | None = None
    include: tuple[str, ...] | None = None


def _read_items(items: Sequence[_Item]) -> list[ClientMessage]:
    found: list[ClientMessage] = []
    turn: list[_OfModel] = []
    tokens: set[str] = set()
    for item in items:
        if isinstance(item, _Output):
            message = ClientMessage(role="tool", content=flat(item.output), tool_call_id=item.call_id)
        elif isinstance(item, _Message) and item.role != "assistant":
            message = ClientMessage(role="user" if item.role == "user" else "system", content=flat(item.content))
        else:
            new = {token for id in _ids(item) if (token := token_in(id)) is not None}
            if new and tokens and not new & tokens:  # two replies follow each other
                found.append(_read_turn(turn))
                turn, tokens = [], set()
            turn.append(item)
            tokens |= new
            continue
        if turn:
            found.append(_read_turn(turn))
            turn, tokens = [], set()
        found.append(message)
    return [*found, _read_turn(turn)] if turn else found


def _with_type(item: Any) -> Any:
    has_none = isinstance(item, dict) and "role" in item and item.get("type") is None
    return {**item, "type": "message"} if has_none else item


def put_items(body: JSONObject, find: Callable[[str], Reply | None]) -> None:
    """Replace the references in a body by the items that they name; `find` gives the reply that carries an id."""
    items = body.get("input")
    items = items if isinstance(items, list) else []
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            id = str(item.get("id"))
            reply = find(id)
            of_reply = {} if reply is None else {one["id"]: one for one in _output(reply, {})}
            if id not in of_reply:
                raise RequestRefused(404, "item_not_found", f"input[{index}]: this session has no item {id!r:.80}.")
            items[index] = of_reply[id]


# --- tools ---


def _flat_name(namespace: str | None, name: str) -> str:
    """A template knows functions only, so those of a namespace have its name in theirs."""
    return name if namespace is None else f"{namespace.removesuffix('__')}__{name}"


def _flat_tools(tools: Sequence[_Tool | _Namespace]) -> tuple[list[_Tool], dict[str, JSONObject]]:
    """The functions, and the place of those that are in a namespace by their flat names."""
    functions: list[_Tool] = []
    places: dict[str, JSONObject] = {}
    for tool in tools:
        if isinstance(tool, _Tool):
            functions.append(tool)
            continue
        for inner in tool.tools:
            places[flat := _flat_name(tool.name, inner.name)] = {"namespace": tool.name, "name": inner.name}
            functions.append(structs.replace(inner, name=flat))
    return functions, places


def _check_names(functions: Sequence[_Tool]) -> None:
    for name, count in Counter(function.name for function in functions).items():
        if count > 1:
            raise ConfigError(f"tools: two are called {name!r:.100}; rename one.")


def _without_hosted(tools: list[Any], hosted: dict[str, None]) -> list[Any]:
    """The tools without `_HOSTED` ones, whose fields `hosted` gets."""
    own = []
    for tool in tools:
        if isinstance(tool, dict) and str(tool.get("type")).startswith(_HOSTED):
            hosted[f"tools.{tool['type']}"] = None
        elif isinstance(tool, dict) and isinstance(tool.get("tools"), list):
            own.append({**tool, "tools": _without_hosted(tool["tools"], hosted)})
        else:
            own.append(tool)
    return own


def _ids(item: _OfModel) -> list[str]:
    if isinstance(item, _Call):
        return [item.id, item.call_id] if item.id else [item.call_id]
    ids = [item.id, item.encrypted_content] if isinstance(item, _Reasoning) else [item.id]
    return [id for id in ids if id]


def _read_turn(items: Sequence[_OfModel]) -> ClientMessage:
    calls = [item for item in items if isinstance(item, _Call)]
    return ClientMessage(
        role="assistant",
        content="".join([flat(item.content) for item in items if isinstance(item, _Message)]),
        reasoning="".join([flat(item.content or item.summary) for item in items if isinstance(item, _Reasoning)]),
        tool_calls=[
            tool_call(call.call_id, _flat_name(call.namespace, call.name), call.arguments, "input") for call in calls
        ],
        ids=tuple([id for item in items for id in _ids(item)]),
    )


# --- the dialect ---


class _ResponsesEvents(EventWriter):
    """Numbered events: each item and each part of it is added, grows and is done; the last event has the whole response."""

    def __init__(self, head: ReplyHead, request: ModelRequest) -> None:
        super().__init__(head, request)
        self._num_events = 0

    def begin(self) -> bytes:
        response = _response(self.head, self.request, "in_progress", [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def fail(self, error: ErrorFacts) -> bytes:
        # OpenAI documents the flat form; its client raises on the other.
        return self._event("error", code=error.code, message=error.message, param=None, **error.openai_body())

    def _opened(self, kind: PieceKind) -> bytes:
        if kind == "reasoning":
            item = _reasoning(self.head.token, "", "in_progress") | {"summary": []}
            added = self._item("added", item)
            return added + self._part("reasoning_summary_part.added", kind, part=_summary(""))
        added = self._item("added", _message(self.head.token, "", "in_progress") | {"content": []})
        return added + self._part("content_part.added", kind, part=_text(""))

    def _delta(self, kind: PieceKind, text: str) -> bytes:
        if kind == "reasoning":
            return self._part("reasoning_summary_text.delta", kind, delta=text)
        return self._part("output_text.delta", kind, delta=text, logprobs=[])

    def _closed(self, kind: PieceKind, text: str, is_incomplete: bool) -> bytes:
        if kind == "reasoning":
            done = self._part("reasoning_summary_text.done", kind, text=text)
            done += self._part("reasoning_summary_part.done", kind, part=_summary(text))
            return done + self._item("done", _reasoning(self.head.token, text))
        done = self._part("output_text.done", kind, text=text, logprobs=[])
        done += self._part("content_part.done", kind, part=_text(text))
        return done + self._item(
            "done", _message(self.head.token, text, "incomplete" if is_incomplete else "completed")
        )

    def _call(self, index: int, name: str, arguments: str) -> bytes:
        item = _call(self.head.token, index, name, arguments, self.request.namespaces)
        at = {"item_id": item["id"], "output_index": self.num_parts}
        events = self._item("added", item | {"arguments": "", "status": "in_progress"})
        events += self._event("response.function_call_arguments.delta", **at, delta=arguments)
        events += self._event("response.function_call_arguments.done", **at, name=item["name"], arguments=arguments)
        return events + self._item("done", item)

    def _finish(self, reply: Reply) -> bytes:
        response = _whole(reply, self.request)
        return self._event(f"response.{response['status']}", response=response)

    def _item(self, what: Literal["added", "done"], item: JSONObject) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=self.num_parts, item=item)

    def _part(self, event: str, kind: PieceKind, **fields: Any) -> bytes:
        """An event of the only part of an item."""
        id, index = ("rs", "summary_index") if kind == "reasoning" else ("msg", "content_index")
        at = {"item_id": f"{id}_{self.head.token}", "output_index": self.num_parts, index: 0}
        return self._event(f"response.{event}", **at, **fields)

    def _event(self, event: str, **fields: Any) -> bytes:
        self._num_events += 1
        return sse({"type": event, "sequence_number": self._num_events - 1, **fields}, event)


class Responses(Dialect):
    """`POST /v1/responses`"""

    name = "responses"
    events = _ResponsesEvents

    def read(self, body: JSONObject) -> ModelRequest:
        items, tools = body.get("input"), body.get("tools")
        hosted: dict[str, None] = {}
        if isinstance(items, list):  # the type of a message may be missing
            body = {**body, "input": [_with_type(item) for item in items]}
        if isinstance(tools, list):
            body = {**body, "tools": _without_hosted(tools, hosted)}
        fields, without_effect = read_fields(body, _Fields, ACCEPTED, UNSUPPORTED, _TAKES)
        if fields.text is not None:
            if fields.text.get("format") not in (None, _TEXT["format"]):
                raise unsupported("text.format", fields.text["format"])
            without_effect.append("text")
        if fields.include is not None:
            if "message.output_text.logprobs" in fields.include:
                raise unsupported("include", [*fields.include])
            without_effect.append("include")
        if isinstance(fields.input, str):
            messages = [ClientMessage(role="user", content=flat(fields.input))]
        else:
            check_count(fields.input, "input")
            messages = _read_items(fields.input)
        if fields.instructions is not None:
            messages.insert(0, ClientMessage(role="system", content=flat(fields.instructions)))
        without_effect += hosted
        functions, namespaces = _flat_tools(fields.tools)
        request = fields.request(
            messages,
            functions,
            without_effect,
            where="input",
            stop=fields.stop,
            max_tokens=fields.max_output_tokens,
            previous_id=fields.previous_response_id,
            namespaces=namespaces,
        )
        _check_names(functions)
        return request

    def whole(self, reply: Reply, request: ModelRequest) -> JSONObject:
        return _whole(reply, request)


def _whole(reply: Reply, request: ModelRequest) -> JSONObject:
    status = "incomplete" if reply.finish_reason == "length" else "completed"
    usage = {
        "input_tokens": reply.num_prompt_tokens,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": reply.num_completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
        "total_tokens": reply.num_prompt_tokens + reply.num_completion_tokens,
    }
    return _response(reply, request, status, _output(reply, request.namespaces), usage)


def _output(reply: Reply, namespaces: Mapping[str, JSONObject]) -> list[JSONObject]:
    """The items of a reply."""
    output = []
    if reply.reasoning:
        output.append(_reasoning(reply.token, reply.reasoning))
    if reply.content or not reply.tool_calls:
        output.append(_message(reply.token, reply.content, "incomplete" if is_cut(reply) else "completed"))
    for index, call in enumerate(reply.tool_calls):
        function = call["function"]
        output.append(_call(reply.token, index, function["name"], function["arguments"], namespaces))
    return output


def _reasoning(token: str, text: str, status: str = "completed") -> JSONObject:
    # Clients that keep nothing on the server leave ids out, but send the encrypted content back.
    item = {"id": f"rs_{token}", "type": "reasoning", "summary": [_summary(text)], "status": status}
    return item | {"encrypted_content": f"enc_{token}"}


def _message(token: str, text: str, status: str) -> JSONObject:
    return {"id": f"msg_{token}", "type": "message", "role": "assistant", "status": status, "content": [_text(text)]}


def _call(token: str, index: int, name: str, arguments: str, namespaces: Mapping[str, JSONObject]) -> JSONObject:
    ids = {"id": f"fc_{token}_{index}", "type": "function_call", "call_id": f"call_{token}_{index}"}
    return ids | namespaces.get(name, {"name": name}) | {"arguments": arguments, "status": "completed"}


def _summary(text: str) -> JSONObject:
    return {"type": "summary_text", "text": text}


def _text(text: str) -> JSONObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _response(
    reply: Reply | ReplyHead, request: ModelRequest, status: str, output: list[JSONObject], usage: JSONObject | None
) -> JSONObject:
    return {
        "id": f"resp_{reply.token}",
        "object": "response",
        "created_at": reply.created,
        "status": status,
        "model": reply.model,
        "output": output,
        "usage": usage,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "previous_response_id": request.previous_id,
        "max_output_tokens": request.max_tokens,
        "temperature": request.sampling.get("temperature"),
        "top_p": request.sampling.get("top_p"),
        "instructions": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],  # the client knows them
        "text": _TEXT,
        "truncation": "disabled",
    }
