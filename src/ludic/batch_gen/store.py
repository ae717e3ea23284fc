"""Writes rollouts to disk during a run and reads them back when it is resumed.

One JSON line per rollout, token arrays included; compressed if the file's name ends in .gz (see ludic.types.line_files).
One writer thread encodes and writes the episodes in order, so the event loop never waits for a disk. It writes all lines of an
episode at once.
"""

import asyncio
import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from ludic.batch_gen.episodes import Episode, EpisodePlan
from ludic.types import ConfigError, Rollout
from ludic.types.files import Line, LineWriter, read_lines, repair
from ludic.types.rollout import json_number, request_meta_in, stored_rollouts

logger = logging.getLogger(__name__)


class RolloutWriter:
    """Appends episodes to a JSONL file, compressed if it is called *.gz."""

    def __init__(self, path: str | Path) -> None:
        self._lines = LineWriter(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")

    async def write(self, episode: Episode, *, key: str | None = None) -> None:
        """Returns when the lines are in the file."""
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
    """The fields of a stored rollout that an index needs; the decoder skips the rest of the line."""

    id: str
    meta: dict[str, Any] = {}
    failure: dict[str, Any] | None = None

    @property
    def group_id(self) -> str | None:
        return request_meta_in(self.meta).get("group_id")


def index_lines(path: Path) -> Iterator[tuple[Line, LineHead]]:
    """Position and head of every rollout in a file, read as a stream."""
    decode = msgspec.json.Decoder(LineHead).decode
    for number, (line, text) in enumerate(read_lines(path), start=1):
        if not text.strip():
            continue
        try:
            head = decode(text)
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"Line {number} of {path} is not a stored rollout: {error} Write the file with save_rollouts or a "
                "RolloutEngine(jsonl_path=…), or remove the line."
            ) from error
        yield line, head


@dataclass(frozen=True, slots=True)
class StoredEpisode:
    """One complete episode in a file."""

    key: str
    group_id: str | None
    lines: list[Line]


class FinishedEpisodes:
    """The complete episodes of a file by request key. Failed, partly written and damaged ones do not count."""

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
        """The request keys of the finished episodes."""
        return {key for key, found in self._episodes.items() if found}

    def take(self, key: str) -> StoredEpisode | None:
        """A finished episode of this key, each returned once; None if there is none left."""
        found = self._episodes.get(key)
        return found.pop(0) if found else None


def _whole_episodes(path: Path) -> Iterator[StoredEpisode]:
    open_episodes: dict[str, list[Line]] = defaultdict(list)
    for line, rollout in _readable(path):
        facts = rollout.engine_facts
        if facts.get("episode_failed") is not False:
            continue
        key, run = facts.get("request_key"), str(facts.get("episode_run"))
        if not isinstance(key, str):
            continue
        lines = open_episodes[run]
        lines.append(line)
        if len(lines) == facts.get("num_rollouts"):
            del open_episodes[run]
            yield StoredEpisode(key, rollout.group_id, lines)


def _readable(path: Path) -> Iterator[tuple[Line, Rollout]]:
    """The rollouts that can be read; where none can, all is played again."""
    try:
        for line, rollout in stored_rollouts(path):
            if isinstance(rollout.meta, dict):
                yield line, rollout
    except ValueError as error:
        logger.warning("%s", error)


# --- resume ---


def request_key(plan: EpisodePlan, *, max_steps: int) -> str | None:
    """Hash (32 hex digits) of everything that determines an episode: env, protocol, seeds, sampling, number of turns.

    An interrupted run finds its finished episodes by it. None if an argument of the request is not JSON: its text may differ in
    another process.
    """
    request = plan.request
    identity = {
        "env": [request.env.kind, dict(request.env.kwargs)],
        "protocol": [request.protocol.kind, dict(request.protocol.kwargs)],
        "seeds": [plan.env_seed, plan.sampling_seed],
        "inference": None if request.inference is None else asdict(request.inference),
        "max_steps": max_steps,
    }
    try:
        text = json.dumps(identity, sort_keys=True, default=json_number)
    except TypeError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(slots=True)
class Resumed:
    """The plans of a resumed run, and those of its episodes that are in the file."""

    plans: list[EpisodePlan]
    stored: dict[int, StoredEpisode] = field(default_factory=dict)
    """By the plan's index."""


def resume_plans(plans: Iterable[EpisodePlan], finished: FinishedEpisodes, *, max_steps: int) -> Resumed:
    """Match plans with finished episodes.

    A plan takes over the group id in the file: ids are new in every run, and a group may be finished over two runs.
    """
    resumed = Resumed(list(plans))
    names: dict[str | None, str] = {}
    for plan in resumed.plans:
        key = request_key(plan, max_steps=max_steps)
        if key is None:
            raise ConfigError(
                f"resume=True cannot identify the request for env {plan.request.env.kind!r} in the file, because its arguments "
                "are not all JSON. Put plain values into EnvSpec.kwargs and ProtocolSpec.kwargs and build objects in the factory."
            )
        found = finished.take(key)
        if found is not None:
            resumed.stored[plan.index] = found
            if plan.group_id is not None and found.group_id is not None:
                names.setdefault(plan.group_id, found.group_id)
    for position, plan in enumerate(resumed.plans):
        if (name := names.get(plan.group_id)) is not None:
            request = replace(plan.request, meta={**plan.request.meta, "group_id": name})
            resumed.plans[position] = replace(plan, request=request)
    return resumed


def read_episode(plan: EpisodePlan, stored: StoredEpisode) -> Episode:
    rollouts = [Rollout.from_json(line.read()) for line in stored.lines]
    for rollout in rollouts:
        rollout.meta["episode_idx"] = plan.index
    return Episode(plan=plan, rollouts=rollouts, num_attempts=0)
