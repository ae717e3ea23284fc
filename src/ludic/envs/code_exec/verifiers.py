"""Compares a program's output with the expected one, outside the sandbox."""

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

_SHOWN = 60


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier says."""

    passed: bool
    details: str | None = None
    """Where the output first differs; None when it is right."""


class OutputVerifier(Protocol):
    """Compares what a program wrote with what it should have written."""

    def verify(self, actual: str, expected: str) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class ExactMatchVerifier:
    """Character for character."""

    strip: bool = True
    """Leave out white space at both ends."""
    case_sensitive: bool = True

    def verify(self, actual: str, expected: str) -> Verdict:
        if self.strip:
            actual, expected = actual.strip(), expected.strip()
        same = actual == expected if self.case_sensitive else actual.casefold() == expected.casefold()
        return Verdict(same, None if same else _first_difference(actual, expected))


@dataclass(frozen=True, slots=True)
class WhitespaceNormalizedVerifier:
    """The same words in the same order; how they are spaced and broken into lines does not matter."""

    def verify(self, actual: str, expected: str) -> Verdict:
        difference = _first_other_token(actual.split(), expected.split(), lambda got, wanted: got == wanted)
        return Verdict(difference is None, difference)


@dataclass(frozen=True, slots=True)
class FloatTolerantVerifier:
    """Word for word, but two numbers may differ a little."""

    abs_tol: float = 1e-9
    rel_tol: float = 1e-9

    def verify(self, actual: str, expected: str) -> Verdict:
        difference = _first_other_token(actual.split(), expected.split(), self._close)
        return Verdict(difference is None, difference)

    def _close(self, got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        try:
            a, b = float(got), float(wanted)
        except ValueError:
            return False
        return math.isclose(a, b, rel_tol=self.rel_tol, abs_tol=self.abs_tol)


def _first_other_token(actual: list[str], expected: list[str], same: "_Same") -> str | None:
    for number, (got, wanted) in enumerate(zip_longest(actual, expected), start=1):
        if got is None or wanted is None:
            return f"The output has {len(actual)} words, {len(expected)} are expected."
        if not same(got, wanted):
            return f"Word {number} is {_cut(got)!r}, {_cut(wanted)!r} is expected."
    return None


class _Same(Protocol):
    def __call__(self, got: str, wanted: str, /) -> bool: ...


def _first_difference(actual: str, expected: str) -> str:
    got_lines, wanted_lines = actual.split("\n"), expected.split("\n")
    for number, (got, wanted) in enumerate(zip_longest(got_lines, wanted_lines), start=1):
        if got is None or wanted is None:
            return f"The output has {len(got_lines)} lines, {len(wanted_lines)} are expected."
        if got != wanted:
            return f"Line {number} is {_cut(got)!r}, {_cut(wanted)!r} is expected."
    return "The output differs in case only."


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
