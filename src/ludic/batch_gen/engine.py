"""`RolloutEngine` runs the episodes of rollout requests concurrently and returns rollouts or a training batch.

Seeds do not depend on concurrency, so a client with reproducible sampling gives the same episodes (docs/engine.md says how far
the embedded engine is reproducible). Results come in the order of the requests. A failed episode is retried and then kept as
data; the run stops with an error when too many fail.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.episodes import (
    DEFAULT_ENV_TIMEOUT_S,
    Episode,
    EpisodeLimits,
    EpisodePlan,
    Factories,
    Factory,
    FailureLimit,
    FailureLog,
    RunningEpisode,
    num_sampled_tokens,
    plan_episodes,
    run_episode,
)
from ludic.batch_gen.store import FinishedEpisodes, RolloutWriter, read_episode, request_key, resume_plans
from ludic.tasks import Job, as_finished
from ludic.types import ConfigError, CreditAssigner, Rollout, RolloutRequest, SampleFilter, SAWBatch

DEFAULT_MAX_STEPS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of a run, reported after every episode and on request."""

    num_done: int
    num_episodes: int
    num_failed: int
    num_resumed: int
    """Finished episodes read from the file of an earlier run; they are part of num_done."""
    num_tokens: int = 0
    """Tokens sampled by the model calls that have returned, including those of unfinished episodes."""
    seconds: float = 0.0
    slowest: tuple[int, float] | None = None
    """Index and running time in seconds of the oldest unfinished episode."""

    def __str__(self) -> str:
        rate = f" ({self.num_tokens / self.seconds:,.0f}/s)" if self.seconds else ""
        parts = [f"{self.num_done} of {self.num_episodes} episodes", f"{self.num_tokens:,} tokens{rate}"]
        parts += [f"{self.num_failed} failed"] if self.num_failed else []
        parts += [f"slowest: episode {self.slowest[0]}, {self.slowest[1]:.0f} s so far"] if self.slowest else []
        return ", ".join(parts)


class _EpisodeCounts:
    """Counts the finished and running episodes of one call of `stream_episodes`."""

    def __init__(self, num_episodes: int, failures: FailureLimit) -> None:
        self._num_episodes = num_episodes
        self._failures = failures
        self._began = time.monotonic()
        self._num_done = self._num_resumed = self._num_tokens = 0
        self.running: dict[int, RunningEpisode] = {}

    def count(self, episode: Episode) -> None:
        self._failures.count(episode)
        self._num_done += 1
        self._num_resumed += episode.num_attempts == 0
        if episode.num_attempts:
            self._num_tokens += sum(map(num_sampled_tokens, episode.rollouts))

    def progress(self) -> Progress:
        now = time.monotonic()
        running = list(self.running.values())
        slowest = min(running, key=lambda one: one.began, default=None)
        return Progress(
            num_done=self._num_done,
            num_episodes=self._num_episodes,
            num_failed=self._failures.num_failed,
            num_resumed=self._num_resumed,
            num_tokens=self._num_tokens + sum(one.num_tokens for one in running),
            seconds=now - self._began,
            slowest=None if slowest is None else (slowest.plan.index, now - slowest.began),
        )


OnProgress = Callable[[Progress], None]


class RolloutEngine:
    """Runs episodes.

    `env_registry` and `protocol_registry` map a kind to a factory; the engine calls it with the spec's kwargs once per episode.
    Other env kinds are looked up in `ludic.registry.envs`. `jsonl_path` appends every episode to that file; with `resume=True`
    the engine reads episodes that are already in the file instead of running them.
    """

    def __init__(
        self,
        *,
        env_registry: Mapping[str, Factory] | None = None,
        protocol_registry: Mapping[str, Factory] | None = None,
        jsonl_path: str | Path | None = None,
        resume: bool = False,
        seed: int = 0,
        episode_timeout_s: float | None = None,
        env_timeout_s: float | None = DEFAULT_ENV_TIMEOUT_S,
        max_retries: int = 1,
        max_failed_share: float = 0.5,
        on_progress: OnProgress | None = None,
    ) -> None:
        if resume and jsonl_path is None:
            raise ConfigError("resume=True needs jsonl_path: the file that the earlier run wrote.")
        FailureLimit(max_failed_share, num_episodes=0)  # checks the share before the run starts
        self._factories = Factories(env_registry, protocol_registry)
        self._writer = None if jsonl_path is None else RolloutWriter(jsonl_path)
        self._finished = FinishedEpisodes(jsonl_path) if resume and jsonl_path is not None else None
        self._seed = seed
        self._episode_timeout_s = episode_timeout_s
        self._env_timeout_s = env_timeout_s
        self._max_retries = max_retries
        self._max_failed_share = max_failed_share
        self._on_progress = on_progress
        self._failures = FailureLog()
        self._active: list[_EpisodeCounts] = []
        self._num_planned = 0

    # --- public methods ---

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> list[Rollout]:
        """All rollouts in the order of the requests, including those of failed episodes (see `Rollout.failure`)."""
        episodes = await self.run_episodes(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        return [rollout for episode in episodes for rollout in episode.rollouts]

    async def stream_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> AsyncGenerator[list[Rollout], None]:
        """The rollouts of one episode at a time, as episodes finish.

        A caller that stops early should close it (`async with aclosing(engine.stream_rollouts(…))`) to cancel running episodes.
        """
        stream = self.stream_episodes(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        async with aclosing(stream):
            async for episode in stream:
                yield episode.rollouts

    async def generate_batch(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = DEFAULT_MAX_STEPS,
        credit_assigner: CreditAssigner | None = None,
        timeout_s: float | None = None,
        concurrency: int = 8,
        sample_filter: SampleFilter | None = None,
        *,
        algorithm: HasCreditAssigner | None = None,
        per_turn: bool = False,
    ) -> SAWBatch:
        """Run the episodes, drop incomplete groups, assign credit, build items, filter them."""
        builder = BatchBuilder(
            credit_assigner=credit_of(credit_assigner, algorithm), sample_filter=sample_filter, per_turn=per_turn
        )
        episodes = await self.run_episodes(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        return builder.batch(episodes)

    # --- called by batch sources ---

    async def run_episodes(
        self,
        requests: Sequence[RolloutRequest],
        *,
        max_steps: int,
        timeout_s: float | None = None,
        concurrency: int = 8,
        first_index: int | None = None,
    ) -> list[Episode]:
        """All episodes, in the order of the requests."""
        stream = self.stream_episodes(
            requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency, first_index=first_index
        )
        async with aclosing(stream):
            episodes = [episode async for episode in stream]
        return sorted(episodes, key=lambda episode: episode.plan.index)

    async def stream_episodes(
        self,
        requests: Sequence[RolloutRequest],
        *,
        max_steps: int,
        timeout_s: float | None = None,
        concurrency: int = 8,
        first_index: int | None = None,
    ) -> AsyncGenerator[Episode, None]:
        """Episodes as they finish, numbered from `first_index`, by default from the engine's last number on."""
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}; at least one episode must run at a time.")
        limits = EpisodeLimits(
            max_steps=max_steps,
            timeout_s=timeout_s,
            episode_timeout_s=self._episode_timeout_s,
            env_timeout_s=self._env_timeout_s,
            max_retries=self._max_retries,
        )
        for request in requests:
            self._factories.check(request)
        num_episodes = sum(request.num_episodes for request in requests)
        if first_index is None:
            first_index = self._num_planned
            self._num_planned += num_episodes
        plans = plan_episodes(requests, first_index=first_index, seed=self._seed)
        with self._counting(num_episodes) as counts:
            finished = as_finished(self._jobs(plans, limits, counts), limit=min(concurrency, max(num_episodes, 1)))
            async with aclosing(finished):
                async for episode in finished:
                    counts.count(episode)
                    if self._on_progress is not None:
                        self._on_progress(counts.progress())
                    yield episode

    @property
    def progress(self) -> Progress | None:
        """Progress of the running batch (the one started first, if there are several); None if no batch is running."""
        return self._active[0].progress() if self._active else None

    @contextmanager
    def _counting(self, num_episodes: int) -> Iterator[_EpisodeCounts]:
        counts = _EpisodeCounts(num_episodes, FailureLimit(self._max_failed_share, num_episodes=num_episodes))
        self._active.append(counts)
        try:
            yield counts
        finally:
            self._active.remove(counts)
            self._failures.log_repeated()

    # --- one episode ---

    def _jobs(
        self, plans: Iterator[EpisodePlan], limits: EpisodeLimits, counts: _EpisodeCounts
    ) -> Iterator[Job[Episode]]:
        if self._finished is None:
            return (partial(self._run_episode, plan, limits, counts) for plan in plans)
        resumed = resume_plans(plans, self._finished, max_steps=limits.max_steps)
        return (
            partial(asyncio.to_thread, read_episode, plan, resumed.stored[plan.index])
            if plan.index in resumed.stored
            else partial(self._run_episode, plan, limits, counts, resumed.keys[plan.index])
            for plan in resumed.plans
        )

    async def _run_episode(
        self, plan: EpisodePlan, limits: EpisodeLimits, counts: _EpisodeCounts, key: str | None = None
    ) -> Episode:
        counts.running[plan.index] = running = RunningEpisode(plan)
        try:
            episode = await run_episode(plan, self._factories, limits, self._failures, running)
        finally:
            del counts.running[plan.index]
        if self._writer is not None:
            await self._writer.write(episode, key=key or request_key(plan, max_steps=limits.max_steps))
        return episode
