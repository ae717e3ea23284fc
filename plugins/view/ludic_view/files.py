"""One file of rollouts, of which a `Card` each is kept, followed by byte offset while it is written.

Nothing is locked, and nothing is written into a run folder. The cards of a large file are kept in a cache folder
($XDG_CACHE_HOME/ludic/view), so that the next start reads only what is new.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ludic.types import Rollout, StopReason, spread_of
from ludic.util.files import Line, parse_json, read_lines

logger = logging.getLogger(__name__)

_CACHE_VERSION = 3
_CACHE_FROM = 2_000
"""Rollouts that are indexed again at every start instead of being cached: a fraction of a second."""
_IDENTITY_BYTES = 256


# --- cards: what an index knows of a rollout, made without decoding the tokens of its line ----------------------

PREVIEW_CHARS = 160
_TRUNCATIONS = {reason.value for reason in StopReason if reason.is_truncation}
_TASK_KEYS = ("task_id", "sample_index", "task_index")
"""Names of a task in requests, in the order in which they are looked for."""


class Card(msgspec.Struct, array_like=True, gc=False):
    """The facts of a rollout that lists and charts show."""

    id: str
    step: int
    """The update that trained on it; estimated from its versions until the trainer's record is there. 0: not known."""
    group: str | None
    task: str
    env: str | None
    agent: str | None
    model: str | None
    """The model's name in its requests."""
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
    """Replies that were not read: cut off, or unreadable."""
    unreadable: int
    """Unread replies that were not cut off."""
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
    """The place of its line in the file."""
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
        """The card in the form of the API."""
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
    value = parse_json(text, parse_constant=lambda _: None)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _make_card(text: bytes, line: Line) -> Card:
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
    tokens = sum(trace.num_tokens for trace in traces)
    if any(abs(number) >= 2**63 for number in (*versions, *times, tokens)):
        raise ValueError("a number is out of range")
    first = bytes(calls[0].prompt_messages) if calls else b""
    unread = [s for s in calls if s.kind == "agent" and s.info.parse_error and s.action_target == "env"]
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
        tokens=tokens,
        stop=head.stop,
        failure=None if failure is None else f"{failure.get('error')}: {failure.get('message')}"[:500],
        truncated=is_cut or head.stop in _TRUNCATIONS,
        parse_errors=len(unread),
        unreadable=sum(not (isinstance(s.trace, _Trace) and s.trace.finish_reason == "length") for s in unread),
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
    """A name that every attempt at one task shares: its id, its place in the data, or else its first prompt."""
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
    """True if a group of several earned the same reward throughout, so that nothing is learned from it."""
    rewards = [card.reward for card in members]
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return len(rewards) > 1
    return _is_close(rewards) and spread_of(rewards) == 0


def _is_close(rewards: Sequence[float]) -> bool:
    """True if they might differ by no more than rounding; all others need no exact look."""
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
    """Number of times that another file was found under its name."""
    _identity: tuple[int, bytes] | None = None
    """Inode and first bytes: another pair is another file under the same name."""
    _start: int = 0
    """The place to continue at: the end of the last line; in a compressed file, the start of the last member."""
    _num_seen: int = 0
    """Bytes of that member's text that have been read."""
    _size: int = -1
    """Size of the file when all of it had been read."""
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
            self.cards.append(_make_card(text, line))
        except (msgspec.DecodeError, ValueError, TypeError, AttributeError, RecursionError):
            self.num_damaged += 1

    def line(self, card: Card) -> Line:
        return Line(self.path, card.offset, card.length, card.member)

    # --- the cache ---

    @property
    def _cache(self) -> Path:
        name = hashlib.blake2b(str(self.path.resolve()).encode(), digest_size=12).hexdigest()
        return _cache_folder() / f"{name}.v{_CACHE_VERSION}.msgpack"

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


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "ludic" / "view"
