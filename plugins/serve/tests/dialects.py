"""Replies, streams and official clients for the tests of the three dialects."""

import importlib
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from ludic.http.errors import ErrorFacts
from ludic_serve.gateway.wire.canonical import ClientMessage, Dialect, ModelRequest, Reply, ReplyHead, token_in

TOKEN = "0123456789abcdef01234567"
REQUEST = ModelRequest(messages=[ClientMessage(role="user", content="Hi")], model="small", stream=True)
HEAD = ReplyHead(token=TOKEN, model="small", created=1_700_000_000, num_prompt_tokens=11)
FAILED = ErrorFacts(503, "server_error", "engine_closed", "The engine is closed.")


def make_reply(**changes: Any) -> Reply:
    facts = {"num_prompt_tokens": 11, "num_cached_tokens": 4, "num_completion_tokens": 7}
    return Reply(**{"token": TOKEN, "model": "small", "created": 1_700_000_000, **facts, **changes})


def make_call(index: int, name: str, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{TOKEN}_{index}", "type": "function", "function": {"name": name, "arguments": arguments}}


FULL = make_reply(
    reasoning="I look it up.",
    content="One moment.",
    tool_calls=[make_call(0, "look_up", '{"city":  "Bonn"}'), make_call(1, "add", '{"a": 1, "b": [2, null]}')],
    finish_reason="tool_calls",
)

TEXT = st.text(
    st.sampled_from('ab \n\r\t"\\{}<:é\u0085\u2028\u2029\x00\x1c\U0001f600') | st.characters(codec="utf-8"), max_size=12
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)


@st.composite
def replies(draw: Any) -> tuple[Reply, list[tuple[str, str]]]:
    """A reply, and the pieces in which its text is streamed."""
    reasoning, content = ([*draw(st.lists(TEXT, max_size=4))] for _ in range(2))
    objects = draw(st.lists(st.dictionaries(TEXT, JSON, max_size=3), max_size=3))
    spaced = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,", " :")]))
    calls = [make_call(i, f"tool_{i}", json.dumps(one, separators=spaced)) for i, one in enumerate(objects)]
    reply = make_reply(
        reasoning="".join(reasoning),
        content="".join(content),
        tool_calls=calls,
        finish_reason=draw(st.sampled_from(["tool_calls", "length"] if calls else ["stop", "length"])),
    )
    return reply, [("reasoning", piece) for piece in reasoning] + [("content", piece) for piece in content]


def streamed(dialect: Dialect, reply: Reply, pieces: list[tuple[str, str]], request: ModelRequest = REQUEST) -> bytes:
    stream = dialect.stream(HEAD, request)
    return b"".join(
        [stream.begin(), stream.PING, *(stream.push(*piece) for piece in pieces), stream.PING, stream.end(reply)]
    )


def pieces_of(reply: Reply) -> list[tuple[str, str]]:
    """Two characters at a time."""
    return [
        (kind, text[at : at + 2])
        for kind, text in (("reasoning", reply.reasoning), ("content", reply.content))
        for at in range(0, len(text), 2)
    ]


def events_of(data: bytes) -> Iterator[tuple[str | None, Any]]:
    """The named events of a stream; the data of `[DONE]` is that text."""
    for block in data.decode().split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n") if not line.startswith(":"))
        if "data" in fields:
            yield fields.get("event"), fields["data"] if fields["data"] == "[DONE]" else json.loads(fields["data"])


class Wire:
    """An HTTP server in the place of the network: keeps the bodies it gets and answers what it is told to."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.answer: dict[str, Any] | bytes = b""
        self.status = 200

    def client(self, package: Any, **options: Any) -> Any:
        """An official client that is connected to it."""
        library = importlib.import_module(package.DefaultHttpxClient.__mro__[1].__module__.split(".")[0])

        def respond(request: Any) -> Any:
            self.bodies.append(json.loads(request.content))
            if isinstance(self.answer, bytes):
                return library.Response(self.status, headers={"content-type": "text/event-stream"}, content=self.answer)
            return library.Response(self.status, json=self.answer)

        http_client = library.Client(transport=library.MockTransport(respond))
        return getattr(package, options.pop("kind"))(api_key="key", http_client=http_client, max_retries=0, **options)


def assert_same_message(message: ClientMessage, reply: Reply, ids: set[str]) -> None:
    """The message of a history is that reply, and has those ids, each with the reply's token."""
    assert (message.role, message.content, message.reasoning) == ("assistant", reply.content, reply.reasoning)
    assert [read_call(call) for call in message.tool_calls] == [read_call(call) for call in reply.tool_calls]
    assert {*message.ids} == ids
    assert all(token_in(id) == reply.token for id in message.ids)


def read_call(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


def cleaned(value: Any) -> Any:
    """An official client's object as plain data, without null and what a client adds while it reads a stream."""
    if hasattr(value, "to_dict"):
        value = value.to_dict(mode="json")
    if isinstance(value, dict):
        added = {"parsed", "parsed_arguments", "parsed_output"} | ({"index"} if "function" in value else set())
        return {key: cleaned(item) for key, item in value.items() if key not in added and item is not None}
    return [cleaned(item) for item in value] if isinstance(value, list) else value
