"""Stats as JSON lines: the record of a run, one object per `log`, never more than its last line incomplete.

A line that is damaged later, by a failing disk, is left out by `read_metrics` and removed by `resume`; both warn.

A line is {"step": 7, "time": 1730000000.0, "train/loss": 0.1, …}; a number that JSON does not have (NaN, infinity) is null.
Each line is one write to the file, so killing the process leaves whole lines. Resuming at step n removes what came later.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludic.types import ConfigError

logger = logging.getLogger(__name__)


class JSONLLogger:
    """Appends to a file that may be read meanwhile."""

    def __init__(self, path: str | Path, *, resume_step: int | None = None) -> None:
        """`resume_step`: lines of later steps are removed, as by `resume`."""
        self.path = Path(path)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
            self._drop_unfinished_line()
        except OSError as error:
            raise ConfigError(f"Cannot write metrics to {self.path}: {error.strerror}.") from error
        if resume_step is not None:
            self.resume(resume_step)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        taken = {"step", "time"} & stats.keys()
        if taken:
            raise ConfigError(f"A stat called {sorted(taken)} would hide the line's own. Give it a prefix: train/step.")
        row = {"step": step, "time": time.time()} | {name: _json_number(value) for name, value in stats.items()}
        self._write(json.dumps(row, separators=(",", ":")).encode() + b"\n")

    def resume(self, step: int) -> None:
        """Remove the lines of steps after `step`: the resumed run writes them again."""
        kept = [line for line, row in _whole_lines(self.path) if row["step"] <= step]
        shorter = self.path.with_name(f".{self.path.name}.resumed")
        with shorter.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        shorter.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._file.close()

    def _write(self, line: bytes) -> None:
        start = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) != len(line):
            self._file.truncate(start)  # half a line would spoil the next one too
            raise OSError(f"Only part of a line fitted into {self.path}; is the disk full?")

    def _drop_unfinished_line(self) -> None:
        """A power cut can leave one, or a kill between two pages of a long line."""
        with self.path.open("rb") as file:
            content = file.read()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning(
                "%s ends in the middle of a line; its last %d bytes are cut off.", self.path, len(content) - whole
            )
            self._file.truncate(whole)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file, also of one that is being written. It warns of damaged ones."""
    return (row for _, row in _whole_lines(Path(path)))


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    damaged = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            row = _row(line)
            if row is None:
                damaged.append(number)
            else:
                yield line, row
    if damaged:
        logger.warning("%s: %d damaged lines are left out, the first is line %d.", path, len(damaged), damaged[0])


def _row(line: bytes) -> dict[str, Any] | None:
    """None for what `log` cannot have written."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return None
    return row if all(value is None or type(value) in (int, float) for value in row.values()) else None


def _json_number(value: float) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
