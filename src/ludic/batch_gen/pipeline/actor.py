"""`run_pipeline_actor`: plays groups with whatever policy is served, and pushes each as soon as it is complete.

It keeps playing through weight updates; every token says which version sampled it. It begins a group only if that will be
fresh when its turn comes (see `pacing`), gives up one that cannot be used any more, waits while the queue is full, and waits
for a Redis that is away. A failed episode is data; a wrong set-up, or a policy that is gone for good, ends the actor.
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
from ludic.batch_gen.pipeline.episodes import GroupRunner, RecentFailures
from ludic.batch_gen.pipeline.pacing import is_too_late, may_begin
from ludic.batch_gen.pipeline.queue import ActorId, ExperienceQueue, LearnerState, new_actor_id
from ludic.batch_gen.pipeline.wire import WireLimits, encode_group, group_facts
from ludic.batch_gen.requests.dataset import RequestsFn
from ludic.batch_gen.requests.strategies import RequestStrategy
from ludic.batch_gen.requests.stream import RequestGroup, RequestStream
from ludic.inference.http import RetryableError
from ludic.types import (
    ChatClient,
    ConfigError,
    CreditAssigner,
    RequestsExhausted,
    SampleFilter,
    SAWItem,
    VersionedClient,
)

logger = logging.getLogger(__name__)

_LIMITS = WireLimits()
_BEAT_S = 1.0
"""How often an actor that is busy says that it lives, and looks whether its groups can still be used."""
_STOP_S = 5.0
"""How long an actor that was told to stop may take to let a push arrive."""
_LEAVE_S = 2.0
"""How long an actor that ends tries to say so; it is forgotten after a while in any case."""
_CANCEL_AGAIN_S = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorReport:
    """What an actor has done so far."""

    actor: ActorId
    """Its name in the queue, new in every life."""
    num_groups: int = 0
    """Pushed."""
    num_items: int = 0
    """In those groups: this is what the queue counts as produced."""
    num_failed: int = 0
    """Groups in which an episode failed, which were left out."""
    num_empty: int = 0
    """Groups that the filter left nothing of, or that had no action token."""
    num_abandoned: int = 0
    """Groups given up because they had become too old, or because the actor was stopped."""


@dataclass(slots=True, eq=False)
class _InPlay:
    """A group that has been begun."""

    requests: RequestGroup
    num_expected: int
    """Items, by what groups like it have brought."""
    first_version: int | None
    """Of the policy that was served when it began."""
    task: "asyncio.Task[None] | None" = None
    is_abandoned: bool = False
    is_pushing: bool = False
    """Being sent: from here on it is not given up half way."""


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
    per_turn: bool = False,
    timeout_s: float | None = None,
    max_groups: int | None = None,
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
    """Play until the requests are used up, `max_groups` are pushed, or `stop` is set.

    `concurrency`: episodes at a time, of as many groups as that takes. `client`: the policy that plays, asked for its version
    before a group begins. `follow` runs beside it, for example `FolderFollower(…).run`; if it raises, so does the actor.
    `max_failed_share`: of the last 32 groups. `max_waiting`: groups in the queue, from where on actors wait. `patience_s`: how
    long Redis may be away. `limits`: the learner's. `on_group` is told after every push.
    """
    if max_groups is not None and max_groups < 1:
        raise ConfigError(f"max_groups={max_groups}; an actor pushes at least one group, or None for no limit.")
    assembly = BatchBuilder(
        credit_assigner=credit_of(credit_assigner, algorithm), sample_filter=sample_filter, per_turn=per_turn
    )
    player = GroupRunner(engine, max_steps=max_steps, concurrency=concurrency, timeout_s=timeout_s)
    queue = ExperienceQueue(
        redis_url, queue_key, max_waiting=max_waiting, max_bytes=limits.max_bytes, patience_s=patience_s
    )
    actor = _Actor(
        queue=queue,
        requests=RequestStream(requests_fn, strategy, {}),
        player=player,
        assembly=assembly,
        failures=RecentFailures(max_failed_share),
        encode=lambda items: encode_group(items, compress=compress, limits=limits),
        served_by=client if isinstance(client, VersionedClient) else None,
        report=ActorReport(actor=new_actor_id(name)),
        max_groups=max_groups,
        stop=stop or asyncio.Event(),
        on_group=on_group,
        poll_s=poll_s,
    )
    try:
        await actor.run(follow)
    finally:
        await queue.close()
    return actor.report


@dataclass(slots=True, eq=False, kw_only=True)
class _Actor:
    """The state of one actor's life."""

    queue: ExperienceQueue
    requests: RequestStream
    player: GroupRunner
    assembly: BatchBuilder
    failures: RecentFailures
    encode: Callable[[Sequence[SAWItem]], bytes]
    served_by: VersionedClient | None
    report: ActorReport
    max_groups: int | None
    stop: asyncio.Event
    on_group: Callable[[ActorReport], None] | None
    poll_s: float
    in_play: list[_InPlay] = field(default_factory=list)
    next_group: RequestGroup | None = None
    """Drawn, and waiting for its turn."""
    is_exhausted: bool = False
    is_policy_away: bool = False
    """It could not be asked for its version; said once."""
    learner: LearnerState | None = None
    """As it was at the last beat."""
    num_reserved: int = 0
    """Items of a group that is about to begin."""
    num_played: int = 0
    """Episodes whose items have been counted."""
    num_made: int = 0
    """Items that those brought."""
    one_push: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Sequence numbers arrive in order, or the later one would hide the earlier."""

    async def run(self, follow: Callable[[], Awaitable[None]] | None) -> None:
        main = asyncio.create_task(self._play_on(), name="play groups")
        helpers = [asyncio.create_task(self._keep_beating(), name="beat")]
        if follow is not None:
            helpers.append(asyncio.ensure_future(_awaited(follow)))
        stopping = asyncio.create_task(self._stop_in_time(main), name="stop")
        try:
            await _until_one_ends([main, stopping], unless_fail=helpers)
        finally:
            playing = [group.task for group in self.in_play if group.task is not None]
            await _end([main, stopping, *helpers, *playing])
            self._count_abandoned(sum(task.cancelled() for task in playing))
            await self._leave()

    async def _stop_in_time(self, main: "asyncio.Task[None]") -> None:
        await self.stop.wait()
        await asyncio.wait([main], timeout=_STOP_S)

    # --- the loop ---

    async def _play_on(self) -> None:
        while not self._is_over:
            self._collect()
            if not (self._has_room and await self._begin_next()):
                await self._rest()
        await self._finish()

    @property
    def _is_over(self) -> bool:
        is_enough = self.max_groups is not None and self.report.num_groups >= self.max_groups
        return self.stop.is_set() or self.is_exhausted or is_enough

    @property
    def _has_room(self) -> bool:
        if self.max_groups is not None and self.report.num_groups + len(self.in_play) >= self.max_groups:
            return False
        # What waits for room in the queue is enough ahead.
        return self.player.has_room and not self.one_push.locked()

    async def _rest(self) -> None:
        """Until there may be something to do: a place is free, or the learner has moved on."""
        self.player.freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.poll_s):
                await self.player.freed.wait()

    def _collect(self) -> None:
        """Forget groups that are done; what went wrong in one of them is raised."""
        for group in [group for group in self.in_play if group.task is not None and group.task.done()]:
            self.in_play.remove(group)
            assert group.task is not None, "that is how it was found"
            if group.task.cancelled():
                self._count_abandoned(1)
            else:
                group.task.result()

    async def _finish(self) -> None:
        """What was begun is finished, unless the actor was told to stop; a push is never cut off."""
        while self.in_play:
            if self.stop.is_set():
                self._abandon(self.in_play)
            self._collect()
            await self._rest()

    def _count_abandoned(self, num_groups: int) -> None:
        self.report = replace(self.report, num_abandoned=self.report.num_abandoned + num_groups)

    # --- beginning ---

    async def _begin_next(self) -> bool:
        """Whether another group has been begun."""
        requests = self._draw()
        if requests is None:
            return False
        try:
            served_version = None if self.served_by is None else await self.served_by.get_policy_version()
        except RetryableError as error:  # a server that is being restarted; one that is gone for good says PolicyGone
            if not self.is_policy_away:
                logger.warning("nothing is begun until the policy can be asked for its version: %s", error)
            self.is_policy_away = True
            return False
        self.is_policy_away = False
        if not self._may_begin(await self._beat(), 0, served_version):
            return False
        num_expected = self._expected_items(requests)
        self.num_reserved = num_expected  # announced before it is begun: another actor may be looking at the same gap
        learner = await self._beat()
        self.num_reserved = 0
        if not self._may_begin(learner, num_expected, served_version):
            return False
        group = _InPlay(requests, num_expected, learner.version if served_version is None else served_version)
        group.task = asyncio.create_task(self._play_group(group))
        group.task.add_done_callback(lambda _: self.player.freed.set())
        self.in_play.append(group)
        self.next_group = None
        await asyncio.sleep(0)  # it takes its places
        return True

    def _draw(self) -> RequestGroup | None:
        if self.next_group is None:
            try:
                self.next_group = next(iter(self.requests.take(1)), None)
            except RequestsExhausted as reason:
                logger.info("the requests are used up: %s", reason)
                self.is_exhausted = True
        return self.next_group

    def _may_begin(self, learner: LearnerState, num_own: int, served_version: int | None) -> bool:
        ahead = learner.waiting_items + learner.in_progress_items - num_own
        return may_begin(learner, ahead_items=ahead, served_version=served_version)

    def _expected_items(self, requests: RequestGroup) -> int:
        num_episodes = sum(request.num_episodes for request in requests)
        rate = self.num_made / self.num_played if self.num_played else 1.0
        return max(1, math.ceil(num_episodes * rate))

    # --- one group ---

    async def _play_group(self, group: _InPlay) -> None:
        played = await self.player.play(group.requests)
        self.failures.count(played.failures)
        if not played.is_whole or not played.episodes:
            self.report = replace(self.report, num_failed=self.report.num_failed + 1)
            return
        items = self.assembly.batch(played.episodes).items
        self.num_played += len(played.episodes)
        self.num_made += len(items)
        if items:
            await self._push(group, items)
        else:
            self.report = replace(self.report, num_empty=self.report.num_empty + 1)

    async def _push(self, group: _InPlay, items: Sequence[SAWItem]) -> None:
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
                await asyncio.sleep(self.poll_s)  # it is full
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
                logger.info("waiting for a learner to announce itself")
            await asyncio.sleep(_BEAT_S)

    async def _beat(self) -> LearnerState:
        """Say what is being made, hear how the learner stands, and give up what it could not use any more."""
        num_items = self.num_reserved + sum(group.num_expected for group in self.in_play)
        before, learner = self.learner, await self.queue.beat_actor(self.report.actor, num_items)
        self.learner = learner
        if before is not None and (learner.version or 0) < (before.version or 0):
            logger.warning("the learner went back from version %s to %s", before.version, learner.version)
            self._abandon(self.in_play)
        else:
            self._abandon([group for group in self.in_play if is_too_late(learner, group.first_version)])
        return learner

    def _abandon(self, groups: Sequence[_InPlay]) -> None:
        for group in groups:
            if group.task is not None and not group.is_pushing and not group.is_abandoned:
                group.is_abandoned = True
                group.task.cancel()

    async def _leave(self) -> None:
        """Nobody shall count on what it was making."""
        saying = asyncio.create_task(self.queue.beat_actor(self.report.actor, 0))
        await asyncio.wait([saying], timeout=_LEAVE_S)
        await _end([saying])


async def _awaited(make: Callable[[], Awaitable[None]]) -> None:
    await make()


async def _end(tasks: Sequence["asyncio.Task[Any]"]) -> None:
    """Cancel, and wait until they are over, however they end."""
    while pending := [task for task in tasks if not task.done()]:
        for task in pending:
            task.cancel()
        # Once is not always enough: the Redis client waits with asyncio.wait_for, which in Python 3.11 forgets a cancellation
        # that comes together with the answer.
        await asyncio.wait(pending, timeout=_CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)  # what they raised has been heard


async def _until_one_ends(ends: Sequence["asyncio.Task[None]"], *, unless_fail: Sequence["asyncio.Task[None]"]) -> None:
    """Wait for one of `ends`; what any of them all raises before that is raised."""
    waiting = {*ends, *unless_fail}
    while not any(task.done() for task in ends):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
