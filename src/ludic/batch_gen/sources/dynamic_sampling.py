"""Dynamic sampling: replaces groups without a learning signal until the batch is full.

A group whose rollouts all have the same reward has zero advantage (DAPO, arXiv 2503.14476, section 3.2). Failed groups are
replaced in the same way. The number of rounds is bounded; after the last one the batch may be smaller.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from ludic.batch_gen.episodes import Episode
from ludic.batch_gen.groups import by_group
from ludic.batch_gen.requests.stream import RequestGroup
from ludic.types import ConfigError, GroupKey, RequestsExhausted, rounding_of

logger = logging.getLogger(__name__)

Take = Callable[[int], list[RequestGroup]]
RunEpisodes = Callable[[list[RequestGroup]], Awaitable[list[Episode]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """Settings of dynamic sampling."""

    max_rounds: int = 4
    """Rounds of generation for one batch, the first included."""
    eps: float = 1e-6
    """Rewards of a group that differ by at most this, or by rounding, count as equal."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"DynamicSampling.max_rounds={self.max_rounds}; one round at least fills the batch.")
        if self.eps < 0:
            raise ConfigError(f"DynamicSampling.eps={self.eps}; it must be 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refilled:
    """The episodes of a batch, and counts of the replaced ones."""

    episodes: list[Episode]
    failed: list[Episode]
    """Episodes of failed groups, for the statistics."""
    num_rounds: int
    num_zero_variance: int
    """Groups that were replaced because their rewards were equal."""


async def refill(num_groups: int, *, take: Take, run: RunEpisodes, settings: DynamicSampling) -> Refilled:
    """`num_groups` groups with different rewards, or fewer if `max_rounds` rounds do not give so many."""
    kept: list[list[Episode]] = []
    failed: list[Episode] = []
    num_rounds = num_zero_variance = 0
    while num_rounds < settings.max_rounds and len(kept) < num_groups:
        try:
            groups = take(num_groups - len(kept))
        except RequestsExhausted:
            if not kept:
                raise
            break
        if not groups:
            break
        num_rounds += 1
        for episodes in by_group(await run(groups)):
            if any(episode.failure for episode in episodes):
                failed += episodes
            elif _rewards_differ(episodes, settings.eps):
                kept.append(episodes)
            else:
                num_zero_variance += 1
    if len(kept) < num_groups:
        logger.warning("Dynamic sampling found %d of %d groups in %d rounds.", len(kept), num_groups, num_rounds)
    return Refilled(
        episodes=[episode for group in kept for episode in group],
        failed=failed,
        num_rounds=num_rounds,
        num_zero_variance=num_zero_variance,
    )


def _rewards_differ(episodes: Sequence[Episode], eps: float) -> bool:
    """True if some agent's rewards differ within the group, or the group has only one episode."""
    if len(episodes) == 1:
        return True
    rewards: dict[GroupKey | None, list[float]] = {}
    for rollout in (rollout for episode in episodes for rollout in episode.rollouts if rollout.failure is None):
        rewards.setdefault(rollout.group, []).append(rollout.total_reward)
    return any(max(own) - min(own) > max(eps, rounding_of(own)) for own in rewards.values())
