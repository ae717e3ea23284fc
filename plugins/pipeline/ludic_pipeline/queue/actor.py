"""`run_pipeline_actor` runs groups of episodes with the served policy and pushes each group when it is complete.

The actor keeps running through weight updates; every token records the version that sampled it. It starts a group only if the
group will be fresh when it is trained on (see `pacing`), cancels groups that have become too old, waits while the queue is full,
and retries while Redis is unreachable. A failed episode is data; a wrong set-up or a lost policy server ends the actor.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.engine import RolloutEngine
from ludic.batch_gen.requests.groups import RequestGroup, RequestsFn, RequestStrategy, RequestStream
from ludic.http.client import RetryableError
from ludic.types import (
    ChatClient,
    ConfigError,
    CreditAssigner,
    RequestsExhausted,
    SampleFilter,
    SAWItem,
    VersionedClient,
)
from ludic_pipeline.queue.episodes import GroupRunner, RecentFailures
from ludic_pipeline.queue.pacing import LearnerState, is_too_late, may_begin
from ludic_pipeline.queue.queue import ActorId, ExperienceQueue, new_actor_id
from ludic_pipeline.queue.stats import scorer_report
from ludic_pipeline.queue.wire import WireLimits, encode_group, group_facts

logger = logging.getLogger(__name__)

_LIMITS = WireLimits()
_BEAT_S = 1.0
"""Interval of heartbeats, at which the actor also checks whether its groups can still be used."""
_STOP_S = 5.0
"""After `stop` is set, the actor waits this long for a push to arrive."""
_LEAVE_S = 2.0
"""Time limit of the last heartbeat; without it the actor's heartbeat expires."""
_CANCEL_AGAIN_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorReport:
    """Counts of an actor's work so far."""

    actor: ActorId
    """Its name in the queue, new after every restart."""
    num_groups: int = 0
    """Groups pushed."""
    num_items: int = 0
    """Items in those groups; the queue counts them as produced."""
    num_failed: int = 0
    """Groups dropped because an episode failed."""
    num_empty: int = 0
    """Groups without an item after filtering, or without an action token."""
    num_abandoned: int = 0
    """Groups cancelled because they became too old or the actor was stopped."""
    is_run_finished: bool = False
    """The actor ended because the learner had made all updates of the run."""


@dataclass(slots=True, eq=False)
class _RunningGroup:
    """A group whose episodes are running."""

    requests: RequestGroup
    num_expected: int
    """Expected number of items, from the average of earlier groups."""
    first_version: int | None
    """Version of the served policy when the group started."""
    task: "asyncio.Task[None]" = field(init=False)
    is_abandoned: bool = False
    is_pushing: bool = False
    """A push is under way and is not cancelled."""


async def run_pipeline_actor(
    engine: RolloutEngine,
    requests_fn: RequestsFn,
    credit_assigner: CreditAssigner | None = None,
    redis_url: str = "redis://localhost:6379/0",
    queue_key: str = "ludic_queue",
    max_steps: int = 10,
    concurrency: int = 4,
    client: ChatClient | None = None,
    *,
    algorithm: HasCreditAssigner | None = None,
    strategy: RequestStrategy | None = None,
    sample_filter: SampleFilter | None = None,
    timeout_s: float | None = None,
    max_groups: int | None = None,
    num_updates: int | None = None,
    max_failed_share: float = 0.5,
    max_waiting: int = 1024,
    patience_s: float = 120.0,
    compress: bool = False,
    limits: WireLimits = _LIMITS,
    name: str = "actor",
    follow: Callable[[], Awaitable[None]] | None = None,
    stop: asyncio.Event | None = None,
    on_group: Callable[[ActorReport], None] | None = None,
    poll_s: float = 0.1,
) -> ActorReport:
    """Run groups until the learner has finished its run, the requests are exhausted, `max_groups` are pushed, or `stop` is set.

    `num_updates`: of the run; that a run with fewer is finished does not count, since its learner is about to go on.
    `concurrency`: episodes at a time, over all groups. `client`: the policy, asked for its version before a group starts.
    `follow` runs in the background, for example `FolderFollower(…).run`; its errors end the actor. `max_failed_share`: of the
    last 32 groups. `max_waiting`: actors wait at this number of groups in the queue. `patience_s`: how long Redis may be
    unreachable. `limits`: those of the learner. `on_group` is called after every push.
    """
    if max_groups is not None and max_groups < 1:
        raise ConfigError(f"max_groups={max_groups}; an actor pushes at least one group, or None for no limit.")
    builder = BatchBuilder(credit_assigner=credit_of(credit_assigner, algorithm), sample_filter=sample_filter)
    runner = GroupRunner(engine, max_steps=max_steps, concurrency=concurrency, timeout_s=timeout_s)
    queue = ExperienceQueue(
        redis_url, queue_key, max_waiting=max_waiting, max_bytes=limits.max_bytes, patience_s=patience_s
    )
    actor = _Actor(
        queue=queue,
        requests=RequestStream(requests_fn, strategy, {}),
        runner=runner,
        builder=builder,
        failures=RecentFailures(max_failed_share),
        encode=lambda items: encode_group(items, compress=compress, limits=limits),
        served_by=client if isinstance(client, VersionedClient) else None,
        report=ActorReport(actor=new_actor_id(name)),
        max_groups=max_groups,
        num_updates=num_updates or 0,
        stop=stop or asyncio.Event(),
        on_group=on_group,
        poll_s=poll_s,
        report_scorers=lambda: scorer_report(engine.scorer_metrics(), engine.scorer_mean_weights()),
    )
    try:
        await actor.run(follow)
    finally:
        await queue.close()
    return actor.report


@dataclass(slots=True, eq=False, kw_only=True)
class _Actor:
    """The state of one actor process."""

    queue: ExperienceQueue
    requests: RequestStream
    runner: GroupRunner
    builder: BatchBuilder
    failures: RecentFailures
    encode: Callable[[Sequence[SAWItem]], bytes]
    served_by: VersionedClient | None
    report: ActorReport
    max_groups: int | None
    num_updates: int
    stop: asyncio.Event
    on_group: Callable[[ActorReport], None] | None
    poll_s: float
    report_scorers: Callable[[], str]
    """What scorers, such as a judge, have counted so far; each heartbeat carries it to the learner."""
    running: list[_RunningGroup] = field(default_factory=list)
    next_group: RequestGroup | None = None
    """Drawn and not started yet."""
    is_exhausted: bool = False
    is_policy_away: bool = False
    """The policy did not return its version; logged once."""
    learner: LearnerState | None = None
    """State at the last heartbeat."""
    num_reserved: int = 0
    """Expected items of a group that is about to start."""
    num_finished: int = 0
    """Finished episodes whose items have been counted."""
    num_made: int = 0
    """Items of those episodes."""
    one_push: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Sequence numbers must arrive in order; the queue takes an overtaken one for a repetition."""

    async def run(self, follow: Callable[[], Awaitable[None]] | None) -> None:
        main = asyncio.create_task(self._run_groups(), name="run groups")
        helpers = [asyncio.create_task(self._keep_beating(), name="beat")]
        if follow is not None:
            helpers.append(asyncio.ensure_future(follow()))
        stopping = asyncio.create_task(self._wait_for_stop(main), name="stop")
        try:
            await _until_one_ends([main, stopping], unless_fail=helpers)
        finally:
            tasks = [group.task for group in self.running]
            await _end([main, stopping, *helpers, *tasks])
            self._count_abandoned(sum(task.cancelled() for task in tasks))
            await self._leave()

    async def _wait_for_stop(self, main: "asyncio.Task[None]") -> None:
        await self.stop.wait()
        await asyncio.wait([main], timeout=_STOP_S)

    # --- the loop ---

    async def _run_groups(self) -> None:
        while not self._is_over:
            self._collect()
            if not (self._has_room and await self._start_next()):
                await self._pause()
        await self._finish()

    @property
    def _is_over(self) -> bool:
        is_enough = self.max_groups is not None and self.report.num_groups >= self.max_groups
        return self._is_ended or self.is_exhausted or is_enough

    @property
    def _is_ended(self) -> bool:
        """No group is of use any more."""
        return self.stop.is_set() or self.report.is_run_finished

    @property
    def _has_room(self) -> bool:
        if self.max_groups is not None and self.report.num_groups + len(self.running) >= self.max_groups:
            return False
        # Do not start another group while a push waits for room in the queue.
        return self.runner.has_room and not self.one_push.locked()

    async def _pause(self) -> None:
        """Wait until an episode ends, at most `poll_s`: the learner's state may have changed by then."""
        self.runner.freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.poll_s):
                await self.runner.freed.wait()

    def _collect(self) -> None:
        """Remove finished groups and re-raise their errors."""
        for group in [group for group in self.running if group.task.done()]:
            self.running.remove(group)
            if group.task.cancelled():
                self._count_abandoned(1)
            else:
                group.task.result()

    async def _finish(self) -> None:
        """Finish the running groups, or cancel them if they are of no use; a push is never interrupted."""
        while self.running:
            if self._is_ended:
                self._abandon(self.running)
            self._collect()
            await self._pause()

    def _count_abandoned(self, num_groups: int) -> None:
        self.report = replace(self.report, num_abandoned=self.report.num_abandoned + num_groups)

    # --- starting a group ---

    async def _start_next(self) -> bool:
        """Start another group if pacing allows it, and return whether it did."""
        requests = self._draw()
        if requests is None:
            return False
        try:
            served_version = None if self.served_by is None else await self.served_by.get_policy_version()
        except RetryableError as error:  # the server is restarting; a lost server raises PolicyGone
            if not self.is_policy_away:
                logger.warning("no group starts until the policy returns its version: %s", error)
            self.is_policy_away = True
            return False
        self.is_policy_away = False
        if not self._may_begin(await self._beat(), 0, served_version):
            return False
        num_expected = self._expected_items(requests)
        self.num_reserved = num_expected  # announce it before starting: another actor may want to fill the same gap
        learner = await self._beat()
        self.num_reserved = 0
        if not self._may_begin(learner, num_expected, served_version):
            return False
        group = _RunningGroup(requests, num_expected, learner.version if served_version is None else served_version)
        group.task = asyncio.create_task(self._run_group(group))
        group.task.add_done_callback(lambda _: self.runner.freed.set())
        self.running.append(group)
        self.next_group = None
        await asyncio.sleep(0)  # let it occupy its places
        return True

    def _draw(self) -> RequestGroup | None:
        if self.next_group is None:
            try:
                self.next_group = next(iter(self.requests.take(1)), None)
            except RequestsExhausted as reason:
                logger.info("the requests are exhausted: %s", reason)
                self.is_exhausted = True
        return self.next_group

    def _may_begin(self, learner: LearnerState, num_own: int, served_version: int | None) -> bool:
        ahead = learner.waiting_items + learner.in_progress_items - num_own
        return may_begin(learner, ahead_items=ahead, served_version=served_version)

    def _expected_items(self, requests: RequestGroup) -> int:
        num_episodes = sum(request.num_episodes for request in requests)
        rate = self.num_made / self.num_finished if self.num_finished else 1.0
        return max(1, math.ceil(num_episodes * rate))

    # --- one group ---

    async def _run_group(self, group: _RunningGroup) -> None:
        finished = await self.runner.run(group.requests)
        is_lost = not finished.is_whole or not finished.episodes
        # What a scorer failed counts if nothing of the group is left.
        failures = finished.failures if is_lost or not finished.is_unscored else []
        self.failures.count(failures, is_unscored=finished.is_unscored)
        if is_lost:
            self.report = replace(self.report, num_failed=self.report.num_failed + 1)
            return
        items = self.builder.batch(finished.episodes).items
        self.num_finished += len(finished.episodes)
        self.num_made += len(items)
        if items:
            await self._push(group, items)
        else:
            self.report = replace(self.report, num_empty=self.report.num_empty + 1)

    async def _push(self, group: _RunningGroup, items: Sequence[SAWItem]) -> None:
        payload, facts = self.encode(items), group_facts(items)
        async with self.one_push:
            group.is_pushing = True
            while not await self.queue.push(
                self.report.actor,
                self.report.num_groups + 1,
                payload,
                num_items=facts.num_items,
                oldest_version=facts.oldest_version,
            ):
                group.is_pushing = False
                await asyncio.sleep(self.poll_s)  # the queue is full
                group.is_pushing = True
            self.report = replace(
                self.report,
                num_groups=self.report.num_groups + 1,
                num_items=self.report.num_items + facts.num_items,
            )
        if self.on_group is not None:
            self.on_group(self.report)

    # --- the learner's side ---

    async def _keep_beating(self) -> None:
        while True:
            learner = await self._beat()
            if learner.version is None:
                logger.info("waiting for a learner")
            await asyncio.sleep(_BEAT_S)

    async def _beat(self) -> LearnerState:
        """Send a heartbeat with the items in progress, read the learner's state, and cancel groups that are too old."""
        num_items = self.num_reserved + sum(group.num_expected for group in self.running)
        before, learner = self.learner, await self.queue.beat_actor(self.report.actor, num_items, self.report_scorers())
        self.learner = learner
        if learner.finished_after is not None and learner.finished_after >= self.num_updates:
            self.report = replace(self.report, is_run_finished=True)
        if before is not None and (learner.version or 0) < (before.version or 0):
            logger.warning("the learner went back from version %s to %s", before.version, learner.version)
            self._abandon(self.running)
        else:
            self._abandon([group for group in self.running if is_too_late(learner, group.first_version)])
        return learner

    def _abandon(self, groups: Sequence[_RunningGroup]) -> None:
        for group in groups:
            if not group.is_pushing and not group.is_abandoned:
                group.is_abandoned = True
                group.task.cancel()

    async def _leave(self) -> None:
        """Send a last heartbeat with no items in progress, so that pacing does not wait for them, and the last report."""
        beat = asyncio.create_task(self.queue.beat_actor(self.report.actor, 0, self.report_scorers()))
        await asyncio.wait([beat], timeout=_LEAVE_S)
        await _end([beat])


async def _end(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel the tasks and wait until they have ended."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        # Cancel repeatedly: the Redis client uses asyncio.wait_for, which in Python 3.11 can swallow a cancellation that
        # arrives together with the answer.
        await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # mark their exceptions as retrieved


async def _until_one_ends(ends: Sequence["asyncio.Task[None]"], *, unless_fail: Sequence["asyncio.Task[None]"]) -> None:
    """Wait until one of `ends` is done; raise the first error of any of the tasks."""
    waiting = {*ends, *unless_fail}
    while not any(task.done() for task in ends):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
