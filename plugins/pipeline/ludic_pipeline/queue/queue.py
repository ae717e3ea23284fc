"""`ExperienceQueue`: groups of samples between actors and learners, over Redis Streams.

A group is delivered whole and at least once, to one learner at a time, and is removed when that learner settles it. Calls are
repeated after a lost connection; the scripts (ludic_pipeline.queue.scripts) are idempotent. The queue carries bytes; their
format is that of ludic_pipeline.queue.wire.
"""

import asyncio
import logging
import os
import platform
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, NewType, TypeVar

from ludic.types import ConfigError
from ludic_pipeline.queue import scripts
from ludic_pipeline.queue.connection import RedisAddress, RetryBackoff, away, code_of
from ludic_pipeline.queue.lease import LEASE_TIMES, LearnerStatus, Lease, LeaseHeld, LeaseTimes, lost
from ludic_pipeline.queue.pacing import LearnerState
from ludic_pipeline.queue.stats import PipelineStats

if TYPE_CHECKING:
    import redis.asyncio

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

ActorId = NewType("ActorId", str)
"""One actor process. A restarted actor gets a new id, because its sequence numbers start again."""

START = "0"
"""Cursor at the first of a learner's own unacknowledged groups."""
_ENOUGH_BYTES = 16 * 2**20
"""Maximum size of one answer of Redis."""
_MAX_LOOKED_AT = 1000
"""Maximum number of entries that one take reads; Redis serves no other client meanwhile."""
_FORGET_ACTOR_S = 24 * 3600
"""An actor without heartbeats for this long will not repeat a push."""
_LEASES_TO_WAIT = 4
"""If the holder still renews its lease after this many lease durations, it is alive."""
_LEASE_MARGIN_S = 0.5
"""`finish` looks at the lease of another learner at this interval, and for this much longer than it lasts."""
MAX_TRIES = 3
"""A group becomes a dead letter when this many learners have died while they trained on it."""


def new_actor_id(name: str = "actor") -> ActorId:
    return ActorId(f"{name}@{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex[:12]}")


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenGroup:
    """A group that a learner has taken."""

    id: str
    """Id of its stream entry."""
    num_items: int
    oldest_version: int | None
    num_tries: int
    """Learners that have died in an update with this group."""
    payload: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The result of one take."""

    groups: list[TakenGroup]
    cursor: str
    """Position among the learner's own unacknowledged groups; empty after the last one."""
    is_empty: bool
    """The queue has no more new groups."""
    stale: dict[int, int]
    """Lag → items dropped because of it."""
    dead_letters: dict[str, int]
    """Reason → groups moved to the dead letters: foreign entries, payloads missing or too large, groups on which learners died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settlement:
    """The use of a group's items."""

    id: str
    trained: int = 0
    stale: int = 0
    filtered: int = 0

    @property
    def num_items(self) -> int:
        return self.trained + self.stale + self.filtered


class ExperienceQueue:
    """A client of the queue, for an actor or a learner.

    It works in any event loop. Close it, or use `async with`.
    """

    def __init__(
        self,
        redis_url: str,
        queue_key: str = "ludic_queue",
        *,
        max_waiting: int = 1024,
        max_bytes: int = 64 * 2**20,
        patience_s: float = 120.0,
        lease_times: LeaseTimes = LEASE_TIMES,
        actor_timeout_s: float = 15.0,
    ) -> None:
        if max_waiting < 1 or max_bytes < 1:
            raise ConfigError(f"max_waiting={max_waiting}, max_bytes={max_bytes}; both must be 1 or more.")
        self.address = RedisAddress(redis_url)
        self.keys = scripts.Keys(queue_key)
        self.lease_times = lease_times
        self._max_waiting, self._max_bytes = max_waiting, max_bytes
        self.patience_s = patience_s
        self._living_ms = round(actor_timeout_s * 1000)
        self._client: redis.asyncio.Redis | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def counts_arguments(self) -> list[Any]:
        return [self._living_ms]

    def __repr__(self) -> str:
        return f"ExperienceQueue({str(self.address)!r}, {self.keys.queue_key!r})"

    # --- actors ---

    async def push(
        self, actor: ActorId, sequence: int, payload: bytes, *, num_items: int, oldest_version: int | None
    ) -> bool:
        """Push a group: its sequence number (1, 2, 3, … within an actor process), its bytes, and the oldest version of any token.

        False if the queue is full: retry with the same number later. Pushing a number again returns True and changes nothing.
        Numbers must rise: a number after a greater one counts as a repetition, so a process pushes one group at a time.
        """
        if sequence < 1 or not 1 <= num_items < 1_000_000 or not payload:
            raise ConfigError(
                f"A group with sequence={sequence}, num_items={num_items} and {len(payload)} bytes; sequence numbers begin at 1, "
                "and a group has from 1 to 999,999 items."
            )
        if oldest_version is not None and (type(oldest_version) is not int or not 0 <= oldest_version < 10**15):
            raise ConfigError(
                f"A group of version {oldest_version!r}; a policy version is a whole number from 0 on, or None if unknown."
            )
        if len(payload) > self._max_bytes:
            raise ConfigError(
                f"A group of {num_items} items has {len(payload)} bytes, the limit is {self._max_bytes}. Use smaller groups, or "
                "raise the limit of actors and learners."
            )
        version = "" if oldest_version is None else oldest_version
        args: list[Any] = [actor, self._max_waiting, sequence, num_items, version]

        async def push(client: "redis.asyncio.Redis") -> int:
            # EVAL, not EVALSHA: if Redis has dropped the script, EVALSHA fails after the payload is written.
            async with client.pipeline(transaction=True) as transaction:
                transaction.set(self.keys.arriving(actor, sequence), payload)
                transaction.eval(scripts.PUSH, len(self.keys.all), *self.keys.all, *args)
                _, accepted = await transaction.execute()
            return accepted

        return bool(await self._patiently(push, waits_for_room=True))

    async def beat_actor(self, actor: ActorId, in_progress_items: int, scorers: str = "") -> LearnerState:
        """Send an actor's heartbeat and return the learner's state. `scorers`: a `scorer_report`, which replaces the last."""
        lease_ms = round(self.lease_times.holds_s * 1000)
        args = [actor, in_progress_items, self._living_ms, _FORGET_ACTOR_S * 1000, lease_ms, scorers]
        version, batch, max_lag, is_waiting, *counts, finished = await self._call(scripts.BEAT_ACTOR, args)
        items, _, versions = batch.partition(b"/")
        waiting_items, in_progress_items, num_actors, waiting_groups, num_learners = counts
        return LearnerState(
            version=_number(version),
            items_per_update=_number(items),
            max_lag=_number(max_lag),
            is_waiting=bool(is_waiting),
            waiting_items=waiting_items,
            in_progress_items=in_progress_items,
            num_actors=num_actors,
            waiting_groups=waiting_groups,
            num_learners=num_learners,
            versions_per_batch=_number(versions) or 1,
            finished_after=_number(finished),
        )

    # --- learners ---

    async def acquire(self, lease: Lease, *, seen: bytes = b"") -> tuple[str, float, bytes]:
        """Acquire the lease. Returns the token of its holder and, if that is another learner, the seconds left and its record.

        `seen`: the record of that lease as read at least one lease duration ago. If it is unchanged, the lease has expired.
        """
        lease_ms = round(self.lease_times.holds_s * 1000)
        holder, left_ms, written = await self._call(scripts.ACQUIRE, [lease.name, lease.token, lease_ms, seen])
        return holder.decode(errors="replace"), int(left_ms) / 1000, written

    async def acquire_when_free(self, lease: Lease) -> None:
        """Acquire the lease; if another learner holds it, wait until it expires.

        An unrenewed lease also expires by the local clock, because Redis's clock may have been set back.
        """
        holds_s = self.lease_times.holds_s
        give_up_at = time.monotonic() + _LEASES_TO_WAIT * holds_s
        seen, seen_at = b"", time.monotonic()
        while True:
            is_old = bool(seen) and time.monotonic() >= seen_at + holds_s
            holder, left_s, written = await self.acquire(lease, seen=seen if is_old else b"")
            if holder == lease.token:
                return
            if written != seen:
                seen, seen_at = written, time.monotonic()
            if time.monotonic() > give_up_at:
                raise LeaseHeld(
                    f"{lease.name!r} of queue {self.keys.queue_key!r} belongs to another learner ({holder}), which is alive. Stop "
                    "it, or use another queue_key (or rank, if both belong to one run)."
                )
            logger.warning("%s belongs to %s; waiting %.1f s for its lease to expire", lease.name, holder, left_s)
            await asyncio.sleep(left_s + 0.01)

    async def release(self, lease: Lease) -> None:
        """Free the name at once; its unacknowledged groups stay for the next learner of this name."""
        await self._call(scripts.RELEASE, [lease.name, lease.token])

    async def finish(self, num_updates: int) -> bool:
        """Tell actors, also those that start later, that the run has made all its updates; the next learner removes the mark.

        False, and they are not told, if another learner is at work. A lease that is not renewed is waited for: its learner died.
        """
        args = [num_updates, round(self.lease_times.holds_s * 1000)]
        left_ms = await self._call(scripts.FINISH, args)
        ends = time.monotonic() + left_ms / 1000 + _LEASE_MARGIN_S
        while left_ms and time.monotonic() < ends:
            await asyncio.sleep(
                min(left_ms / 1000, _LEASE_MARGIN_S)
            )  # other ranks of this learner release theirs by now
            left_ms = await self._call(scripts.FINISH, args)
        return not left_ms

    async def reopen(self) -> None:
        """Remove the mark of `finish`: a learner is starting."""
        await self._call(scripts.REOPEN, [])

    async def announce(self, lease: Lease, status: LearnerStatus) -> None:
        """Publish the learner's state to the actors."""
        await self._learner_call(scripts.ANNOUNCE, lease, status, [])

    async def hand_out(
        self, lease: Lease, status: LearnerStatus, *, begun: Collection[str], over: Collection[str]
    ) -> None:
        """Record that an update starts with the groups `begun` and that the updates of the groups `over` have ended. A group
        whose update never ends counts one failed try."""
        await self._learner_call(scripts.HAND_OUT, lease, status, hand_out_arguments(begun=begun, over=over))

    async def take(
        self,
        lease: Lease,
        status: LearnerStatus,
        *,
        max_items: int,
        cursor: str = "",
        held: Collection[str] = (),
    ) -> Taken:
        """Take whole groups until they have at least `max_items` items: first the learner's own unacknowledged groups from
        `cursor` on, except those in `held`; then new ones. Drops groups that are too old, and moves groups on which
        MAX_TRIES learners have died to the dead letters.

        A caller that did not receive the answer (a cancelled call) must start with cursor `START` again.
        """
        limits = [max_items, self._max_bytes, _ENOUGH_BYTES, _MAX_LOOKED_AT, MAX_TRIES]
        args = [*limits, cursor, *(held if cursor else ())]
        again = [*limits, START, *held]  # after a lost reply, the delivered groups are among the learner's own
        flat, cursor_after, is_empty, stale, dead = await self._learner_call(
            scripts.TAKE, lease, status, args, again=again
        )
        ids = [id_.decode() for id_ in flat[::4]]
        rows = zip(ids, flat[1::4], flat[2::4], flat[3::4], await self._payloads(ids), strict=True)
        return Taken(
            groups=[
                TakenGroup(id=id_, num_items=int(n), oldest_version=_number(v), num_tries=int(tries), payload=payload)
                for id_, n, v, tries, payload in rows
            ],
            cursor=cursor_after.decode(),
            is_empty=bool(is_empty),
            stale=_summed(stale),
            dead_letters=dict(Counter(reason.decode(errors="replace") for reason in dead)),
        )

    async def _payloads(self, ids: Sequence[str]) -> list[bytes]:
        """The payloads, cut at the size limit: another program may have replaced one since the script checked its size. A
        payload that another program has removed is empty, which the reader rejects."""
        if not ids:
            return []

        async def read(client: "redis.asyncio.Redis") -> list[Any]:
            async with client.pipeline(transaction=False) as pipeline:
                for id_ in ids:
                    pipeline.getrange(self.keys.payload(id_), 0, self._max_bytes - 1)
                return await pipeline.execute(raise_on_error=False)

        found = await self._patiently(read)
        return [payload if isinstance(payload, bytes) else b"" for payload in found]

    async def settle(self, lease: Lease, status: LearnerStatus, settlements: Sequence[Settlement]) -> int:
        """Acknowledge and remove these groups; returns how many were still there. A repetition changes nothing."""
        num_settled = 0
        for start in range(0, len(settlements), scripts.CHUNK):
            part = settlements[start : start + scripts.CHUNK]
            num_settled += await self._learner_call(scripts.SETTLE, lease, status, settle_arguments(part))
        return num_settled

    async def move_to_dead_letters(self, lease: Lease, status: LearnerStatus, reasons: dict[str, str]) -> int:
        """Move these groups (entry id → reason) to the dead letters; returns their number of items."""
        args = [value for id_, reason in reasons.items() for value in (id_, reason[:1000])]
        return int(await self._learner_call(scripts.DEAD_LETTER, lease, status, args))

    async def reclaim(self, lease: Lease, status: LearnerStatus, *, num_learners: int) -> int:
        """Take over the groups of dead learners whose rank does not exist in this world size; returns their number."""
        args = [round(self.lease_times.holds_s * 1000), num_learners, scripts.CHUNK]
        return int(await self._learner_call(scripts.RECLAIM, lease, status, args))

    # --- both ---

    async def counts(self) -> PipelineStats:
        """The counts of the queue at this moment."""
        return PipelineStats.read(await self._call(scripts.COUNT_ITEMS, self.counts_arguments))

    async def clear(self) -> None:
        """Delete all groups, counts and leases, before a new run."""
        await self._call(scripts.CLEAR, [])

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._loop is asyncio.get_running_loop():
            await client.aclose()

    async def __aenter__(self) -> "ExperienceQueue":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- calling Redis ---

    async def _learner_call(
        self,
        script: str,
        lease: Lease,
        status: LearnerStatus,
        args: Sequence[Any],
        *,
        again: Sequence[Any] | None = None,
    ) -> Any:
        from redis.exceptions import ResponseError

        common = status.arguments(lease)
        try:
            return await self._call(script, [*common, *args], again=None if again is None else [*common, *again])
        except ResponseError as error:
            if str(error).startswith(scripts.LEASE_LOST):
                raise lost(lease, str(error)) from error
            raise

    async def _call(self, script: str, args: Sequence[Any], *, again: Sequence[Any] | None = None) -> Any:
        """Call a script; after a lost connection repeat the call, with the arguments `again` if given."""
        now, then = args, args if again is None else again

        def ask(client: "redis.asyncio.Redis") -> Awaitable[Any]:
            nonlocal now
            mine, now = now, then
            return client.register_script(script)(keys=self.keys.all, args=mine)

        return await self._patiently(ask)

    async def _patiently(
        self, ask: Callable[["redis.asyncio.Redis"], Awaitable[Any]], *, waits_for_room: bool = False
    ) -> Any:
        """Repeat a call while the connection is lost or Redis temporarily refuses."""
        patience = RetryBackoff(self.address, self.patience_s, waits_for_room=waits_for_room)
        while True:
            try:
                async with asyncio.timeout(self.address.timeout_s):
                    answer = await _unless_cancelled(ask(self._connected()))
            except away() as error:
                if str(error).startswith(scripts.LEASE_LOST):
                    raise
                if code_of(error) == "WRONGTYPE":
                    raise await self._wrong_type(error) from error
                await asyncio.sleep(patience.wait_after(error))
            else:
                patience.answered()
                return answer

    async def _wrong_type(self, error: Exception) -> ConfigError:
        """The error that names the keys of the wrong type; Redis does not name them."""
        client: Any = self._connected()
        found = {key: (await client.type(key)).decode() for key in self.keys.types}
        wrong = [key for key, type_ in found.items() if type_ not in ("none", self.keys.types[key])]
        what = "; ".join(
            f"{key!r} holds a {found[key]}, the queue keeps a {self.keys.types[key]} there" for key in wrong
        )
        return ConfigError(
            f"Redis at {self.address} has something else under keys of the queue {self.keys.queue_key!r}: {what or error}. Another "
            "program has written there. Use another queue_key, or remove the key: redis-cli DEL "
            f"{' '.join(repr(key) for key in wrong)}."
        )

    def _connected(self) -> "redis.asyncio.Redis":
        loop = asyncio.get_running_loop()
        if self._client is None or self._loop is not loop:
            # Connections belong to an event loop and end with it (a second `train_sync`).
            self._client, self._loop = self.address.async_client(), loop
        return self._client


async def _unless_cancelled(call: Awaitable[_Answer]) -> _Answer:
    """Await the call and re-raise a swallowed cancellation. redis-py uses `asyncio.wait_for`, which in Python 3.11 swallows a
    cancellation that arrives in the same loop iteration as the result; the caller that cancelled would hang."""
    task = asyncio.current_task()
    assert task is not None, "a coroutine runs in a task"
    num_before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > num_before:
            raise asyncio.CancelledError


def hand_out_arguments(*, begun: Collection[str], over: Collection[str]) -> list[Any]:
    """Arguments of HAND_OUT after the common ones of a learner."""
    return [len(over), *over, *begun]


def settle_arguments(settlements: Sequence[Settlement]) -> list[Any]:
    """Arguments of SETTLE after the common ones of a learner."""
    return [value for s in settlements for value in (s.id, s.trained, s.stale, s.filtered)]


def _number(text: bytes) -> int | None:
    return int(text) if text.isdigit() else None


def _summed(pairs: Sequence[bytes]) -> dict[int, int]:
    sums: dict[int, int] = {}
    for lag, items in zip(pairs[::2], pairs[1::2], strict=True):
        sums[int(lag)] = sums.get(int(lag), 0) + int(items)
    return sums
