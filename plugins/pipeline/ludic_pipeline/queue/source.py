"""`PipelineBatchSource`: the learner's end of the pipeline.

It holds the learner's lease (lease.py), fetches groups (queue.py), has them decoded (reader.py), returns batches of whole groups,
and acknowledges them when the trainer reports that they are trained on and saved (ledger.py). It prefetches the next batch
during training.
"""

import asyncio
import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from ludic.tasks import cancel_all
from ludic.types import ConfigError, SampleCheck, SAWBatch
from ludic_pipeline.queue import scripts
from ludic_pipeline.queue.connection import RedisGone
from ludic_pipeline.queue.lease import (
    LEASE_TIMES,
    CallScript,
    Heartbeat,
    LearnerStatus,
    Lease,
    LeaseLost,
    LeaseTimes,
)
from ludic_pipeline.queue.ledger import Acknowledge, Ledger
from ludic_pipeline.queue.queue import (
    START,
    ExperienceQueue,
    Settlement,
    hand_out_arguments,
    settle_arguments,
)
from ludic_pipeline.queue.reader import DeadLetters, GroupReader, ReadyGroup
from ludic_pipeline.queue.stats import PipelineStats
from ludic_pipeline.queue.wire import WireLimits

logger = logging.getLogger(__name__)

_LIMITS = WireLimits()
_FIRST_PAUSE_S = 0.005
_LOOKS_PER_POLL = 20
_CLOSING_PATIENCE_S = 5.0
_REFRESH_S = 1.0


class PipelineBatchSource:
    """Batches of whole groups from a queue that actors fill.

    `batch_size` counts items per batch over all ranks; a rank's batch has at least its share, because groups stay together. A batch
    takes `versions_per_batch` optimizer steps. The source polls an empty queue 20 times per `poll_timeout` seconds. It drops groups
    with a token more than `max_lag` versions away. The trainer calls `notify_version`, `notify_trained` and `notify_saved`, from
    any thread; `acknowledge` says which of the last two removes a group from the queue. Groups that fail the trainer's check
    (`use_sample_check`), and groups on which three learners died, go to the dead letters. Use `async with`, which detects
    whether the trainer failed.
    """

    def __init__(
        self,
        redis_url: str,
        queue_key: str = "ludic_queue",
        batch_size: int = 4,
        poll_timeout: float = 1.0,
        *,
        max_lag: int | None = None,
        acknowledge: str = Acknowledge.SAVED,
        rank: int = 0,
        world_size: int = 1,
        limits: WireLimits = _LIMITS,
        lease_times: LeaseTimes = LEASE_TIMES,
        patience_s: float = 120.0,
        versions_per_batch: int = 1,
    ) -> None:
        for is_right, message in (
            (0 <= rank < world_size, f"rank={rank} of world_size={world_size}; ranks go from 0 to world_size - 1."),
            (
                batch_size >= world_size,
                f"batch_size={batch_size} for {world_size} ranks; each needs at least one item.",
            ),
            (poll_timeout > 0, f"poll_timeout={poll_timeout}; it must be more than 0 seconds."),
            (max_lag is None or max_lag >= 0, f"max_lag={max_lag}; it must be 0 or more, or None for no limit."),
            (versions_per_batch >= 1, f"versions_per_batch={versions_per_batch}; training on a batch makes a version."),
            (acknowledge in list(Acknowledge), f"acknowledge={acknowledge!r}; it must be {' or '.join(Acknowledge)}."),
        ):
            if not is_right:
                raise ConfigError(message)
        self._queue = ExperienceQueue(
            redis_url, queue_key, max_bytes=limits.max_bytes, patience_s=patience_s, lease_times=lease_times
        )
        self._batch_size, self._poll_timeout, self._max_lag = batch_size, poll_timeout, max_lag
        self._world_size = world_size
        self._reader = GroupReader(limits)
        self._share = math.ceil(batch_size / world_size)
        self._versions_per_batch = versions_per_batch
        # With several ranks, a group that one rank prefetches is missing for another.
        self._prefetches = world_size == 1
        self._lease = Lease(f"learner-{rank}")
        self._ledger = Ledger(Acknowledge(acknowledge))
        self._heartbeat = Heartbeat(self._queue.address, self._queue.keys, self._lease, lease_times, self._beat)
        self._is_named = self._has_begun = self._is_closed = self._has_failed = False
        self._dead_letters = DeadLetters()
        self._version: int | None = None
        self.is_waiting = False
        """The learner waits for samples now."""
        self._num_handing_out = 0
        self._status_numbers = itertools.count(1)
        self._one_status = threading.Lock()
        """Numbers the statuses of both threads in the order in which their contents are read."""
        self._ready: list[ReadyGroup] = []
        self._cursor = START
        self._filling: asyncio.Task[None] | None = None
        self._reclaim_at = self._refresh_at = 0.0
        self._num_batches = 0
        self._seen = threading.Lock()
        """Guards the counts and histograms, which the trainer's thread also reads."""
        self._queue_stats = PipelineStats()
        self._lags: Counter[int] = Counter()
        self._dropped_lags: Counter[int] = Counter()

    # --- batches ---

    async def next_batch(self) -> SAWBatch:
        """Wait, without blocking the event loop, until there are enough fresh items."""
        await self._begin()
        await self.flush()
        await self._refresh_if_due()
        self.is_waiting = True
        try:
            while not self._is_filled:
                await self._fill_in_background()
                await self._drop_stale()
        finally:
            self.is_waiting = False
        batch = await self._hand_out()
        if self._prefetches:
            self._start_filling()
        return batch

    get_next_batch = next_batch

    async def _hand_out(self) -> SAWBatch:
        alone = [group for group in self._ready if group.is_alone]
        groups = alone[:1] or await asyncio.to_thread(self._reader.trained_together, list(self._ready))
        num_items = sum(len(group.items) for group in groups)
        # This call also confirms the lease before training. The previous batch is over: the trainer asks for another.
        begun, over = [group.id for group in groups], self._ledger.over(with_out=True)
        self._num_handing_out = num_items
        try:
            await self._queue.hand_out(self._lease, self._status(), begun=begun, over=over)
            self._ledger.mark_over(over)
            with self._one_status:
                self._ledger.hand_out((group.id, len(group.items)) for group in groups)
                self._num_handing_out = 0
        finally:
            self._num_handing_out = 0  # also if the call was cancelled
        self._ready = [group for group in self._ready if group not in groups]
        lags = self._lags_of(groups)
        with self._seen:
            self._lags.update(lags)
        self._num_batches += 1
        metrics = {"num_groups": float(len(groups)), **self.stats().metrics()}
        meta = {
            "source": "pipeline_redis",
            "batch_index": self._num_batches - 1,
            "num_samples": num_items,
            "lags": dict(sorted(lags.items())),
            **metrics,
            "rollout_metrics": metrics,
        }
        return SAWBatch(items=[item for group in groups for item in group.items], meta=meta)

    def _lags_of(self, groups: Sequence[ReadyGroup]) -> Counter[int]:
        lags: Counter[int] = Counter()
        for group in groups:
            lag = self._lag(group)
            if lag is not None:
                lags[lag] += len(group.items)
        return lags

    def _lag(self, group: ReadyGroup) -> int | None:
        if self._version is None or group.oldest_version is None:
            return None
        return self._version - group.oldest_version

    def _is_stale(self, group: ReadyGroup) -> bool:
        """The same rule as in the script TAKE."""
        lag = self._lag(group)
        if lag is None or self._max_lag is None:
            return False
        return lag > self._max_lag or -lag > self._max_lag + 1

    async def _drop_stale(self) -> None:
        """Drop prefetched groups that have become too old."""
        stale = [group for group in self._ready if self._is_stale(group)]
        if not stale:
            return
        lags = self._lags_of(stale)
        settlements = [Settlement(id=group.id, stale=len(group.items)) for group in stale]
        await self._queue.settle(self._lease, self._status(), settlements)
        with self._seen:
            self._dropped_lags.update(lags)
        gone = {group.id for group in stale}
        self._ready = [group for group in self._ready if group.id not in gone]

    # --- fetching ---

    @property
    def _is_filled(self) -> bool:
        fresh = [group for group in self._ready if not self._is_stale(group)]
        return len(fresh) == len(self._ready) and self._num_missing <= 0

    @property
    def _num_missing(self) -> int:
        """Number of items missing for a batch."""
        if any(group.is_alone for group in self._ready):
            return 0
        return self._share - sum(len(group.items) for group in self._ready)

    def _start_filling(self) -> asyncio.Task[None]:
        self._filling = asyncio.create_task(self._fill(), name="fetch groups ahead")
        return self._filling

    async def _fill_in_background(self) -> None:
        """Wait for the prefetch task; start one if there is none, or if its event loop has ended."""
        task, self._filling = self._filling, None
        if task is None or task.cancelled() or task.get_loop() is not asyncio.get_running_loop():
            task = self._start_filling()
        try:
            await task
        finally:
            self._filling = None

    async def _fill(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while (missing := self._num_missing) > 0:
            await self._reclaim_if_due()
            if await self._take(missing):
                pause_s = _FIRST_PAUSE_S
            else:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, self._poll_timeout / _LOOKS_PER_POLL)

    async def _take(self, num_items: int) -> bool:
        """Fetch and decode once; False if the queue is empty."""
        held = self._ledger.ids() | {group.id for group in self._ready}
        # Reset until the answer is here: after an interruption the groups are among our unacknowledged ones.
        cursor, self._cursor = self._cursor, START
        taken = await self._queue.take(self._lease, self._status(), max_items=num_items, cursor=cursor, held=held)
        self._dead_letters.add(taken.dead_letters)
        # A killed Redis may have lost its last writes and offer groups that we hold or have acknowledged.
        new = [group for group in taken.groups if group.id not in held and not self._ledger.forgotten(group.id)]
        groups, reasons = await asyncio.to_thread(self._reader.read, new)
        if reasons:
            self._dead_letters.add(Counter(reasons.values()))
            await self._queue.move_to_dead_letters(self._lease, self._status(), reasons)
        self._ready += groups
        self._cursor = taken.cursor
        with self._seen:
            self._dropped_lags.update(taken.stale)
        return bool(taken.groups) or not taken.is_empty

    async def _reclaim_if_due(self) -> None:
        if time.monotonic() < self._reclaim_at:
            return
        num_moved = await self._queue.reclaim(self._lease, self._status(), num_learners=self._world_size)
        if num_moved:
            logger.info("took over %d groups of a dead learner", num_moved)
            self._cursor = START
        else:
            self._reclaim_at = time.monotonic() + self._queue.lease_times.holds_s

    # --- called by the trainer, from any thread ---

    def use_sample_check(self, check: SampleCheck) -> None:
        """Check every group decoded from now on. The check runs in a thread, one group at a time."""
        self._reader.sample_check = check

    def notify_version(self, version: int) -> None:
        """Set the policy version."""
        self._version = version

    def notify_trained(self, step: int, num_items: int) -> None:
        """Optimizer step `step` has used `num_items` of the items returned since the last step."""
        self._ledger.trained(step, num_items)
        self._version = step

    def notify_saved(self, step: int) -> None:
        """A checkpoint of this step is on disk."""
        self._ledger.saved(step)

    # --- acknowledging ---

    async def flush(self) -> None:
        """Acknowledge all groups that are due."""
        due = self._ledger.due()
        if due:
            await self._queue.settle(self._lease, self._status(leaving=due), due)
            self._ledger.settled(due)

    def _beat(self, call: CallScript) -> None:
        """Called in the heartbeat's thread: renew the lease, acknowledge due groups, read the queue's counts."""
        due = self._ledger.due()[: scripts.CHUNK]
        call(scripts.SETTLE, [*self._status(leaving=due).arguments(self._lease), *settle_arguments(due)])
        self._ledger.settled(due)
        over = self._ledger.over()
        if over:
            call(scripts.HAND_OUT, [*self._status().arguments(self._lease), *hand_out_arguments(begun=(), over=over)])
            self._ledger.mark_over(over)
        self._note(PipelineStats.read(call(scripts.COUNT_ITEMS, self._queue.counts_arguments)))

    def _status(self, *, leaving: Sequence[Settlement] = ()) -> LearnerStatus:
        with self._one_status:
            return LearnerStatus(
                sequence=next(self._status_numbers),
                version=self._version,
                items_per_update=self._batch_size,
                versions_per_batch=self._versions_per_batch,
                max_lag=self._max_lag,
                is_waiting=self.is_waiting,
                items_in_hand=self._ledger.items_in_hand(leaving) + self._num_handing_out,
            )

    # --- stats ---

    def stats(self) -> PipelineStats:
        """The counts at the last heartbeat or refresh; makes no call. May be called from any thread."""
        with self._seen:
            lags, dropped = (dict(sorted(seen.items())) for seen in (self._lags, self._dropped_lags))
            return replace(self._queue_stats, lags=lags, dropped_lags=dropped)

    async def _refresh_if_due(self) -> None:
        """Refresh at most once a second, so that a fast run shows live numbers."""
        if time.monotonic() >= self._refresh_at:
            self._refresh_at = time.monotonic() + _REFRESH_S
            await self.refresh_stats()

    async def refresh_stats(self) -> PipelineStats:
        """Read the counts from Redis now."""
        self._note(await self._queue.counts())
        return self.stats()

    def _note(self, stats: PipelineStats) -> None:
        with self._seen:
            self._queue_stats = stats

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """The groups that the weights include and that are not acknowledged yet."""
        return {"num_batches": self._num_batches, "trained": self._ledger.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._has_begun:
            raise ConfigError("Load the state before the first next_batch; groups have been fetched already.")
        self._num_batches = state["num_batches"]
        self._ledger.load(state["trained"])

    # --- start and end ---

    async def _begin(self) -> None:
        if self._is_closed:
            raise ConfigError("This PipelineBatchSource is closed; make a new one.")
        if self._has_begun:
            return
        self._is_named = True  # before the call: if it is interrupted, the lease may still be ours
        await self._queue.acquire_when_free(self._lease)
        await self._queue.announce(self._lease, self._status())
        self._has_begun = True
        self._heartbeat.start()

    async def close(self) -> None:
        """Acknowledge due groups and release the lease. Groups that were not trained on stay in the queue."""
        if self._is_closed:
            return
        self._is_closed = True
        task, self._filling = self._filling, None
        if task is not None and task.get_loop() is asyncio.get_running_loop():
            await cancel_all([task])
        if self._has_begun:
            await asyncio.to_thread(self._heartbeat.stop)
        if self._is_named:
            await self._release()
        await self._queue.close()

    async def _release(self) -> None:
        self._queue.patience_s = min(self._queue.patience_s, _CLOSING_PATIENCE_S)
        try:
            if self._has_begun:
                await self.flush()
                over = self._ledger.over(with_out=not self._has_failed)
                await self._queue.hand_out(self._lease, self._status(), begun=(), over=over)
            await self.refresh_stats()
            await self._queue.release(self._lease)
        except (LeaseLost, RedisGone) as error:
            logger.warning("closed without releasing the lease; a resume settles open groups: %s", error)
        if (summary := self._dead_letters.summary()) is not None:
            logger.warning("%s; see the stream %s", summary, self._queue.keys.dead)

    async def __aenter__(self) -> "PipelineBatchSource":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An update that raised counts as a failed try of its groups, like a killed one.
        self._has_failed = isinstance(error, Exception) and not isinstance(error, (LeaseLost, RedisGone))
        await self.close()
