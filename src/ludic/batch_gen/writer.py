"""Rollouts on disk while the run goes on, and back again when it is resumed.

One JSON line per rollout, token arrays included; compressed where the file's name ends in .gz (see ludic.types.line_files).
Encoding and writing happen in a thread apart, one episode after the other, so the event loop never waits for a disk. All lines of
an episode are written at once.
"""

import asyncio
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
from ludic.types.line_files import Line, LineWriter, read_lines, repair
from ludic.types.rollout import stored_rollouts

logger = logging.getLogger(__name__)


class RolloutWriter:
    """Appends episodes to a JSONL file, compressed if it is called *.gz."""

    def __init__(self, path: str | Path) -> None:
        self._lines = LineWriter(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")

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
        self._lines.append("".join(f"{rollout.to_json()}\n" for rollout in rollouts).encode())


# --- reading back ---


class LineHead(msgspec.Struct):
    """As much of a stored rollout as an index needs; the rest of the line is skipped, not decoded."""

    id: str
    meta: dict[str, Any] = {}
    failure: dict[str, Any] | None = None


def index_lines(path: Path) -> Iterator[tuple[Line, LineHead]]:
    """Every rollout of a file, without holding any."""
    decode = msgspec.json.Decoder(LineHead).decode
    for number, (line, text) in enumerate(read_lines(path), start=1):
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
        return [Rollout.from_json(line.read()) for line in self.lines]


class FinishedEpisodes:
    """The episodes that a file already has, by request key. Failed, half-written and damaged ones do not count."""

    def __init__(self, path: str | Path) -> None:
        self._episodes: dict[str, list[StoredEpisode]] = defaultdict(list)
        path = Path(path)
        if not path.exists():
            return
        repair(path)
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
    for line, meta in _metas(path):
        facts = meta.get("engine")
        if not isinstance(facts, dict) or facts.get("episode_failed") is not False:
            continue
        key, run = facts.get("request_key"), str(facts.get("episode_run"))
        if not isinstance(key, str):
            continue
        lines = open_episodes[run]
        lines.append(line)
        if len(lines) == facts.get("num_rollouts"):
            del open_episodes[run]
            request = meta.get("request_meta")
            yield StoredEpisode(key, request.get("group_id") if isinstance(request, dict) else None, lines)


def _metas(path: Path) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Of the rollouts that can be read; where none can, all is played again."""
    try:
        for line, rollout in stored_rollouts(path):
            if isinstance(rollout.meta, dict):
                yield line, rollout.meta
    except ValueError as error:
        logger.warning("%s", error)
