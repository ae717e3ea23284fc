"""Rollouts on disk while the run goes on, and back again when it is resumed.

One JSON line per rollout, token arrays included. Encoding and writing happen in a thread of their own, one episode
after the other, so the event loop never waits for a disk. All lines of an episode are written at once.
"""

import asyncio
import json
import logging
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ludic.batch_gen.episodes import Episode
from ludic.types import ConfigError, Rollout

logger = logging.getLogger(__name__)


class RolloutWriter:
    """Appends episodes to a JSONL file."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._is_ready = False

    async def write(self, episode: Episode, *, key: str | None = None) -> None:
        """Returns when the lines are in the file (not merely on the way)."""
        for rollout in episode.rollouts:
            rollout.meta["engine"] |= {
                "request_key": key,
                "num_rollouts": len(episode.rollouts),
                "episode_failed": episode.failure is not None,
            }
        await asyncio.get_running_loop().run_in_executor(self._thread, self._append, episode.rollouts)

    def _append(self, rollouts: list[Rollout]) -> None:
        text = "".join(f"{rollout.to_json()}\n" for rollout in rollouts)
        if not self._is_ready:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            mend_last_line(self.path)
            self._is_ready = True
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def mend_last_line(path: Path) -> None:
    """A process that was killed while it wrote leaves half a line behind; the next one must not be glued to it."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        data_end = file.seek(0, 2)
        start = _start_of_last_line(file, data_end)
        file.seek(start)
        tail = file.read()
        if tail.endswith(b"\n"):
            return
        if _is_json(tail):
            file.write(b"\n")
        else:
            logger.warning("%s ends in the middle of a line; its last %d bytes are cut off.", path, len(tail))
            file.truncate(start)


def _start_of_last_line(file: Any, end: int) -> int:
    """Where the last line begins: just behind the last newline before the final byte."""
    block = 1 << 16
    position = end - 1
    while position > 0:
        start = max(0, position - block)
        file.seek(start)
        found = file.read(position - start).rfind(b"\n")
        if found >= 0:
            return int(start + found + 1)
        position = start
    return 0


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


# --- reading back ---


class LineHead(msgspec.Struct):
    """As much of a stored rollout as an index needs; the rest of the line is skipped, not decoded."""

    id: str
    meta: dict[str, Any] = {}
    failure: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """Where one rollout lies."""

    path: Path
    offset: int
    length: int

    def read(self) -> Rollout:
        with self.path.open("rb") as file:
            file.seek(self.offset)
            return Rollout.from_json(file.read(self.length).decode("utf-8"))


def index_lines(path: Path) -> Iterator[tuple[Line, LineHead]]:
    """Every rollout of a file, without holding any."""
    decode = msgspec.json.Decoder(LineHead).decode
    offset = 0
    with path.open("rb") as file:
        for number, text in enumerate(file, start=1):
            line = Line(path, offset, len(text))
            offset += len(text)
            if not text.strip():
                continue
            try:
                head = decode(text)
            except msgspec.DecodeError as error:
                raise ConfigError(
                    f"Line {number} of {path} is not a stored rollout: {error} Write the file with save_rollouts or a "
                    "RolloutEngine(jsonl_path=…), or take the line out."
                ) from error
            yield line, head


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """One whole episode in a file."""

    key: str
    group_id: str | None
    lines: list[Line]

    def read(self) -> list[Rollout]:
        return [line.read() for line in self.lines]


class FinishedEpisodes:
    """The episodes that a file already has, by request key. Failed and half-written ones do not count."""

    def __init__(self, path: str | Path) -> None:
        self._episodes: dict[str, list[StoredEpisode]] = defaultdict(list)
        path = Path(path)
        if not path.exists():
            return
        mend_last_line(path)
        for episode in _whole_episodes(path):
            self._episodes[episode.key].append(episode)

    @property
    def completed_ids(self) -> set[str]:
        """The request keys of the episodes that need not be played again."""
        return {key for key, found in self._episodes.items() if found}

    def take(self, key: str) -> StoredEpisode | None:
        """One such episode, each handed out once; None when it has to be played."""
        found = self._episodes.get(key)
        return found.pop(0) if found else None


def _whole_episodes(path: Path) -> Iterator[StoredEpisode]:
    open_episodes: dict[str, list[Line]] = defaultdict(list)
    for line, head in index_lines(path):
        facts = head.meta.get("engine") or {}
        if not facts.get("request_key") or facts["episode_failed"]:
            continue
        lines = open_episodes[facts["episode_run"]]
        lines.append(line)
        if len(lines) == facts["num_rollouts"]:
            del open_episodes[facts["episode_run"]]
            group_id = head.meta.get("request_meta", {}).get("group_id")
            yield StoredEpisode(facts["request_key"], group_id, lines)
