"""The record of a run: `JSONLLogger` writes metrics.jsonl, `read_metrics` reads it, also while it is being written.

A line is {"step": 7, "time": 1730000000.0, "train/loss": 0.1, …}; a number that JSON does not have (NaN, infinity) is null.
Each line is one write to the file, so killing the process leaves at most the last line incomplete.
"""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from ludic.types import ConfigError
from ludic.util.files import NotWritten

logger = logging.getLogger(__name__)


class JSONLLogger:
    """Appends JSON lines to a file that may be read meanwhile."""

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
        numbers = {name: float(value) for name, value in stats.items()}
        finite = {name: value if math.isfinite(value) else None for name, value in numbers.items()}
        line = json.dumps({"step": step, "time": time.time(), **finite}, separators=(",", ":")).encode() + b"\n"
        start = os.fstat(self._file.fileno()).st_size
        try:
            if self._file.write(line) != len(line):
                self._file.truncate(start)  # half a line would spoil the next one too
                raise OSError("only part of a line fitted")
        except OSError as error:
            raise NotWritten.of(self.path, error) from error

    def resume(self, step: int) -> None:
        """Remove the lines of steps after `step`, which the resumed run writes again, and damaged lines."""
        kept = [line for line, row in _whole_lines(self.path) if row["step"] <= step]
        shorter = self.path.with_name(f".{self.path.name}.resumed")
        with shorter.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        self._file.close()
        shorter.replace(self.path)
        self._file = self.path.open("ab", buffering=0)

    def newest_step_of(self, name: str) -> int | None:
        return newest_step_of(self.path, name)

    def close(self) -> None:
        self._file.close()

    def _drop_unfinished_line(self) -> None:
        """A power cut can leave one, or a kill between two pages of a long line."""
        content = self.path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            logger.warning("%s ends in the middle of a line; %d bytes are cut off.", self.path, len(content) - whole)
            self._file.truncate(whole)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file, also while it is being written. Damaged lines are left out, with a warning."""
    return (row for _, row in _whole_lines(Path(path)))


def newest_step_of(path: Path, name: str) -> int | None:
    """The newest step of a metrics file with this number, as `KeepsRecord` says; None if there is no file."""
    if not path.is_file():
        return None
    rows = (row for row in read_metrics(path) if any(key == name or key.endswith(f"/{name}") for key in row))
    return max((row["step"] for row in rows), default=-1)


def _whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    damaged = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            row = metrics_row(line)
            if row is None:
                damaged.append(number)
            else:
                yield line, row
    if damaged:
        logger.warning("%s: %d damaged lines are left out, the first is line %d.", path, len(damaged), damaged[0])


def metrics_row(line: bytes) -> dict[str, Any] | None:
    """None for what `log` cannot have written."""
    try:
        row: dict[str, Any] = _decode_row(line)
    except (msgspec.DecodeError, ValueError):
        return None
    step = row.get("step")
    return row | {"step": int(step)} if step is not None and step.is_integer() else None


_decode_row = msgspec.json.Decoder(dict[str, float | None]).decode
