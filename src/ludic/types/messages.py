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

    Every model call of a conversation stores its prompt this way, so a rollout's memory is linear in its turns.
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
    """The text with lone surrogates replaced: tokenizers and files refuse them, and they must not fail an episode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


_LATEX = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)
"""An opening box (also with a doubled backslash, as models write it in JSON), an escape such as `\\{`, a plain brace."""


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The text inside the last well-formed `\boxed{…}` or `\fbox{…}`, without surrounding whitespace.

    Braces may nest, escaped ones do not count, an unclosed box is skipped. None if there is no box. Takes linear time, also for
    a reply full of unclosed boxes. Parsers (replies) and envs (reference solutions) both use it.

    >>> extract_last_boxed_content(r"First \boxed{1}, no: \boxed{\frac{3}{2}}.")
    '\\frac{3}{2}'
    """
    if "box" not in raw:
        return None
    open_groups: list[int | None] = []  # where the content of an open box begins; None for a plain brace
    last: tuple[int, int] | None = None
    for token in _LATEX.finditer(raw):
        if token["box"]:
            open_groups.append(token.end())
        elif token["open"]:
            open_groups.append(None)
        elif token["close"] and open_groups:
            start = open_groups.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else raw[last[0] : last[1]].strip()
