"""`RolloutEngine`: requests in, episodes played concurrently, rollouts or a training batch out.

The same requests get the same seeds whatever the concurrency, and so the same episodes from a client that answers a seed alike
(docs/engine.md says how far the embedded engine does). Results come in the order of the requests. A failed episode is tried
again and then kept as data; a run in which too many fail stops and says why.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ludic.batch_gen.build_batch import BatchBuilder, HasCreditAssigner, credit_of
from ludic.batch_gen.concurrency import Job, as_finished
from ludic.batch_gen.episodes import (
    DEFAULT_ENV_TIMEOUT_S,
    Episode,
    EpisodeLimits,
    EpisodePlan,
    Factories,
    Factory,
    FailureLog,
    RunningEpisode,
    num_sampled_tokens,
    plan_episodes,
    run_episode,
)
from ludic.batch_gen.groups import FailureLimit
from ludic.batch_gen.store import FinishedEpisodes, RolloutWriter, read_episode, request_key, resume_plans
from ludic.types import ConfigError, CreditAssigner, Rollout, RolloutRequest, SampleFilter, SAWBatch

DEFAULT_MAX_STEPS = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a run is, told after every episode and whenever it is asked for."""

    num_done: int
    num_episodes: int
    num_failed: int
    num_resumed: int
    """Of those done, how many were found in the file of an earlier run."""
    num_tokens: int = 0
    """Sampled so far by the model calls that have returned, also those of episodes that are going on."""
    seconds: float = 0.0
    slowest: tuple[int, float] | None = None
    """Of the episodes that are going on: number and seconds of the one that has taken longest."""

    def __str__(self) -> str:
        rate = f" ({self.num_tokens / self.seconds:,.0f}/s)" if self.seconds else ""
        parts = [f"{self.num_done} of {self.num_episodes} episodes", f"{self.num_tokens:,} tokens{rate}"]
        parts += [f"{self.num_failed} failed"] if self.num_failed else []
        parts += [f"slowest: episode {self.slowest[0]}, {self.slowest[1]:.0f} s so far"] if self.slowest else []
        return ", ".join(parts)


class _Playing:
    """One call of `stream_episodes`: counts what is done, and looks into what is going on."""

    def __init__(self, num_episodes: int, failures: FailureLimit) -> None:
        self._num_episodes = num_episodes
        self._failures = failures
        self._began = time.monotonic()
        self._num_done = self._num_resumed = self._num_tokens = 0
        self.going_on: dict[int, RunningEpisode] = {}

    def count(self, episode: Episode) -> None:
        self._failures.count(episode)
        self._num_done += 1
        self._num_resumed += episode.num_attempts == 0
        if episode.num_attempts:
            self._num_tokens += sum(map(num_sampled_tokens, episode.rollouts))

    def progress(self) -> Progress:
        now = time.monotonic()
        going_on = list(self.going_on.values())
        slowest = min(going_on, key=lambda one: one.began, default=None)
        return Progress(
            num_done=self._num_done,
            num_episodes=self._num_episodes,
            num_failed=self._failures.num_failed,
            num_resumed=self._num_resumed,
            num_tokens=self._num_tokens + sum(one.num_tokens for one in going_on),
            seconds=now - self._began,
            slowest=None if slowest is None else (slowest.plan.index, now - slowest.began),
        )


OnProgress = Callable[[Progress], None]


class RolloutEngine:
    """Plays episodes.

    `env_registry` and `protocol_registry` map a kind to a factory that is called with the spec's kwargs once per episode;
    env kinds that are not in it are looked up in `ludic.registry.envs`. With `jsonl_path` every episode is also appended to
    that file, and with `resume=True` episodes that the file has already are read back instead of played.
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
        FailureLimit(max_failed_share, num_episodes=0)  # a wrong share is named here, not in the middle of a run
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
        self._playing: list[_Playing] = []
        self._num_planned = 0

    # --- what people call ---

    async def generate_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> list[Rollout]:
        """All rollouts in the order of the requests, those of failed episodes included (see `Rollout.failure`)."""
        episodes = await self.play(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        return [rollout for episode in episodes for rollout in episode.rollouts]

    async def stream_rollouts(
        self,
        requests: Sequence[RolloutRequest],
        max_steps: int = DEFAULT_MAX_STEPS,
        timeout_s: float | None = None,
        concurrency: int = 8,
    ) -> AsyncGenerator[list[Rollout], None]:
        """The rollouts of one episode at a time, as episodes finish.

        Who stops early should close it (`async with aclosing(engine.stream_rollouts(…))`): that ends what still runs.
        """
        playing = self.stream_episodes(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        async with aclosing(playing):
            async for episode in playing:
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
        """Play, leave out incomplete groups, assign credit, make items, filter."""
        assembly = BatchBuilder(
            credit_assigner=credit_of(credit_assigner, algorithm), sample_filter=sample_filter, per_turn=per_turn
        )
        episodes = await self.play(requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency)
        return assembly.batch(episodes)

    # --- what batch sources call ---

    async def play(
        self,
        requests: Sequence[RolloutRequest],
        *,
        max_steps: int,
        timeout_s: float | None = None,
        concurrency: int = 8,
        first_index: int | None = None,
    ) -> list[Episode]:
        """All episodes, in the order of the requests."""
        playing = self.stream_episodes(
            requests, max_steps=max_steps, timeout_s=timeout_s, concurrency=concurrency, first_index=first_index
        )
        async with aclosing(playing):
            episodes = [episode async for episode in playing]
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
        """Episodes as they finish. They are numbered from `first_index`, or on from the engine's last."""
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
        plans = self._plans(requests, first_index, num_episodes)
        with self._watching(num_episodes) as playing:
            finished = as_finished(self._jobs(plans, limits, playing), limit=min(concurrency, max(num_episodes, 1)))
            async with aclosing(finished):
                async for episode in finished:
                    playing.count(episode)
                    if self._on_progress is not None:
                        self._on_progress(playing.progress())
                    yield episode

    @property
    def progress(self) -> Progress | None:
        """Of the batch that is being played now (the one begun first, where there are several); None when none is."""
        return self._playing[0].progress() if self._playing else None

    @contextmanager
    def _watching(self, num_episodes: int) -> Iterator[_Playing]:
        playing = _Playing(num_episodes, FailureLimit(self._max_failed_share, num_episodes=num_episodes))
        self._playing.append(playing)
        try:
            yield playing
        finally:
            self._playing.remove(playing)
            self._failures.tell_rest()

    # --- one episode ---

    def _plans(
        self, requests: Sequence[RolloutRequest], first_index: int | None, num_episodes: int
    ) -> Iterator[EpisodePlan]:
        if first_index is None:
            first_index = self._num_planned
            self._num_planned += num_episodes
        return plan_episodes(requests, first_index=first_index, seed=self._seed)

    def _jobs(self, plans: Iterator[EpisodePlan], limits: EpisodeLimits, playing: _Playing) -> Iterator[Job[Episode]]:
        if self._finished is None:
            return (partial(self._play, plan, limits, playing) for plan in plans)
        resumed = resume_plans(plans, self._finished, max_steps=limits.max_steps)
        return (
            partial(asyncio.to_thread, read_episode, plan, resumed.stored[plan.index])
            if plan.index in resumed.stored
            else partial(self._play, plan, limits, playing)
            for plan in resumed.plans
        )

    async def _play(self, plan: EpisodePlan, limits: EpisodeLimits, playing: _Playing) -> Episode:
        playing.going_on[plan.index] = going_on = RunningEpisode(plan)
        try:
            episode = await run_episode(plan, self._factories, limits, self._failures, going_on)
        finally:
            del playing.going_on[plan.index]
        if self._writer is not None:
            await self._writer.write(episode, key=request_key(plan, max_steps=limits.max_steps))
        return episode
