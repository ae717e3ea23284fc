"""Run folders and an index of their rollouts: metrics, cards, and which updates were trained on which rollouts."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ludic.run.names import CONFIG, FAILURE, METRICS, ROLLOUTS, TRAINED
from ludic.types import ConfigError
from ludic.util.files import Line, is_compressed, parse_json, parse_toml, read_lines
from ludic.util.metrics_file import metrics_row
from ludic_view.files import Card, RolloutFile
from ludic_view.records import BadRecord, is_record, rollouts_in, step_of_record

T = TypeVar("T")
MAX_TEXT_BYTES = 1 << 20
"""Longest config, failure file or line of metrics that is read."""
_UNWRITTEN = "an error that could not be written down, since the disk was full"
"""Text for an empty failure file."""
MAX_DEPTH = 3
"""Folders below the root in which runs are looked for."""


# --- one run ----------------------------------------------------------------------------------------------------


class RunIndex:
    """All that the API knows of a run. `refresh` reads what is new; every other method answers from memory.

    Methods may be called from several threads: `refresh` replaces lists instead of changing them.
    """

    def __init__(self, id: str, folder: Path, root: Path | None = None) -> None:
        """`folder` may also be one file of rollouts. `root`: files that links lead out of it are left out. Default: the folder."""
        self.id, self.folder, self._root = id, folder, (root or folder).resolve()
        self.cards: list[Card] = []
        """In the order of the files and their lines; abandoned ones included."""
        self.is_complete = False
        """True if all that was there at the last `refresh` has been read."""
        self.metrics: dict[int, dict[str, float | None]] = {}
        """Step -> metrics, of all lines of that step together."""
        self.times: dict[int, float] = {}
        self._files: dict[Path, RolloutFile] = {}
        self._by_id: dict[str, tuple[Card, RolloutFile]] = {}
        self._shadowed: dict[tuple[str, int | None, int], RolloutFile] = {}
        """Files of the cards whose id another card in `_by_id` has."""
        self._trained: dict[Path, tuple[int, int, list[str]]] = {}
        self.bad_records: set[Path] = set()
        self._step_of: dict[str, int] = {}
        self._metrics_read: tuple[int, int] = (-1, 0)
        self._lock = threading.Lock()
        self._joined: dict[Path, tuple[int, int]] = {}
        """For each file, the number of times it was read from its start, and of its cards in `cards`."""
        self._kept: dict[object, Any] = {}
        self._config: tuple[tuple[int, int], dict[str, Any]] = ((0, 0), {})
        self._config_error: str | None = None
        self._num_damaged_rows = 0

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
        self._config_error = None
        try:
            config = parse_toml(self._text(path)) if path.is_file() else {}
            msgspec.json.encode(config)  # as an answer will: tables may be nested more deeply than JSON
        except (OSError, ValueError, RecursionError) as error:
            self._config_error = f"{CONFIG}: {error!s:.200}"
            return {}
        return config

    def setting(self, section: str, name: str) -> Any:
        """A setting of the config; None if it is absent."""
        table = self.config.get(section)
        return table.get(name) if isinstance(table, dict) else None

    def damage(self) -> list[str]:
        """Sentences about what cannot be read of the run, one for each file."""
        self.config  # noqa: B018 - reads it
        numbers = {METRICS: self._num_damaged_rows, ROLLOUTS: self.num_damaged}
        found = [f"{name}: {number} lines cannot be read" for name, number in numbers.items() if number]
        found += [f"{TRAINED}: {len(self.bad_records)} files cannot be read"] if self.bad_records else []
        return [*([self._config_error] if self._config_error else []), *found]

    def _text(self, path: Path) -> str:
        if not self.is_inside(path):
            raise ValueError("a link leads out of the folder")
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ValueError(f"longer than {MAX_TEXT_BYTES} bytes")
        return content.decode()

    def failure(self) -> str | None:
        """The error that has ended the run; None if there is none, or if it is older than this file."""
        path = self.folder / FAILURE
        try:
            if not path.is_file():
                return None
            text = self._text(path)
            error = parse_json(text)["error"] if text else _UNWRITTEN
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
        known, file = self._by_id[card.id]
        if known is not card:
            file = self._shadowed[card.id, card.member, card.offset]
        return file.line(card)

    def stamp(self) -> tuple[Any, ...]:
        """Sizes of everything that a run appends to; another stamp is news."""
        return _size(self.folder / METRICS), _sizes(self.folder / ROLLOUTS), _sizes(self.folder / TRAINED)

    def updated(self) -> float:
        """When something was last written, in seconds since 1970; 0 if never."""
        places = (self.folder / METRICS, self.folder / CONFIG, self.folder / ROLLOUTS, *(self._files))
        return max(_size(place)[1] for place in places) / 1e9

    def _find_files(self) -> None:
        there = [path for path in _rollout_files(self.folder) if self.is_inside(path)]
        self._files = {path: self._files.get(path) or RolloutFile(path) for path in there}

    def _read_metrics(self) -> None:
        path = self.folder / METRICS
        try:
            stat = path.stat()
        except OSError:
            return
        if not self.is_inside(path) or not path.is_file():
            return
        inode, start = self._metrics_read
        if stat.st_ino != inode or stat.st_size < start:  # a resumed run has removed the lines that it writes again
            start, self.metrics, self.times, self._num_damaged_rows = 0, {}, {}, 0
        metrics, times = dict(self.metrics), dict(self.times)
        with contextlib.suppress(OSError):
            for line, text in read_lines(path, start=start, longest=MAX_TEXT_BYTES):
                if not text.endswith(b"\n"):
                    break
                start = line.offset + line.length
                row = metrics_row(text)
                if row is None:
                    self._num_damaged_rows += 1
                else:
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
                if is_record(e.name) and e.is_file(follow_symlinks=False)
            }
        known = {path: found for path, found in self._trained.items() if there.get(path) == found[:2]}
        is_done = True
        self.bad_records &= known.keys()
        for path, stamp in sorted(there.items()):
            if path in known:
                continue
            if time.monotonic() > deadline:
                is_done = False
                break
            known[path] = (*stamp, self._rollouts_in(path))
        if known != self._trained:
            self._trained = known
            self._step_of = {id: step_of_record(path) for path, (_, _, ids) in sorted(known.items()) for id in ids}
            self._joined = {}
        return is_done

    def _rollouts_in(self, path: Path) -> list[str]:
        try:
            return rollouts_in(path)
        except BadRecord:
            self.bad_records.add(path)
            return []

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
        by_id, shadowed = (self._by_id, self._shadowed) if is_append else ({}, {})
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
                if (older := by_id.get(card.id)) is not None:
                    shadowed[card.id, older[0].member, older[0].offset] = older[1]
                by_id[card.id] = card, file
                new.append(card)
        self.cards, self._by_id, self._shadowed = [*self.cards, *new] if is_append else new, by_id, shadowed
        self._joined = grew
        self._kept = {}

    def kept(self, key: object, make: Callable[[], T]) -> T:
        """The result of `make`, computed once until there are other rollouts."""
        kept = self._kept
        if key not in kept:
            kept[key] = make()
        found: T = kept[key]
        return found

    def _rollouts_per_update(self) -> int:
        number = self.setting("rollouts", "rollouts_per_update")
        return number if isinstance(number, int) else 0


def _rollout_files(folder: Path) -> list[Path]:
    """In the order of starts, and the actors' after them."""
    if folder.is_file():
        return [folder]
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
