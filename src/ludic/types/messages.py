"""Chat messages: plain dictionaries in the OpenAI shape, never changed once they are in a conversation."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias, overload

JSON: TypeAlias = dict[str, "JSON"] | list["JSON"] | str | int | float | bool | None

Message: TypeAlias = dict[str, Any]
"""`role` and `content`; tool messages add `tool_call_id` and `name`, assistant messages may add `tool_calls`."""

ToolCall: TypeAlias = dict[str, Any]
"""`{"id", "type": "function", "function": {"name", "arguments": <JSON string>}}`."""


class MessageView(Sequence[Message]):
    """The first `length` messages of an append-only list, without copying it.

    Every model call of a conversation stores its prompt this way, so a rollout's memory grows with its
    turns and not with their square.
    """

    __slots__ = ("_length", "_log")

    def __init__(self, log: list[Message], length: int | None = None) -> None:
        self._log = log
        self._length = len(log) if length is None else length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message]: ...
    def __getitem__(self, index: int | slice) -> Message | list[Message]:
        if isinstance(index, slice):
            return self._log[: self._length][index]
        if not -self._length <= index < self._length:
            raise IndexError(f"message {index} of {self._length}")
        return self._log[index % self._length]

    def __iter__(self) -> Iterator[Message]:
        return iter(self._log[: self._length])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (MessageView, list, tuple)):
            return len(self) == len(other) and list(self) == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def encodable(text: str) -> str:
    """Lone surrogates replaced: tokenizers and files refuse them, and one odd byte must not cost the episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


# Reading LaTeX out of a model's text: the last `\boxed{…}`.
# It lives on the floor because two packages need it that may not know each other: parsers (an answer in a reply)
# and envs (a reference answer in a worked solution).

# In this order: a box opens (`\\boxed` as well: JSON-minded models double the backslash), an escape such as `\{`
# that opens and closes nothing, a plain brace.
_TOKEN = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The text inside the last well-formed `\boxed{…}` or `\fbox{…}`, without surrounding whitespace.

    Braces may nest, escaped ones do not count, an unclosed box is skipped. None when there is no box.
    One pass over the text, so a long reply full of unclosed boxes costs no more than any other.

    >>> extract_last_boxed_content(r"First \boxed{1}, no: \boxed{\frac{3}{2}}.")
    '\\frac{3}{2}'
    """
    open_groups: list[int | None] = []  # where the content of an open box begins; None for a plain brace
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(raw):
        if token["box"]:
            open_groups.append(token.end())
        elif token["open"]:
            open_groups.append(None)
        elif token["close"] and open_groups:
            start = open_groups.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else raw[last[0] : last[1]].strip()
