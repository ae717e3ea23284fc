"""Handling of failed episodes: incomplete groups are dropped, and a run with too many failures stops."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludic.batch_gen.episodes import Episode
from ludic.types import ConfigError, LudicError, Rollout

_NUM_SHOWN = 3


class TooManyFailures(LudicError, RuntimeError):
    """More episodes failed than the run allows."""


class FailureLimit:
    """Counts failed episodes and raises TooManyFailures as soon as the limit is certain to be exceeded."""

    def __init__(self, max_failed_share: float, *, num_episodes: int) -> None:
        if not 0 <= max_failed_share <= 1:
            raise ConfigError(f"max_failed_share={max_failed_share}; it is a share of the episodes, from 0 to 1.")
        self._share = max_failed_share
        self._num_episodes = num_episodes
        self.num_failed = 0
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], Episode] = {}

    def count(self, episode: Episode) -> None:
        failure = episode.failure
        if failure is None:
            return
        self.num_failed += 1
        kind = (failure.error, failure.place)
        self._kinds[kind] += 1
        self._first.setdefault(kind, episode)
        if self.num_failed > self._share * self._num_episodes:
            raise TooManyFailures(
                f"{self.num_failed} of {self._num_episodes} episodes failed, more than max_failed_share={self._share:g} "
                f"allows. {self._most_frequent()} Fix that, or raise max_failed_share."
            )

    def _most_frequent(self) -> str:
        """The most frequent kinds of failure, each with its first episode."""
        texts = []
        for kind, count in self._kinds.most_common(_NUM_SHOWN):
            first = self._first[kind]
            assert first.failure is not None, "only failed episodes are counted"
            text = first.failure.summary
            end = "" if text.endswith((".", "!", "?")) else "."
            where = f" at {first.failure.place}" if first.failure.place else ""
            texts.append(f"{count} x{where}, first in {first.plan.label}: {text}{end}")
        return " ".join(texts)


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptEpisodes:
    """The episodes that get credit, and counts of the dropped ones."""

    episodes: list[Episode]
    """In order; every group is complete."""
    num_failed: int
    num_groups_dropped: int
    num_retried: int

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for episode in self.episodes for rollout in episode.rollouts if rollout.failure is None]

    def played_by(self, policy: str) -> "KeptEpisodes":
        """The same episodes with only this policy's rollouts."""
        return replace(
            self,
            episodes=[replace(e, rollouts=[r for r in e.rollouts if r.policy == policy]) for e in self.episodes],
        )


def drop_failed_groups(episodes: Sequence[Episode]) -> KeptEpisodes:
    """Drop failed episodes and the groups they belong to."""
    failed = [episode for episode in episodes if episode.failure is not None]
    broken = {episode.plan.group_id for episode in failed} - {None}
    return KeptEpisodes(
        episodes=[e for e in episodes if e.failure is None and e.plan.group_id not in broken],
        num_failed=len(failed),
        num_groups_dropped=len(broken),
        num_retried=sum(episode.num_attempts > 1 for episode in episodes),
    )


def by_group(episodes: Sequence[Episode]) -> list[list[Episode]]:
    """Episodes grouped by group id, in the order of each group's first episode; an episode without a group is alone."""
    groups: dict[str | int, list[Episode]] = {}
    for episode in episodes:
        group_id = episode.plan.group_id
        groups.setdefault(episode.plan.index if group_id is None else group_id, []).append(episode)
    return list(groups.values())
