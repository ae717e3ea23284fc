"""Runs several groups at once with a bounded number of episodes.

While the slowest episode of a group runs, its other places are free for the next group. A failed episode leaves one line of text.
The failure limit covers the most recent groups, because an actor has no known last group.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from ludic.batch_gen.engine import RolloutEngine
from ludic.batch_gen.episodes import Episode, EpisodeLimits, TooManyFailures
from ludic.batch_gen.requests.groups import RequestGroup
from ludic.tasks import as_finished
from ludic.types import ConfigError, Failure, RolloutRequest, derive_seed

_NUM_SHOWN = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedGroup:
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
        """Whether an episode of another group could start at once."""
        return self._num_open < self._concurrency

    async def run(self, group: RequestGroup) -> FinishedGroup:
        members = list(single_episodes(group))
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
        return FinishedGroup(
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


def single_episodes(group: RequestGroup) -> Iterator[RolloutRequest]:
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
