"""Stats as plain lines of text."""

import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import IO


class PrintLogger:
    """Writes `[trainer] step 7 | train/loss 0.1234 | …`, a few numbers per line."""

    def __init__(
        self,
        prefix: str = "[trainer]",
        keys: Sequence[str] | None = None,
        precision: int = 4,
        max_items_per_line: int = 6,
        *,
        percent: Collection[str] = (),
        stream: IO[str] | None = None,
        status: Callable[[], str] | None = None,
        status_every: int = 5,
        activity_every_s: float = 15.0,
    ) -> None:
        """`keys`: what is shown, in that order (see `chosen`). `percent`: names of shares, shown in percent. `stream`: by
        default stdout. `status`: returns one more line, after the first step and then every `status_every`-th. Between two
        steps, activity is written at most every `activity_every_s` seconds."""
        self._prefix, self._keys, self._percent = prefix, keys, percent
        self._precision, self._max_items_per_line = precision, max_items_per_line
        self._stream, self._status, self._status_every = stream, status, status_every
        self._activity_every_s = activity_every_s
        self._status_at: int | None = None
        """The step at which the status line is due; None: at once."""
        self._written_at: float | None = None
        """When the last line was written, or activity was first shown."""

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        # sys.stdout is looked up now, since it may have been replaced since this logger was made.
        stream = self._stream or sys.stdout
        for line in self.lines(step, stats):
            stream.write(f"{line}\n")
        if self._status is not None and (self._status_at is None or step >= self._status_at):
            if said := self._status():
                stream.write(f"{self._prefix} {said}\n")
            self._status_at = step + self._status_every
        stream.flush()
        self._written_at = None

    def show_activity(self, text: str) -> None:
        now = time.monotonic()
        self._written_at = now if self._written_at is None else self._written_at
        if text and now - self._written_at >= self._activity_every_s:
            self._written_at = now
            print(f"{self._prefix} {text}", file=self._stream or sys.stdout, flush=True)

    def lines(self, step: int, stats: Mapping[str, float]) -> list[str]:
        percent = shown_in_percent(self._percent, stats)
        texts = [
            f"{name} {format_number(value, self._precision, name in percent)}"
            for name, value in chosen(stats, self._keys).items()
        ]
        size = self._max_items_per_line
        rows = [texts[start : start + size] for start in range(0, len(texts), size)] or [[]]
        return [" | ".join([f"{self._prefix} step {step}", *row]) for row in rows]

    def close(self) -> None:
        """Nothing to finish."""


def chosen(stats: Mapping[str, float], keys: Sequence[str] | None) -> Mapping[str, float]:
    """All stats, or those asked for, in the order of the keys.

    A key matches the full name or the name behind its prefix. It may be a pattern, such as *_rate; a key that begins with !
    leaves out what it matches.
    """
    if keys is None:
        return stats
    left_out = [key[1:] for key in keys if key.startswith("!")]
    return {
        name: stats[name]
        for key in keys
        for name in stats
        if _matches(name, key) and not any(_matches(name, other) for other in left_out)
    }


def _matches(name: str, key: str) -> bool:
    return fnmatchcase(name, key) or fnmatchcase(name.split("/", 1)[-1], key)


def shown_in_percent(percent: Collection[str], stats: Iterable[str]) -> set[str]:
    return {name for name in stats if name in percent or name.split("/", 1)[-1] in percent}


def format_number(value: float, precision: int, percent: bool = False) -> str:
    """Whole numbers as such, very small and very large ones with an exponent."""
    if percent:
        return f"{100 * value:.{max(precision - 2, 0)}f}%"
    if abs(value) < 1e15 and value == int(value):
        return str(int(value))
    if 10**-precision <= abs(value) < 1e6:
        return f"{value:.{precision}f}"
    return f"{value:.{precision}g}"
