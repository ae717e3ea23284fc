"""Run folders and an index of their rollouts: one `Card` per rollout, made without decoding the tokens of its line.

Files are followed by byte offset while a run writes them: nothing is locked, and nothing is written into a run folder. The
index of a large file is kept in a cache folder ($XDG_CACHE_HOME/ludic/view), so that the next start reads only what is new.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from ludic.run.folder import CONFIG, FAILURE, METRICS, ROLLOUTS, TRAINED
from ludic.types import ConfigError, Rollout, StopReason, spread_of
from ludic.types.files import Line, is_compressed, read_lines

logger = logging.getLogger(__name__)

T = TypeVar("T")
PREVIEW_CHARS = 160
MAX_DEPTH = 3
"""Folders below the root in which runs are looked for."""
_CACHE_VERSION = 2
_CACHE_FROM = 2_000
"""Rollouts that are indexed again at every start instead of being cached: a fraction of a second."""
_IDENTITY_BYTES = 256
_TRUNCATIONS = {reason.value for reason in StopReason if reason.is_truncation}
_TASK_KEYS = ("task_id", "sample_index", "task_index")
"""What requests call their task, in the order in which it is looked for."""


# --- one rollout ------------------------------------------------------------------------------------------------


class Card(msgspec.Struct, array_like=True, gc=False):
    """What lists and charts show of a rollout."""

    id: str
    step: int
    """The update that trained on it; estimated from its versions until the trainer's record is there. 0: not known."""
    group: str | None
    task: str
    env: str | None
    agent: str | None
    model: str | None
    """As its requests name it."""
    thread: str | None
    """The kind of sub-agent; None for an agent of the env."""
    reward: float
    turns: int
    calls: int
    tokens: int
    """Sampled tokens."""
    stop: str | None
    failure: str | None
    truncated: bool
    """A limit ended the episode, or cut off a reply."""
    parse_errors: int
    oldest: int | None
    newest: int | None
    """Policy versions that sampled its tokens."""
    started_ns: int | None
    ended_ns: int | None
    task_preview: str
    """Beginning of the first prompt's last message."""
    preview: str
    """End of the last reply."""
    member: int | None
    offset: int
    length: int
    """Where its line is."""
    is_trained: bool = False
    """The trainer's record names it."""
    is_abandoned: bool = False
    """Played after the checkpoint that a later start went on from: that start has played it again."""

    @property
    def lag(self) -> int | None:
        return None if self.oldest is None or not self.step else max(self.step - 1 - self.oldest, 0)

    @property
    def compared(self) -> tuple[str, str | None, str | None] | None:
        """Equal for rollouts that a credit rule compares with each other."""
        return None if self.group is None else (self.group, self.agent, self.thread)

    def shown(self) -> dict[str, Any]:
        """As the API has it."""
        hidden = ("oldest", "newest", "member", "offset", "length")
        facts = {name: getattr(self, name) for name in self.__struct_fields__ if name not in hidden}
        return facts | {"versions": None if self.oldest is None else [self.oldest, self.newest], "lag": self.lag}


class _Trace(msgspec.Struct):
    completion_token_ids: msgspec.Raw = msgspec.Raw(b"[]")
    version_runs: list[tuple[int, int]] = []
    finish_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        if self.version_runs:
            return sum(length for _, length in self.version_runs)
        ids = bytes(self.completion_token_ids)
        return 0 if len(ids) <= 2 else ids.count(b",") + 1


class _Info(msgspec.Struct):
    parse_error: Any = None


class _Step(msgspec.Struct):
    kind: str
    ts_ns: int = 0
    action: str = ""
    action_target: str = ""
    turn_id: str | None = None
    info: _Info = msgspec.field(default_factory=_Info)
    trace: _Trace | str | None = None
    prompt_messages: msgspec.Raw = msgspec.Raw(b"")


class _Head(msgspec.Struct):
    """The fields of a line that a card needs; the decoder skips all others, token ids and log-probs among them."""

    id: str
    meta: dict[str, Any] = {}
    stop: str | None = None
    failure: dict[str, Any] | None = None
    total_reward: float = 0.0
    steps: list[_Step] = []


_decode_head = msgspec.json.Decoder(_Head).decode


def strict_json(text: str | bytes) -> bytes:
    """The same JSON without what Python writes and others refuse: NaN is null, half of a surrogate pair is a question mark."""
    value = json.loads(text, parse_constant=lambda _: None)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def make_card(text: bytes, line: Line) -> Card:
    """The card of a stored rollout; msgspec.DecodeError or ValueError if the line is not one."""
    try:
        head = _decode_head(text)
    except msgspec.DecodeError:
        head = _decode_head(strict_json(text))
    calls = [step for step in head.steps if step.kind == "agent"] or head.steps
    traces = [step.trace for step in calls if isinstance(step.trace, _Trace)]
    versions = [version for trace in traces for version, _ in trace.version_runs]
    facts, failure = Rollout(id=head.id, meta=head.meta), head.failure
    times = [step.ts_ns for step in head.steps if step.ts_ns]
    began = facts.engine_facts.get("started_ns")
    if isinstance(began, int) and not facts.is_sub_task:
        times.append(began)
    first = bytes(calls[0].prompt_messages) if calls else b""
    is_cut = any(trace.finish_reason == "length" for trace in traces)
    return Card(
        id=head.id,
        step=max(versions) + 1 if versions else 0,
        group=_text(facts.group_id),
        task=_task(facts, first),
        env=_text(facts.env_name),
        agent=_text(facts.agent_id),
        model=_text(facts.policy),
        thread=_text(facts.delegate),
        reward=head.total_reward,
        turns=len({step.turn_id or str(number) for number, step in enumerate(head.steps)}),
        calls=len([step for step in head.steps if step.kind == "agent"]),
        tokens=sum(trace.num_tokens for trace in traces),
        stop=head.stop,
        failure=None if failure is None else f"{failure.get('error')}: {failure.get('message')}"[:500],
        truncated=is_cut or head.stop in _TRUNCATIONS,
        parse_errors=sum(bool(s.info.parse_error) and s.action_target == "env" for s in calls if s.kind == "agent"),
        oldest=min(versions, default=None),
        newest=max(versions, default=None),
        started_ns=min(times, default=None),
        ended_ns=max(times, default=None),
        task_preview=_last_message(first)[:PREVIEW_CHARS],
        preview=(calls[-1].action if calls else "")[-PREVIEW_CHARS:],
        member=line.member,
        offset=line.offset,
        length=line.length,
    )


def _text(name: Any) -> str | None:
    return None if name is None else str(name)


def _task(facts: Rollout, prompt: bytes) -> str:
    """What is the same for every attempt at one task: its id, its place in the data, or else its first prompt."""
    env = facts.engine_facts.get("env_kind") or facts.env_name or "task"
    for key in _TASK_KEYS:
        if (given := facts.meta.get(key)) is not None:
            return str(given) if key == "task_id" else f"{env}:{given}"
    if prompt:
        return f"{env}#{hashlib.blake2b(prompt, digest_size=5).hexdigest()}"
    return f"{env}:{facts.env_seed}"


def _last_message(messages: bytes) -> str:
    """The text of the last message."""
    with contextlib.suppress(msgspec.DecodeError, LookupError, TypeError, AttributeError):
        content = msgspec.json.decode(messages)[-1].get("content")
        if isinstance(content, str):
            return content.strip()
        return "".join(part.get("text", "") for part in content).strip()
    return ""


def compared_groups(cards: Iterable[Card]) -> dict[tuple[str, str | None, str | None], list[Card]]:
    """Rollouts that are compared with each other, by their key."""
    groups: dict[tuple[str, str | None, str | None], list[Card]] = defaultdict(list)
    for card in cards:
        if card.compared is not None:
            groups[card.compared].append(card)
    return groups


def is_zero_spread(members: Sequence[Card]) -> bool:
    """Whether a group of several earned the same reward throughout, so that nothing is learned from it."""
    rewards = [card.reward for card in members]
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return len(rewards) > 1
    return _is_close(rewards) and spread_of(rewards) == 0


def _is_close(rewards: Sequence[float]) -> bool:
    """Whether they might differ by no more than rounding; all others need no exact look."""
    return max(rewards) - min(rewards) < 1e-3 * max(map(abs, rewards))


# --- one file ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class RolloutFile:
    """The cards of one file, and how far it has been read."""

    path: Path
    cards: list[Card] = field(default_factory=list)
    num_decoded: int = 0
    """Lines decoded by this process, those of the cache left out."""
    num_damaged: int = 0
    num_resets: int = 0
    """How often another file was found under its name."""
    _identity: tuple[int, bytes] | None = None
    """Inode and first bytes: another pair is another file under the same name."""
    _start: int = 0
    """Where to read on: the end of the last line; in a compressed file, the start of the last member."""
    _num_seen: int = 0
    """Lines of that member that have been read."""
    _size: int = -1
    """Of the file when all of it had been read."""
    _num_cached: int = 0

    @property
    def first_step(self) -> int | None:
        """The step that its start of the run began at; None for the file of an actor."""
        digits = self.path.name.partition("from_step_")[2][:6]
        return int(digits) if digits.isdigit() else None

    def refresh(self, deadline: float) -> bool:
        """Read what is new; False if the time was not enough."""
        try:
            stat = self.path.stat()
            self._check_identity(stat)
            if stat.st_size == self._size:
                return True
            is_done = self._read(deadline)
        except OSError:  # removed or replaced in this moment
            return True
        self._size = stat.st_size if is_done else -1
        if is_done and len(self.cards) - self._num_cached >= _CACHE_FROM:
            self._save()
        return is_done

    def _check_identity(self, stat: os.stat_result) -> None:
        with self.path.open("rb") as file:
            beginning = file.read(_IDENTITY_BYTES)
        known = self._identity
        if known is None and not self.cards:
            self._load(stat, beginning)
        elif known is not None and (
            known[0] != stat.st_ino or not beginning.startswith(known[1]) or stat.st_size < self._start
        ):
            self.cards, self._start, self._num_seen, self._size, self._num_cached = [], 0, 0, -1, 0
            self.num_resets += 1
        # The first append of a small file rewrites its end, so only a long beginning tells files apart.
        self._identity = (stat.st_ino, beginning if len(beginning) == _IDENTITY_BYTES < stat.st_size - 32 else b"")

    def _read(self, deadline: float) -> bool:
        number = 0
        for line, text in read_lines(self.path, start=self._start):
            if line.member is None:
                self._start = line.offset + line.length
            else:
                if line.member != self._start:
                    self._start, self._num_seen, number = line.member, 0, 0
                number += 1
                if number <= self._num_seen:
                    continue
                self._num_seen = number
            self._add(text, line)
            if time.monotonic() > deadline:
                return False
        return True

    def _add(self, text: bytes, line: Line) -> None:
        if not text.strip():
            return
        self.num_decoded += 1
        try:
            self.cards.append(make_card(text, line))
        except (msgspec.DecodeError, ValueError, TypeError, AttributeError, RecursionError):
            self.num_damaged += 1

    def line(self, card: Card) -> Line:
        return Line(self.path, card.offset, card.length, card.member)

    # --- the cache ---

    @property
    def _cache(self) -> Path:
        name = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=12).hexdigest()
        return cache_folder() / f"{name}.v{_CACHE_VERSION}.msgpack"

    def _save(self) -> None:
        content = _Cached(self._identity, self._start, self._num_seen, self.cards)
        try:
            self._cache.parent.mkdir(parents=True, exist_ok=True)
            unfinished = self._cache.with_name(f".{self._cache.name}.{os.getpid()}")
            unfinished.write_bytes(msgspec.msgpack.encode(content))
            unfinished.replace(self._cache)
            self._num_cached = len(self.cards)
        except OSError as error:
            self._num_cached = len(self.cards)
            logger.debug("the index of %s is not kept: %s", self.path, error)

    def _load(self, stat: os.stat_result, beginning: bytes) -> None:
        try:
            kept = msgspec.msgpack.decode(self._cache.read_bytes(), type=_Cached)
        except (OSError, msgspec.DecodeError):
            return
        if kept.identity is None or kept.identity[0] != stat.st_ino or stat.st_size < kept.start:
            return
        if not kept.identity[1] or not beginning.startswith(kept.identity[1]):
            return
        self.cards, self._start, self._num_seen = kept.cards, kept.start, kept.num_seen
        self._num_cached = len(self.cards)


class _Cached(msgspec.Struct, array_like=True):
    identity: tuple[int, bytes] | None
    start: int
    num_seen: int
    cards: list[Card]


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ludic" / "view"


# --- one run ----------------------------------------------------------------------------------------------------


class RunIndex:
    """All that the API knows of a run. `refresh` reads what is new; every other method answers from memory.

    Methods may be called from several threads: `refresh` replaces lists instead of changing them.
    """

    def __init__(self, id: str, folder: Path, root: Path | None = None) -> None:
        """`root`: files that links lead out of it are left out. Default: the folder."""
        self.id, self.folder, self._root = id, folder, (root or folder).resolve()
        self.cards: list[Card] = []
        """In the order of the files and their lines; abandoned ones included."""
        self.is_complete = False
        """Whether all that was there at the last `refresh` has been read."""
        self.metrics: dict[int, dict[str, float | None]] = {}
        """Step -> metrics, of all lines of that step together."""
        self.times: dict[int, float] = {}
        self._files: dict[Path, RolloutFile] = {}
        self._by_id: dict[str, tuple[Card, RolloutFile]] = {}
        self._trained: dict[Path, tuple[int, int, list[str]]] = {}
        self._step_of: dict[str, int] = {}
        self._metrics_read: tuple[int, int] = (-1, 0)
        self._lock = threading.Lock()
        self._joined: dict[Path, tuple[int, int]] = {}
        """Of each file: how often it was read from its start, and the cards of it that are in `cards`."""
        self._kept: dict[object, Any] = {}
        self._config: tuple[tuple[int, int], dict[str, Any]] = ((0, 0), {})

    def is_inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self._root)

    @property
    def config(self) -> dict[str, Any]:
        """The settings, as the file has them; empty if there is none."""
        path = self.folder / CONFIG
        stamp = _size(path)
        if stamp != self._config[0]:
            self._config = stamp, self._read_config(path)
        return self._config[1]

    def _read_config(self, path: Path) -> dict[str, Any]:
        try:
            return tomllib.loads(path.read_text(encoding="utf-8")) if self.is_inside(path) else {}
        except (OSError, ValueError):
            return {}

    def failure(self) -> str | None:
        """The error that has ended the run; None if there is none, or if it is older than this file."""
        path = self.folder / FAILURE
        try:
            error = msgspec.json.decode(path.read_bytes())["error"] if self.is_inside(path) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return error if isinstance(error, str) else None

    @property
    def num_decoded(self) -> int:
        return sum(file.num_decoded for file in self._files.values())

    @property
    def num_damaged(self) -> int:
        return sum(file.num_damaged for file in self._files.values())

    @property
    def trained_files(self) -> list[Path]:
        return sorted(self._trained)

    def refresh(self, seconds: float = 0.5) -> bool:
        """Read what is new, for so long; False if more is left. While another thread reads, waits for it as long."""
        deadline = time.monotonic() + seconds
        if not self._lock.acquire(timeout=min(seconds, threading.TIMEOUT_MAX)):
            return self.is_complete
        try:
            self._read_metrics()
            self._find_files()
            is_complete = all(file.refresh(deadline) for file in list(self._files.values()))
            is_complete = self._read_trained(deadline) and is_complete
            self._join()
            self.is_complete = is_complete
        finally:
            self._lock.release()
        return is_complete

    def refresh_metrics(self) -> None:
        """Only the metrics, for a list of runs."""
        if self._lock.acquire(timeout=0.1):
            try:
                self._read_metrics()
            finally:
                self._lock.release()

    def find(self, rollout: str) -> tuple[Card, Line] | None:
        """A rollout and where it is stored."""
        found = self._by_id.get(rollout)
        return None if found is None else (found[0], found[1].line(found[0]))

    def line_of(self, card: Card) -> Line:
        return self._by_id[card.id][1].line(card)

    def stamp(self) -> tuple[Any, ...]:
        """Sizes of everything that a run appends to; another stamp is news."""
        return _size(self.folder / METRICS), _sizes(self.folder / ROLLOUTS), _sizes(self.folder / TRAINED)

    def updated(self) -> float:
        """When something was last written, in seconds since 1970; 0 if never."""
        places = (self.folder / METRICS, self.folder / CONFIG, self.folder / ROLLOUTS, *(self._files))
        return max((place.stat().st_mtime for place in places if place.exists()), default=0.0)

    def _find_files(self) -> None:
        there = [path for path in _rollout_files(self.folder) if self.is_inside(path)]
        self._files = {path: self._files.get(path) or RolloutFile(path) for path in there}

    def _read_metrics(self) -> None:
        path = self.folder / METRICS
        try:
            stat = path.stat()
        except OSError:
            return
        if not self.is_inside(path):
            return
        inode, start = self._metrics_read
        if stat.st_ino != inode or stat.st_size < start:  # a resumed run has removed the lines that it writes again
            start, self.metrics, self.times = 0, {}, {}
        metrics, times = dict(self.metrics), dict(self.times)
        with contextlib.suppress(OSError):
            for line, text in read_lines(path, start=start):
                if not text.endswith(b"\n"):
                    break
                start = line.offset + line.length
                row = _metrics_row(text)
                if row is not None:
                    step = int(row.pop("step"))
                    times[step] = row.pop("time", None) or times.get(step, 0.0)
                    metrics[step] = {**metrics.get(step, {}), **row}
        self.metrics, self.times, self._metrics_read = metrics, times, (stat.st_ino, start)

    def _read_trained(self, deadline: float) -> bool:
        there = {}
        folder = self.folder / TRAINED
        with contextlib.suppress(OSError), os.scandir(folder if self.is_inside(folder) else os.devnull) as entries:
            there = {
                Path(e.path): (e.stat().st_mtime_ns, e.stat().st_size)
                for e in entries
                if is_record(e.name) and not e.is_symlink()
            }
        known = {path: found for path, found in self._trained.items() if there.get(path) == found[:2]}
        is_done = True
        for path, stamp in sorted(there.items()):
            if path in known:
                continue
            if time.monotonic() > deadline:
                is_done = False
                break
            known[path] = (*stamp, rollouts_in(path))
        if known != self._trained:
            self._trained = known
            self._step_of = {id: step_of_record(path) for path, (_, _, ids) in sorted(known.items()) for id in ids}
            self._joined = {}
        return is_done

    def _join(self) -> None:
        """Put the files' cards together; set the steps that the trainer's records tell. Usually only new ones are added."""
        files = list(self._files.values())
        grew = {file.path: (file.num_resets, len(file.cards)) for file in files}
        if grew == self._joined:
            return
        is_append = self._joined.keys() == grew.keys() and all(
            grew[path][0] == resets for path, (resets, _) in self._joined.items()
        )
        starts = sorted(file.first_step for file in files if file.first_step is not None)
        per_update = self._rollouts_per_update()
        new: list[Card] = []
        by_id = self._by_id if is_append else {}
        for file in files:
            first = file.first_step
            later = next((start for start in starts if first is not None and start > first), None)
            known = self._joined[file.path][1] if is_append else 0
            for number, card in enumerate(file.cards[known:], start=known):
                step = self._step_of.get(card.id)
                card.is_trained = step is not None
                if step is not None or card.newest is not None:
                    card.step = step if step is not None else (card.newest or 0) + 1
                elif card.oldest is None and per_update and first is not None:
                    card.step = first + number // per_update + 1
                card.is_abandoned = later is not None and card.step > later and not card.is_trained
                by_id[card.id] = card, file
                new.append(card)
        self.cards, self._by_id = [*self.cards, *new] if is_append else new, by_id
        self._joined = grew
        self._kept = {}

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """What `make` returns, computed once until there are other rollouts."""
        kept = self._kept
        if key not in kept:
            kept[key] = make()
        found: T = kept[key]
        return found

    def _rollouts_per_update(self) -> int:
        number = self.config.get("rollouts", {}).get("rollouts_per_update")
        return number if isinstance(number, int) else 0


def _metrics_row(text: bytes) -> dict[str, Any] | None:
    try:
        row = msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None


def _rollout_files(folder: Path) -> list[Path]:
    """In the order of starts, and the actors' after them."""
    found = [path for path in (folder / ROLLOUTS).glob("*.jsonl*") if path.suffix == ".jsonl" or is_compressed(path)]
    return sorted(path for path in found if path.is_file() and not path.name.startswith("."))


def _size(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_size, stat.st_mtime_ns


def _sizes(folder: Path) -> tuple[Any, ...]:
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted((e.name, e.stat().st_size) for e in entries if not e.name.startswith(".")))
    except OSError:
        return ()


# --- the trainer's records --------------------------------------------------------------------------------------


def is_record(name: str) -> bool:
    return name.startswith("step_") and name.endswith(".npz")


def step_of_record(path: Path) -> int:
    digits = path.name.removeprefix("step_").partition(".")[0]
    return int(digits) if digits.isdigit() else 0


def rollouts_in(path: Path) -> list[str]:
    """The rollouts that a record names; none if it cannot be read."""
    try:
        with np.load(path, allow_pickle=False) as record:
            return [id.decode("utf-8", "replace") for id in record["rollout_id"].tolist()]
    except (OSError, ValueError, KeyError, zipfile.BadZipFile, EOFError, AttributeError):
        return []


# --- several runs -----------------------------------------------------------------------------------------------


class Runs:
    """The runs below a folder, or the run that the folder is. No path leads out of it."""

    def __init__(self, root: str | Path) -> None:
        given = Path(root)
        if not given.is_dir():
            raise ConfigError(f"{given} is not a folder. Give a run folder, or the folder that runs are in.")
        self._single = _is_run(given)
        self.root = given.resolve().parent if self._single else given.resolve()
        self._only = given.resolve().name if self._single else None
        self._indexes: dict[str, RunIndex] = {}
        self._lock = threading.Lock()

    def ids(self) -> list[str]:
        if self._only is not None:
            return [self._only]
        return sorted(path.relative_to(self.root).as_posix() for path in _runs_below(self.root, self.root, MAX_DEPTH))

    def get(self, id: str) -> RunIndex:
        """ConfigError if there is no such run."""
        if id not in self._indexes:
            folder = self._folder(id)
            with self._lock:
                self._indexes.setdefault(id, RunIndex(id, folder, self.root))
        return self._indexes[id]

    def _folder(self, id: str) -> Path:
        if id in self.ids():  # a name that was found, never a path that was given
            return self.root / id
        known = ", ".join(self.ids()[:20]) or "none"
        raise ConfigError(f"There is no run {id!r:.200} in {self.root}. There are: {known}.")


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, METRICS)) or (folder / ROLLOUTS).is_dir()


def _runs_below(folder: Path, root: Path, depth: int) -> Iterator[Path]:
    try:
        inside = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return
    for path in inside:
        if not path.resolve().is_relative_to(root):
            continue
        if _is_run(path):
            yield path
        elif depth > 1:
            yield from _runs_below(path, root, depth - 1)
