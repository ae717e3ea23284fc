"""`RolloutEngine` runs the episodes of rollout requests concurrently and returns rollouts or a training batch.

Seeds do not depend on concurrency, so a client with reproducible sampling gives the same episodes (docs/engine.md says how far
the embedded engine is reproducible). Results come in the order of the requests. A failed episode is retried and then kept as
data; the run stops with an error when too many fail.
"""

import asyncio
import time
from collections import Counter, defaultdict
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
    episode_meta,
    num_sampled_tokens,
    plan_episodes,
)
from ludic.batch_gen.store import (
    FinishedEpisodes,
    RolloutWriter,
    StoredEpisode,
    read_episode,
    request_key,
    resume_plans,
)
from ludic.envs.threads import opened, time_limit
from ludic.interaction import recorded, score_or_record
from ludic.rewards import Rewards
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
    the engine reads episodes that are already in the file instead of running them. `rewards` scores finished episodes before
    they are written; scorers that compare siblings run when a group is complete, which is then returned and written as a whole.
    A scorer that raises fails its episode or group without a retry; such failures have a limit for themselves,
    `max_unscored_share`. Evaluations need one, since an episode without a score counts as not solved.
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
        max_unscored_share: float = 1.0,
        on_progress: OnProgress | None = None,
        rewards: Rewards | None = None,
    ) -> None:
        if resume and jsonl_path is None:
            raise ConfigError("resume=True needs jsonl_path: the file that the earlier run wrote.")
        FailureLimit(max_failed_share, max_unscored_share, num_episodes=0)  # checks the shares before the run starts
        self._factories = Factories(env_registry, protocol_registry)
        self._writer = None if jsonl_path is None else RolloutWriter(jsonl_path)
        self._finished = FinishedEpisodes(jsonl_path) if resume and jsonl_path is not None else None
        self._seed = seed
        self._episode_timeout_s = episode_timeout_s
        self._env_timeout_s = env_timeout_s
        self._max_retries = max_retries
        self._max_failed_share, self._max_unscored_share = max_failed_share, max_unscored_share
        self._on_progress = on_progress
        self.rewards = rewards
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
        credit = credit_of(credit_assigner, algorithm)
        builder = BatchBuilder(credit_assigner=credit, sample_filter=sample_filter, per_turn=per_turn)
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
        has_whole_groups: bool = True,
    ) -> list[Episode]:
        """All episodes, in the order of the requests."""
        stream = self.stream_episodes(
            requests,
            max_steps=max_steps,
            timeout_s=timeout_s,
            concurrency=concurrency,
            first_index=first_index,
            has_whole_groups=has_whole_groups,
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
        first_index: int | Sequence[int] | None = None,
        has_whole_groups: bool = True,
    ) -> AsyncGenerator[Episode, None]:
        """Episodes as they finish, numbered from `first_index`, by default from the engine's last number on; or each request from
        its own number.

        `has_whole_groups=False`: siblings run in other calls; the caller calls `finish_group` when it has all of them.
        """
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
            jobs = self._jobs(plans, limits, counts)
            if has_whole_groups and self._compares_siblings:
                jobs = self._jobs_of_groups(jobs, limits.max_steps)
            finished = as_finished((job for _, job in jobs), limit=min(concurrency, max(num_episodes, 1)))
            async with aclosing(finished):
                async for episodes in finished:
                    for episode in episodes:
                        counts.count(episode)
                        if self._on_progress is not None:
                            self._on_progress(counts.progress())
                        yield episode

    def scorer_metrics(self) -> dict[str, float]:
        """The scorers' own metrics, over all episodes so far."""
        return {} if self.rewards is None else self.rewards.metrics()

    def scorer_mean_weights(self) -> dict[str, float]:
        """Number of values behind each scorer metric that is a mean."""
        return {} if self.rewards is None else self.rewards.mean_weights()

    @property
    def progress(self) -> Progress | None:
        """Progress of the running batch (the one started first, if there are several); None if no batch is running."""
        return self._active[0].progress() if self._active else None

    @contextmanager
    def _counting(self, num_episodes: int) -> Iterator[_EpisodeCounts]:
        limit = FailureLimit(self._max_failed_share, self._max_unscored_share, num_episodes=num_episodes)
        counts = _EpisodeCounts(num_episodes, limit)
        self._active.append(counts)
        try:
            yield counts
        finally:
            self._active.remove(counts)
            self._failures.log_repeated()

    # --- one episode ---

    def _jobs(
        self, plans: Iterator[EpisodePlan], limits: EpisodeLimits, counts: _EpisodeCounts
    ) -> Iterator[tuple[EpisodePlan, Job[list[Episode]]]]:
        if self._finished is None:
            return ((plan, partial(self._run_episode, plan, limits, counts)) for plan in plans)
        resumed = resume_plans(plans, self._finished, max_steps=limits.max_steps, rewards=self.rewards)
        return (
            (plan, partial(_read, plan, resumed.stored[plan.index]))
            if plan.index in resumed.stored
            else (plan, partial(self._run_episode, plan, limits, counts))
            for plan in resumed.plans
        )

    async def _run_episode(self, plan: EpisodePlan, limits: EpisodeLimits, counts: _EpisodeCounts) -> list[Episode]:
        """Play the episode, again if it fails, then score and store it."""
        counts.running[plan.index] = running = RunningEpisode(plan)
        try:
            for num_attempts in range(1, limits.max_retries + 2):
                running.protocol = protocol = self._factories.make_protocol(plan.request)
                protocol.env_timeout_s = limits.env_timeout_s
                env_made = opened(
                    partial(self._factories.make_env, plan.request),
                    on_loop=self._factories.makes_env_on_loop(plan.request),
                    timeout_s=limits.env_timeout_s,
                )
                with recorded(protocol, episode_meta(plan, limits)) as rollouts:
                    async with (
                        time_limit(limits.episode_timeout_s, "The episode", "episode_timeout_s"),
                        env_made as env,
                    ):
                        rollouts += await protocol.run(
                            env=env,
                            max_steps=min(limits.max_steps, protocol.max_steps or limits.max_steps),
                            env_seed=plan.env_seed,
                            sampling_seed=plan.sampling_seed,
                            inference=plan.request.inference,
                            timeout_s=limits.timeout_s,
                        )
                episode = Episode(plan=plan, rollouts=rollouts, num_attempts=num_attempts)
                if episode.failure is None:
                    break
                self._failures.add(plan, episode.failure, is_retried=num_attempts <= limits.max_retries)
            if self.rewards is not None and episode.failure is None:
                await score_or_record(rollouts, partial(self.rewards.score_episode, rollouts))
                if episode.failure is not None:  # not retried: the episode itself is fine, and would be the same again
                    self._failures.add(plan, episode.failure, is_retried=False)
        finally:
            del counts.running[plan.index]
        if episode.failure is not None or not self._compares_siblings:  # others are written with their group
            await self._write(episode, limits.max_steps)
        return [episode]

    async def _write(self, episode: Episode, max_steps: int) -> None:
        if self._writer is not None:
            key = request_key(episode.plan, max_steps=max_steps, rewards=self.rewards)
            await self._writer.write(episode, key=key)

    # --- groups ---

    @property
    def _compares_siblings(self) -> bool:
        return self.rewards is not None and self.rewards.compares_siblings

    def _jobs_of_groups(
        self, jobs: Iterator[tuple[EpisodePlan, Job[list[Episode]]]], max_steps: int
    ) -> Iterator[tuple[EpisodePlan, Job[list[Episode]]]]:
        """The same jobs; the one that finishes a group returns all of its episodes, and the others none."""
        waiting = list(jobs)
        num_left = Counter(_group_of(plan) for plan, _ in waiting)
        done: defaultdict[str | int, list[Episode]] = defaultdict(list)

        async def run(plan: EpisodePlan, job: Job[list[Episode]]) -> list[Episode]:
            episodes, group = await job(), _group_of(plan)
            done[group] += episodes
            num_left[group] -= 1
            if num_left[group]:
                return []
            await self.finish_group(done[group], max_steps=max_steps)
            return done.pop(group)

        return ((plan, partial(run, plan, job)) for plan, job in waiting)

    async def finish_group(self, episodes: Sequence[Episode], *, max_steps: int) -> None:
        """Apply the scorers that compare the episodes of a group, and write the episodes. Nothing to do without such scorers."""
        finished = [episode for episode in episodes if episode.failure is None]
        if self.rewards is None or not self._compares_siblings or not any(e.num_attempts for e in finished):
            return
        rollouts = [rollout for episode in finished for rollout in episode.rollouts]
        await score_or_record(rollouts, partial(self.rewards.score_group, rollouts))
        for episode in finished:
            if episode.failure is not None:
                self._failures.add(episode.plan, episode.failure, is_retried=False)
            if episode.num_attempts:
                await self._write(episode, max_steps)


def _group_of(plan: EpisodePlan) -> str | int:
    """The id of a plan's group; an episode without one is a group alone."""
    return plan.index if plan.group_id is None else plan.group_id


async def _read(plan: EpisodePlan, stored: StoredEpisode) -> list[Episode]:
    return [await asyncio.to_thread(read_episode, plan, stored)]
