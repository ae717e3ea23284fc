"""The text of a completion while its tokens arrive, in pieces that stay as they are."""

from collections.abc import Callable, Sequence


class TextStream:
    """The text of a growing completion, in pieces that later tokens cannot change.

    Held back are half a character, what may turn out to be a stop string, and, from the first of the characters
    `hold_from` on, everything: that may be a tool call.
    """

    def __init__(self, decode: Callable[[list[int]], str], *, stops: Sequence[str] = (), hold_from: str = "") -> None:
        self._decode = decode
        self._stops = stops
        self._hold_from = hold_from
        self._ids: list[int] = []
        self._start = self._end = 0
        """The tokens of the last piece of text: later tokens are decoded together with them."""
        self._text = ""
        self._num_shown = 0

    @property
    def shown(self) -> str:
        return self._text[: self._num_shown]

    def push(self, ids: Sequence[int]) -> str:
        """Add tokens; returns the text that can be shown now and could not before."""
        self._ids += ids
        before = self._decode(self._ids[self._start : self._end])
        text = self._decode(self._ids[self._start :])
        if len(text) > len(before) and not text.endswith("\ufffd"):
            self._text += text[len(before) :]
            self._start, self._end = self._end, len(self._ids)
        end = len(self._text) - max((overlap(self._text, stop) for stop in self._stops), default=0)
        for marker in self._hold_from:
            found = self._text.find(marker, self._num_shown, end)
            end = found if found >= 0 else end
        piece = self._text[self._num_shown : end]
        self._num_shown += len(piece)
        return piece

    def rest(self, text: str) -> str:
        """The part of the finished completion's text that has not been shown."""
        # By position: a tokenizer with byte tokens may replace a shown character when bytes that are not UTF-8 follow it.
        return text[self._num_shown :]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that is the beginning of the stop string, or of another marker."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
