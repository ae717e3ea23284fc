"""Converts values of third-party envs (numpy arrays at most) to plain JSON and to text for a model."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ludic.types import JSON, ConfigError

_MAX_NUMBERS = 256
"""More numbers than that are a picture; a model needs another view of it."""
_COLOURS = {0: "grey", 1: "red", 2: "green", 3: "yellow", 4: "blue", 5: "magenta", 6: "cyan", 7: "white"}
_COLOURED = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0m", re.DOTALL)


def plain(value: Any) -> JSON:
    """A value as JSON; what is no number, text or container of them is told by its `repr`."""
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in (sorted(value, key=repr) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float) and not np.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, str | bool | int | float) else repr(value)


def in_words(value: Any) -> str:
    """An observation as text: a dict line by line, small arrays and tuples in brackets, floats with 4 digits."""
    if isinstance(value, Mapping):
        return "\n".join(f"{name}: {in_words(item)}" for name, item in value.items())
    if isinstance(value, tuple | list):
        return f"({', '.join(in_words(item) for item in value)})"
    if isinstance(value, np.ndarray):
        return _array_in_words(value)
    return f"{value:.4g}" if isinstance(value, float | np.floating) else str(value)


def board_or_words(value: Any) -> str:
    """Two planes of marks, mine and theirs, are a board of x and o; everything else as `in_words`."""
    if isinstance(value, np.ndarray) and value.ndim == 3 and value.shape[2] == 2:
        return "\n".join(" ".join("x" if mine else "o" if theirs else "." for mine, theirs in row) for row in value)
    return in_words(value)


def _array_in_words(array: np.ndarray[Any, Any]) -> str:
    if array.size > _MAX_NUMBERS:
        raise ConfigError(
            f"An observation of shape {array.shape} is too large to be read as {array.size} numbers. Pass "
            "render=<a function from the observation to text>."
        )
    return np.array2string(array, precision=4, suppress_small=True, separator=", ", max_line_width=10_000)


def uncoloured(picture: str) -> str:
    """A terminal picture without control codes: a red S becomes [S:red], since what is coloured matters."""
    return _COLOURED.sub(lambda found: f"[{found[2]}:{_colour(found[1])}]", picture).strip("\n")


def _colour(codes: str) -> str:
    for code in map(int, filter(None, codes.split(";"))):
        if code // 10 in (3, 4, 9, 10):  # 30-37 and 90-97 colour the letter, 40-47 and 100-107 its background
            return _COLOURS.get(code % 10, "coloured")
    return "coloured"


# --- `Choices`: names of the actions of a discrete space, and parsing one from a reply ---


class Choices:
    """Actions 0 … n-1 (or from `start`) under their names, which default to their numbers."""

    def __init__(self, whose: str, num_actions: int, names: Sequence[str] | None, *, start: int = 0) -> None:
        numbers = range(start, start + num_actions)
        chosen = [str(number) for number in numbers] if names is None else list(names)
        if len(chosen) != num_actions or len(set(map(_folded, chosen))) != num_actions:
            raise ConfigError(f"{whose} has {num_actions} actions; action_names={chosen} must name each of them once.")
        self.by_number = dict(zip(numbers, chosen, strict=True))
        # A name goes before a number: people may call the second action "0".
        self._by_text = {str(number): number for number in numbers} | {
            _folded(name): number for number, name in self.by_number.items()
        }

    def read(self, said: str, legal: Collection[int] | None = None) -> int | None:
        """The action that a reply names, in any case, or None; `legal` limits it to some."""
        number = self._by_text.get(_folded(said))
        return number if legal is None or number in legal else None

    def names(self, legal: Iterable[int] | None = None) -> list[str]:
        return [self.by_number[number] for number in (self.by_number if legal is None else legal)]


def _folded(text: str) -> str:
    return text.strip().casefold()
