"""Reads metrics.jsonl, which `ludic.training.loggers.JSONLLogger` writes, also while it is being written.

A line is {"step": 7, "time": 1730000000.0, "train/loss": 0.1, …}; a number that JSON does not have (NaN, infinity) is null.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a metrics file, also while it is being written. Damaged lines are left out, with a warning."""
    return (row for _, row in whole_lines(Path(path)))


def newest_step_of(path: Path, name: str) -> int | None:
    """The newest step of a metrics file with this number, as `KeepsRecord` says; None if there is no file."""
    if not path.is_file():
        return None
    rows = (row for row in read_metrics(path) if any(key == name or key.endswith(f"/{name}") for key in row))
    return max((row["step"] for row in rows), default=-1)


def whole_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
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
