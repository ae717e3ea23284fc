"""Rollouts in JSONL files: one line each, plain or compressed."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

from ludic.types.errors import ConfigError
from ludic.types.rollout import DAMAGE, Rollout
from ludic.util.files import Line, read_lines
from ludic.util.line_writer import LineWriter

logger = logging.getLogger(__name__)


def save_rollouts(rollouts: Iterable[Rollout], path: str | Path) -> None:
    """Append rollouts to a JSONL file, one line each; a file called *.gz is compressed."""
    writer = LineWriter(path)
    writer.append(b"")  # without rollouts, the file is created too
    for rollout in rollouts:
        writer.append(f"{rollout.to_json()}\n".encode())


def load_rollouts(path: str | Path) -> Iterator[Rollout]:
    """The rollouts of a JSONL file, plain or compressed (*.gz), read lazily. Skips an incomplete last line, and damaged lines
    with a warning. Raises ValueError if no line is a rollout."""
    return (rollout for _, rollout in stored_rollouts(path))


def stored_rollouts(path: str | Path) -> Iterator[tuple[Line, Rollout]]:
    """`load_rollouts` with the position of each."""
    num_read = 0
    damaged: list[tuple[int, Exception]] = []
    for number, (line, text) in enumerate(read_lines(path), start=1):
        if not text.strip():
            continue
        try:
            rollout = Rollout.from_json(text)
        except DAMAGE as error:
            damaged.append((number, error))
            continue
        num_read += 1
        yield line, rollout
    if not damaged:
        return
    number, reason = damaged[0]
    if not num_read:
        raise ValueError(f"No line of {path} is a stored rollout. Line {number}: {reason}") from reason
    logger.warning("%s: %d damaged lines are left out. Line %d: %s", path, len(damaged), number, reason)


def stored_rollout(line: Line) -> Rollout:
    """The rollout of a line that an index has found."""
    try:
        return Rollout.from_json(line.read())
    except DAMAGE as error:
        number = next((n for n, (one, _) in enumerate(read_lines(line.path), start=1) if one == line), "?")
        raise ConfigError(f"Line {number} of {line.path} is not a stored rollout: {error}") from error
