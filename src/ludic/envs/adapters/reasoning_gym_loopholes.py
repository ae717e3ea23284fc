"""Answers that scorers of reasoning-gym pay for and should not: each was found by trying, and a policy would find it, too."""

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Entry = Mapping[str, Any]

_NO_NUMBER = re.compile(r"\b(?:nan|inf|infinity)[ij]?\b", re.IGNORECASE)
"""No comparison with it is ever false: scorers that look for a difference find none."""


def is_loophole(task: str, answer: str, entry: Entry) -> bool:
    """Must this answer earn nothing, whatever the scorer says?"""
    reference = str(entry["answer"])
    if _NO_NUMBER.search(answer) and not _NO_NUMBER.search(reference):
        return True
    return task in _WRONG and _WRONG[task](answer, entry)


def _uses_other_numbers(answer: str, entry: Entry) -> bool:
    """The scorer wants four numbers that make 24, but not the four that were given."""
    return sorted(re.findall(r"\d+", answer)) != sorted(map(str, entry["metadata"]["numbers"]))


def _is_another_probability(answer: str, entry: Entry) -> bool:
    """The scorer pays the share of the shorter text that agrees: `0` is all of itself, and the beginning of every answer."""
    try:
        given, right = (Fraction(text.replace(",", "").strip()) for text in (answer, str(entry["answer"])))
    except (ValueError, ZeroDivisionError):
        return True
    return abs(given - right) > min(Fraction(1, 10_000), right / 100)


_WRONG: dict[str, Callable[[str, Entry], bool]] = {
    "puzzle24": _uses_other_numbers,
    "coin_flip": _is_another_probability,
}
