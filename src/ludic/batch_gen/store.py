"""Writes rollouts to disk during a run and reads them back when it is resumed.

One JSON line per rollout, token arrays included; compressed if the file's name ends in .gz (see ludic.util.files).
One writer thread encodes and writes the episodes in order, so the event loop never waits for a disk. It writes all lines of an
episode at once.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import msgspec

from ludic.batch_gen.episodes import Episode, EpisodePlan
from ludic.rewards import Rewards
from ludic.types import BackendExtensions, ConfigError, InferenceSpec, ReturnSpec, Rollout, SamplingParams
from ludic.types.rollout import json_number, request_meta_in
from ludic.types.rollout_files import stored_rollouts
from ludic.util.files import Line, read_lines, repair
from ludic.util.line_writer import MEMBER_BYTES, LineWriter

logger = logging.getLogger(__name__)


class RolloutWriter:
    """Appends episodes to a JSONL file, compressed if it is called *.gz. Episodes that finish during a write are written
    together: opening, locking and closing the file takes longer than writing one."""

    def __init__(self, path: str | Path) -> None:
        self._lines = LineWriter(path)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollout-writer")
        self._lock = threading.Lock()
        self._next: _Write | None = None
        """Not yet begun by the thread, so that episodes can be added to it."""

    async def write(self, episode: Episode, *, key: str | None = None) -> None:
        """Returns when the lines are in the file."""
        for rollout in episode.rollouts:
            rollout.meta["engine"] |= {
                "request_key": key,
                "num_rollouts": len(episode.rollouts),
                "episode_failed": episode.failure is not None,
            }
        loop = asyncio.get_running_loop()
        is_written: asyncio.Future[None] = loop.create_future()
        with self._lock:
            write = self._next
            if write is None or write.loop is not loop:
                write = self._next = _Write(loop)
                self._thread.submit(self._append, write)
            write.episodes.append((episode.rollouts, is_written))
        await is_written

    def _append(self, write: "_Write") -> None:
        with self._lock:
            if self._next is write:
                self._next = None
        write.append_to(self._lines)
        with contextlib.suppress(RuntimeError):  # the loop and its waiting tasks are gone
            write.loop.call_soon_threadsafe(write.finish)


@dataclass(slots=True)
class _Write:
    """Episodes of one event loop that are written at once."""

    loop: asyncio.AbstractEventLoop
    episodes: list[tuple[list[Rollout], "asyncio.Future[None]"]] = field(default_factory=list)
    errors: list[Exception | None] = field(default_factory=list)
    """One per episode, filled in by `append_to`."""

    def append_to(self, lines: LineWriter) -> None:
        """Appends parts of about a gzip member, in which a line is found quickly."""
        part, size = [], 0
        try:
            for rollouts, _ in self.episodes:
                try:
                    part.append("".join(f"{rollout.to_json()}\n" for rollout in rollouts).encode())
                    size += len(part[-1])
                    self.errors.append(None)
                except Exception as error:  # noqa: BLE001 - the task of this episode raises it
                    self.errors.append(error)
                if size >= MEMBER_BYTES:
                    lines.append(b"".join(part))
                    part, size = [], 0
            lines.append(b"".join(part))
        except Exception as error:  # noqa: BLE001 - a full disk: the tasks of all these episodes raise it
            self.errors = [error] * len(self.episodes)

    def finish(self) -> None:
        """Wake the tasks that wait for it; in the event loop."""
        for (_, is_written), error in zip(self.episodes, self.errors, strict=True):
            if is_written.done():  # cancelled
                continue
            is_written.set_result(None) if error is None else is_written.set_exception(error)


# --- reading back ---


class _LineHead(msgspec.Struct):
    """The fields of a stored rollout that an index needs; the decoder skips the rest of the line."""

    id: str
    meta: dict[str, Any] = {}
    failure: dict[str, Any] | None = None

    @property
    def group_id(self) -> str | None:
        return request_meta_in(self.meta).get("group_id")


def index_lines(path: Path) -> Iterator[tuple[Line, _LineHead]]:
    """Position and head of every rollout in a file, read as a stream."""
    decode = msgspec.json.Decoder(_LineHead).decode
    for number, (line, text) in enumerate(read_lines(path), start=1):
        if not text.strip():
            continue
        try:
            head = decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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


def request_key(plan: EpisodePlan, *, max_steps: int, rewards: Rewards | None = None) -> str | None:
    """Hash (32 hex digits) of everything that determines an episode: env, protocol, seeds, sampling, number of turns, rewards.

    An interrupted run finds its finished episodes by it. None if an argument of the request is not JSON: its text may differ in
    another process.
    """
    request = plan.request
    identity: dict[str, Any] = {
        "env": [request.env.kind, dict(request.env.kwargs)],
        "protocol": [request.protocol.kind, dict(request.protocol.kwargs)],
        "seeds": [plan.env_seed, plan.sampling_seed],
        "inference": request.inference,
        "max_steps": max_steps,
    }
    if rewards is not None:
        identity["rewards"] = rewards.identity
    try:
        text = json.dumps(identity, sort_keys=True, default=_plain)
    except TypeError:
        return None
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    """For json.dumps: the parts of an inference spec as dicts. Faster than `asdict`, which copies every value."""
    if isinstance(value, InferenceSpec | SamplingParams | ReturnSpec | BackendExtensions):
        # Spans are notes about an episode and do not change it.
        return {field.name: getattr(value, field.name) for field in fields(value) if field.name != "message_spans"}
    return json_number(value)


@dataclass(slots=True)
class _Resumed:
    """The plans of a resumed run, and those of its episodes that are in the file."""

    plans: list[EpisodePlan]
    stored: dict[int, StoredEpisode] = field(default_factory=dict)
    """Stored episodes by the index of their plan."""


def resume_plans(
    plans: Iterable[EpisodePlan], finished: FinishedEpisodes, *, max_steps: int, rewards: Rewards | None = None
) -> _Resumed:
    """Match plans with finished episodes.

    A plan takes over the group id in the file: ids are new in every run, and a group may be finished over two runs.
    """
    resumed = _Resumed(list(plans))
    names: dict[str | None, str] = {}
    for plan in resumed.plans:
        key = request_key(plan, max_steps=max_steps, rewards=rewards)
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
