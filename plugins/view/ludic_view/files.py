"""One file of rollouts, which is followed by byte offset while it is written.

Nothing is locked, and nothing is written into a run folder. The cards of a large file are kept in a cache folder
($XDG_CACHE_HOME/ludic/view), so that the next start reads only what is new.
"""

import hashlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ludic.util.files import Line, read_lines
from ludic_view.cards import Card, make_card

logger = logging.getLogger(__name__)

_CACHE_VERSION = 3
_CACHE_FROM = 2_000
"""Rollouts that are indexed again at every start instead of being cached: a fraction of a second."""
_IDENTITY_BYTES = 256


# --- rollouts ---------------------------------------------------------------------------------------------------


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
    """Bytes of that member's text that have been read."""
    _size: int = -1
    """Of the file when all of it had been read."""
    _num_cached: int = 0

    @property
    def first_step(self) -> int | None:
        """The step that its start of the run began at; None for the file of an actor."""
        digits = self.path.name.partition("from_step_")[2][:6]
        return int(digits) if digits.isdecimal() else None

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
        for line, text in read_lines(self.path, start=self._start, skip=self._num_seen):
            end = line.offset + line.length
            self._start, self._num_seen = (end, 0) if line.member is None else (line.member, end)
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
