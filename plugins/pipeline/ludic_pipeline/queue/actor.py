"""`run_pipeline_actor` runs groups of episodes with the served policy and pushes each group when it is complete.

The actor keeps running through weight updates; every token records the version that sampled it. It starts a group only if the
group will be fresh when it is trained on (see `pacing`), cancels groups that have become too old, waits while the queue is full,
and retries while Redis is unreachable. A failed episode is data; a wrong set-up or a lost policy server ends the actor.
"""

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.engine import RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodeLimits, TooManyFailures
from ludic.batch_gen.requests.groups import RequestGroup, RequestsFn, RequestStrategy, RequestStream
from ludic.http.client import RetryableError
from ludic.tasks import as_finished
from ludic.types import (
    ChatClient,
    ConfigError,
    CreditAssigner,
    Failure,
    RequestsExhausted,
    RolloutRequest,
    SampleFilter,
    SAWItem,
    VersionedClient,
    derive_seed,
)
from ludic_pipeline.queue.pacing import LearnerState, is_too_late, may_begin
from ludic_pipeline.queue.queue import ActorId, ExperienceQueue, new_actor_id
from ludic_pipeline.queue.stats import scorer_report
from ludic_pipeline.queue.wire import WireLimits, encode_group, group_facts

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class _FinishedGroup:
    """The episodes and failures of one group."""

    episodes: list[Episode]
    """Finished episodes, in order."""
    failures: list[str]
    """One message per failed episode."""
    is_whole: bool
    """False if credit compares the episodes and one of them failed."""
    is_unscored: bool = False
    """True if all of the failures are a scorer's."""


class GroupRunner:
    """Runs groups with one engine."""

    def __init__(
        self, engine: RolloutEngine, *, max_steps: int, concurrency: int, timeout_s: float | None = None
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}; at least one episode must run at a time.")
        EpisodeLimits(max_steps=max_steps, timeout_s=timeout_s)  # checks the limits before the first episode
        self._engine = engine
        self._max_steps, self._timeout_s, self._concurrency = max_steps, timeout_s, concurrency
        self._places = asyncio.Semaphore(concurrency)
        self.freed = asyncio.Event()
        """Set when an episode ends; the waiting caller clears it."""
        self._num_planned = 0
        self._num_open = 0
        """Episodes of all started groups that are running or waiting for a place."""

    @property
    def has_room(self) -> bool:
        """Return True if an episode of another group could start at once."""
        return self._num_open < self._concurrency

    async def run(self, group: RequestGroup) -> _FinishedGroup:
        members = list(_single_episodes(group))
        first_index, self._num_planned = self._num_planned, self._num_planned + len(members)
        jobs = [partial(self._run_one, request, first_index + number) for number, request in enumerate(members)]
        num_left = len(jobs)
        self._num_open += num_left
        episodes: list[Episode] = []
        failures: list[str] = []
        try:
            finished = as_finished(jobs, limit=len(jobs))
            async with aclosing(finished):
                async for result in finished:
                    num_left -= 1
                    self._num_open -= 1
                    self.freed.set()
                    failures += [result] if isinstance(result, str) else []
                    episodes += [result] if isinstance(result, Episode) else []
        finally:
            self._num_open -= num_left
        episodes.sort(key=lambda episode: episode.plan.index)
        await self._engine.finish_group(episodes, max_steps=self._max_steps)
        unscored = [_why(episode, episode.failure) for episode in episodes if episode.failure is not None]
        return _FinishedGroup(
            episodes=[episode for episode in episodes if episode.failure is None],
            failures=failures + unscored,
            is_whole=not ((failures or unscored) and any(request.group_id is not None for request in group)),
            is_unscored=bool(unscored) and not failures,
        )

    async def _run_one(self, request: RolloutRequest, index: int) -> Episode | str:
        async with self._places:
            try:
                [episode] = await self._engine.run_episodes(
                    [request],
                    max_steps=self._max_steps,
                    timeout_s=self._timeout_s,
                    concurrency=1,
                    first_index=index,
                    has_whole_groups=False,
                )
            except TooManyFailures as error:  # one failure of one episode; RecentFailures holds the limit over groups
                return str(error)
        failure = episode.failure
        return episode if failure is None or failure.by_scorer else _why(episode, failure)


def _why(episode: Episode, failure: Failure) -> str:
    return f"episode {episode.plan.index}: {failure.summary}"


def _single_episodes(group: RequestGroup) -> Iterator[RolloutRequest]:
    """One request per episode, with the seeds that the engine gives the episodes of one request."""
    for request in group:
        if request.num_episodes == 1:
            yield request
            continue
        for repeat in range(request.num_episodes):
            seed = None if request.sampling_seed is None else derive_seed(request.sampling_seed, repeat)
            yield replace(request, num_episodes=1, sampling_seed=seed)


class RecentFailures:
    """Raises TooManyFailures when too many of the last groups have failed; where a scorer failed them, when all have."""

    def __init__(self, max_failed_share: float, *, window: int = 32) -> None:
        if not 0 <= max_failed_share <= 1:
            raise ConfigError(f"max_failed_share={max_failed_share}; it is a share of the groups, from 0 to 1.")
        self._share = max_failed_share
        self._window = window
        self._recent: deque[tuple[Sequence[str], bool]] = deque(maxlen=window)

    def count(self, failures: Sequence[str], *, is_unscored: bool = False) -> None:
        """Count the `failures` of one group; `is_unscored`: all of them are a scorer's."""
        self._recent.append((failures, is_unscored))
        failed = [reasons for reasons, _ in self._recent if reasons]
        broken = [reasons for reasons, is_scorers in self._recent if reasons and not is_scorers]
        if len(broken) > self._share * self._window:
            raise TooManyFailures(
                f"{len(broken)} of the last {len(self._recent)} groups failed, more than max_failed_share={self._share:g} of "
                f"{self._window} allows. The last: {_shown(broken)}. Fix what they name, or raise max_failed_share."
            )
        if len(broken) < len(failed) == self._window:
            raise TooManyFailures(
                f"All of the last {self._window} groups failed, {len(failed) - len(broken)} of them because a judge or reward "
                f"function did. The last: {_shown(failed)}. Does the judge's server answer?"
            )


def _shown(failed: Sequence[Sequence[str]]) -> str:
    return "; ".join(reasons[0] for reasons in failed[-_NUM_SHOWN:])


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


@dataclass(frozen=True, kw_only=True)
class ActorSettings:
    """Limits and choices of an actor."""

    strategy: RequestStrategy | None = None
    sample_filter: SampleFilter | None = None
    per_turn: bool = False
    """Make one sample of each turn instead of one of each episode."""
    timeout_s: float | None = None
    """Time limit of an episode."""
    max_groups: int | None = None
    """The actor ends when it has pushed this number of groups."""
    num_updates: int = 0
    """Updates of the run. A mark that a run of fewer updates is finished does not count: its learner is about to continue."""
    max_failed_share: float = 0.5
    """Share of the last 32 groups that may fail."""
    max_waiting: int = 1024
    """The actor waits while this number of groups is in the queue."""
    patience_s: float = 120.0
    """Time for which Redis may be unreachable."""
    compress: bool = False
    limits: WireLimits = _LIMITS
    """Those of the learner."""
    name: str = "actor"
    follow: Callable[[], Awaitable[None]] | None = None
    """Runs in the background, for example `FolderFollower(…).run`; its errors end the actor."""
    poll_s: float = 0.1

    def __post_init__(self) -> None:
        if self.max_groups is not None and self.max_groups < 1:
            raise ConfigError(
                f"max_groups={self.max_groups}; an actor pushes at least one group, or None for no limit."
            )


_SETTINGS = ActorSettings()


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
    settings: ActorSettings = _SETTINGS,
    stop: asyncio.Event | None = None,
    on_group: Callable[[ActorReport], None] | None = None,
) -> ActorReport:
    """Run groups until the learner has finished its run, the requests are exhausted, `max_groups` are pushed, or `stop` is set.

    `concurrency`: episodes at a time, over all groups. `client`: the policy, asked for its version before a group starts.
    `on_group` is called after every push.
    """
    credit = credit_of(credit_assigner, algorithm)
    actor = _Actor(
        settings=settings,
        queue=ExperienceQueue(
            redis_url,
            queue_key,
            max_waiting=settings.max_waiting,
            max_bytes=settings.limits.max_bytes,
            patience_s=settings.patience_s,
        ),
        requests=RequestStream(requests_fn, settings.strategy, {}),
        runner=GroupRunner(engine, max_steps=max_steps, concurrency=concurrency, timeout_s=settings.timeout_s),
        builder=BatchBuilder(credit_assigner=credit, sample_filter=settings.sample_filter, per_turn=settings.per_turn),
        failures=RecentFailures(settings.max_failed_share),
        served_by=client if isinstance(client, VersionedClient) else None,
        report=ActorReport(actor=new_actor_id(settings.name)),
        stop=stop or asyncio.Event(),
        on_group=on_group,
        report_scorers=lambda: scorer_report(engine.scorer_metrics(), engine.scorer_mean_weights()),
    )
    try:
        await actor.run()
    finally:
        await actor.queue.close()
    return actor.report


@dataclass(slots=True, eq=False, kw_only=True)
class _Actor:
    """The state of one actor process."""

    settings: ActorSettings
    queue: ExperienceQueue
    requests: RequestStream
    runner: GroupRunner
    builder: BatchBuilder
    failures: RecentFailures
    served_by: VersionedClient | None
    report: ActorReport
    stop: asyncio.Event
    on_group: Callable[[ActorReport], None] | None
    report_scorers: Callable[[], str]
    """Counts of scorers, such as a judge, so far; each heartbeat carries them to the learner."""
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

    async def run(self) -> None:
        main = asyncio.create_task(self._run_groups(), name="run groups")
        helpers = [asyncio.create_task(self._keep_beating(), name="beat")]
        if self.settings.follow is not None:
            helpers.append(asyncio.ensure_future(self.settings.follow()))
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
        return self._is_ended or self.is_exhausted or self.report.num_groups >= self._max_groups

    @property
    def _max_groups(self) -> float:
        return math.inf if self.settings.max_groups is None else self.settings.max_groups

    @property
    def _is_ended(self) -> bool:
        """No group is of use any more."""
        return self.stop.is_set() or self.report.is_run_finished

    @property
    def _has_room(self) -> bool:
        if self.report.num_groups + len(self.running) >= self._max_groups:
            return False
        # Do not start another group while a push waits for room in the queue.
        return self.runner.has_room and not self.one_push.locked()

    async def _pause(self) -> None:
        """Wait until an episode ends, at most `poll_s`: the learner's state may have changed by then."""
        self.runner.freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.settings.poll_s):
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
        payload = encode_group(items, compress=self.settings.compress, limits=self.settings.limits)
        facts = group_facts(items)
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
                await asyncio.sleep(self.settings.poll_s)  # the queue is full
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
        if learner.finished_after is not None and learner.finished_after >= self.settings.num_updates:
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
