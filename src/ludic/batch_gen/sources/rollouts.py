"""`RolloutBatchSource`: generates the next batch on demand, if asked with dynamic sampling.

Dynamic sampling replaces groups without a learning signal until the batch is full: a group whose rollouts all have the same
reward has zero advantage (DAPO, arXiv 2503.14476, section 3.2). Failed groups are replaced in the same way. The number of rounds
is bounded; after the last one the batch may be smaller. With `stragglers` a batch closes before its last episodes are done
(stragglers.py).
"""

import logging
import time
from collections.abc import Awaitable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict, Unpack

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.engine import DEFAULT_MAX_STEPS, RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodeLimits
from ludic.batch_gen.requests.curriculum import Curriculum, ReportsMetrics
from ludic.batch_gen.requests.groups import RequestGroup, RequestsFn, RequestStrategy, RequestStream
from ludic.batch_gen.sources.stragglers import StragglerRunner, Stragglers
from ludic.compat import also_accepts, one_of, only_known
from ludic.types import (
    ConfigError,
    CreditAssigner,
    FollowsVersions,
    GroupKey,
    RequestsExhausted,
    Rollout,
    SampleFilter,
    SAWBatch,
    Stateful,
    by_session,
    rounding_of,
)
from ludic.types.interfaces import load_into, state_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Settings of dynamic sampling."""

    max_rounds: int = 4
    """Rounds of generation for one batch, the first included."""
    eps: float = 1e-6
    """Rewards of a group that differ by at most this, or by rounding, count as equal."""
    by_component: bool = False
    """Keep also groups with equal totals, if one of their reward components differs: for credit by component (GDPO)."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"DynamicSampling.max_rounds={self.max_rounds}; one round at least fills the batch.")
        if self.eps < 0:
            raise ConfigError(f"DynamicSampling.eps={self.eps}; it must be 0 or more.")


class EpisodeRunner:
    """Runs the episodes of request groups and numbers them over the whole run."""

    def __init__(
        self, engine: RolloutEngine, *, max_steps: int, timeout_s: float | None = None, concurrency: int = 8
    ) -> None:
        EpisodeLimits(max_steps=max_steps, timeout_s=timeout_s)  # checks the limits before the first batch
        self._run = partial(engine.run_episodes, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        self.num_episodes = 0

    def run(self, groups: list[RequestGroup]) -> Awaitable[list[Episode]]:
        requests = [request for group in groups for request in group]
        first_index = self.num_episodes
        self.num_episodes += sum(request.num_episodes for request in requests)
        return self._run(requests, first_index=first_index)


@dataclass(frozen=True, slots=True)
class TrainedSeat:
    """The policy that a batch is for, in episodes that other policies take part in."""

    policy: str
    """Only its rollouts are trained on."""
    followers: Sequence[FollowsVersions] = ()
    """Parts that hear of its new versions and are saved with the source, such as a league."""


class _Spellings(TypedDict, total=False):
    orchestrator: RolloutEngine
    """`engine`."""
    request_fn: RequestsFn
    """`requests_fn`."""
    credit_assigner: CreditAssigner | None
    """The rule alone, in place of `algorithm`."""
    per_turn: bool
    """One item for each turn, also where turns continue token for token."""


@also_accepts(_Spellings)
class RolloutBatchSource:
    """Runs the episodes of the next requests and builds a batch from them.

    Requests come from `requests_fn` or from a `curriculum`, which observes the rollouts. `strategy`
    expands them. With `dynamic_sampling`, groups with equal rewards are replaced.
    """

    def __init__(
        self,
        engine: RolloutEngine | None = None,
        *,
        requests_fn: RequestsFn | None = None,
        curriculum: Curriculum | None = None,
        algorithm: HasCreditAssigner | None = None,
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
        sample_filter: SampleFilter | None = None,
        strategy: RequestStrategy | None = None,
        dynamic_sampling: DynamicSampling | None = None,
        stragglers: Stragglers | None = None,
        seat: TrainedSeat | None = None,
        **also: Unpack[_Spellings],
    ) -> None:
        """`seat`: the trained policy, for episodes that other policies take part in. `stragglers`: a batch does not wait for its
        last episodes; close the source at the end."""
        only_known("RolloutBatchSource", also, _Spellings)
        self._engine = engine = one_of("RolloutBatchSource", engine=engine, orchestrator=also.get("orchestrator"))
        if stragglers is not None and dynamic_sampling is not None:
            raise ConfigError("Dynamic sampling waits for whole rounds of episodes, so it does not go with stragglers.")
        limits: dict[str, Any] = {"max_steps": max_steps, "timeout_s": timeout_s, "concurrency": concurrency}
        self._runner = EpisodeRunner(engine, **limits)
        self._stragglers = None if stragglers is None else StragglerRunner(engine, stragglers, **limits)
        self._curriculum = curriculum
        next_requests = None if curriculum is None else curriculum.next_requests
        requests_fn = one_of(
            "RolloutBatchSource", requests_fn=requests_fn, request_fn=also.get("request_fn"), curriculum=next_requests
        )
        parts: dict[str, object] = {"requests": requests_fn} if curriculum is None else {"curriculum": curriculum}
        self._requests = RequestStream(requests_fn, strategy, parts)
        credit = credit_of(also.get("credit_assigner"), algorithm)
        self._builder = BatchBuilder(
            credit_assigner=credit, sample_filter=sample_filter, per_turn=also.get("per_turn", False)
        )
        self._stateful_credit = credit if isinstance(credit, Stateful) else None
        self._dynamic_sampling = dynamic_sampling
        self._policy = None if seat is None else seat.policy
        self._followers = [] if seat is None else list(seat.followers)
        self._num_batches = self._groups_per_batch = 0

    async def next_batch(self) -> SAWBatch:
        started = time.perf_counter()
        if self._stragglers is not None:
            batch = await self._closed_batch(self._stragglers)
        elif self._dynamic_sampling is None:
            episodes = await self._run_episodes(self._requests.take_draw())
            batch = self._builder.batch(episodes, policy=self._policy)
        else:
            batch = await self._refilled_batch(self._dynamic_sampling)
        self._num_batches += 1
        generation_s = time.perf_counter() - started
        numbers = {"generation_s": generation_s, **self._engine.scorer_metrics()}
        if isinstance(self._curriculum, ReportsMetrics):
            numbers |= self._curriculum.metrics()
        batch.meta["rollout_metrics"] |= numbers
        batch.meta |= {"source": "rollout", "batch_index": self._num_batches - 1, **numbers}
        return batch

    get_next_batch = next_batch

    async def _closed_batch(self, runner: StragglerRunner) -> SAWBatch:
        """A batch of finished episodes, with as many groups as the first draw."""
        if not self._groups_per_batch:
            self._groups_per_batch = self._requests.num_next()
        try:
            new = self._requests.take_placed(self._groups_per_batch - runner.num_carried)
        except RequestsExhausted:
            if not runner.num_carried:
                raise
            new = []
        episodes, counts = await runner.run(new)
        self._observe(episodes)
        batch = self._builder.batch(episodes, policy=self._policy)
        batch.meta |= counts
        batch.meta["rollout_metrics"] |= {name: float(value) for name, value in counts.items()}
        return batch

    async def close(self) -> None:
        """End the episodes that run on into the next batch, if there are any."""
        if self._stragglers is not None:
            await self._stragglers.close()

    async def _refilled_batch(self, settings: DynamicSampling) -> SAWBatch:
        """A batch of groups with different rewards: as many as the first draw has, or fewer after `max_rounds` rounds."""
        if not self._groups_per_batch:  # the first draw may be empty
            self._groups_per_batch = self._requests.num_next()
        num_groups = self._groups_per_batch
        kept: list[list[Episode]] = []
        failed: list[Episode] = []
        num_rounds = num_zero_variance = 0
        while num_rounds < settings.max_rounds and len(kept) < num_groups:
            try:
                groups = self._requests.take(num_groups - len(kept))
            except RequestsExhausted:
                if not kept:
                    raise
                break
            if not groups:
                break
            num_rounds += 1
            for episodes in _by_group(await self._run_episodes(groups)):
                if any(episode.failure for episode in episodes):
                    failed += episodes
                elif _rewards_differ(episodes, settings, self._policy):
                    kept.append(episodes)
                else:
                    num_zero_variance += 1
        if len(kept) < num_groups:
            logger.warning("Dynamic sampling found %d of %d groups in %d rounds.", len(kept), num_groups, num_rounds)
        # The builder drops the failed episodes; they are there for the statistics.
        batch = self._builder.batch([*(episode for group in kept for episode in group), *failed], policy=self._policy)
        counts = {"num_sampling_rounds": num_rounds, "num_zero_variance_groups": num_zero_variance}
        batch.meta |= counts
        batch.meta["rollout_metrics"] |= {name: float(value) for name, value in counts.items()}
        return batch

    async def _run_episodes(self, groups: list[RequestGroup]) -> list[Episode]:
        episodes = await self._runner.run(groups)
        self._observe(episodes)
        return episodes

    def _observe(self, episodes: Sequence[Episode]) -> None:
        if self._curriculum is not None:
            self._curriculum.observe([r for e in episodes for r in e.rollouts if r.failure is None])

    def notify_version(self, version: int) -> None:
        """Set the version of the policy that plays the next episodes."""
        for follower in self._followers:
            follower.notify_version(version)

    def state_dict(self) -> dict[str, Any]:
        """Position of all stateful parts; call it between batches."""
        state: dict[str, Any] = {
            "num_batches": self._num_batches,
            "num_episodes": (self._stragglers or self._runner).num_episodes,
            "groups_per_batch": self._groups_per_batch,
            "requests": self._requests.state_dict(),
            "scorers": state_of(self._engine.rewards),
        }
        if self._stragglers is not None:
            state["stragglers"] = self._stragglers.state_dict()
        if self._followers:
            state["followers"] = [state_of(follower) for follower in self._followers]
        # A resumed run generates unsaved batches again, so the credit rule must forget what it counted for them.
        return state if self._stateful_credit is None else {**state, "credit": self._stateful_credit.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._num_batches = state["num_batches"]
        (self._stragglers or self._runner).num_episodes = state["num_episodes"]
        self._groups_per_batch = state["groups_per_batch"]
        if self._stateful_credit is not None and "credit" in state:
            self._stateful_credit.load_state_dict(state["credit"])
        for follower, own in zip(self._followers, state.get("followers", ()), strict=True):
            load_into(follower, own)
        self._requests.load_state_dict(state["requests"])
        load_into(self._engine.rewards, state.get("scorers", {}))
        if self._stragglers is not None:
            self._stragglers.load_state_dict(state["stragglers"], self._requests)


def _rewards_differ(episodes: Sequence[Episode], settings: DynamicSampling, policy: str | None = None) -> bool:
    """True if some agent's rewards differ within the group, or the group has only one episode. Threads add to their session's."""
    if len(episodes) == 1:
        return True
    groups: dict[GroupKey | None, list[Sequence[Rollout]]] = {}
    own = [r for episode in episodes for r in episode.rollouts if r.failure is None and policy in (None, r.policy)]
    for session in by_session(own):
        groups.setdefault(session[0].group, []).append(session)
    return any(
        _differ(rewards, settings.eps) for members in groups.values() for rewards in _compared(members, settings)
    )


def _compared(members: Sequence[Sequence[Rollout]], settings: DynamicSampling) -> Iterator[list[float]]:
    """The totals of the sessions; by component, each of its rewards as well."""
    yield [sum(rollout.total_reward for rollout in session) for session in members]
    if settings.by_component:
        components = [[rollout.reward_components for rollout in session] for session in members]
        for name in dict.fromkeys(name for session in components for own in session for name in own):
            yield [sum(own.get(name, 0.0) for own in session) for session in components]


def _differ(rewards: Sequence[float], eps: float) -> bool:
    return max(rewards) - min(rewards) > max(eps, rounding_of(rewards))


def _by_group(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes grouped by group id, in the order of each group's first episode; an episode without a group is alone."""
    groups: dict[str | int, list[Episode]] = {}
    for episode in episodes:
        group_id = episode.plan.group_id
        groups.setdefault(episode.plan.index if group_id is None else group_id, []).append(episode)
    return list(groups.values())
