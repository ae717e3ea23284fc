"""Dynamic sampling: replace groups that teach nothing until the batch is full.

A group whose rollouts all earned the same has no advantage to learn from (DAPO, arXiv 2503.14476, section 3.2). Failed
groups are replaced in the same way. The number of rounds is bounded; what is there then is the batch.
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
Play = Callable[[list[RequestGroup]], Awaitable[list[Episode]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicSampling:
    """How far to go for a full batch."""

    max_rounds: int = 4
    """Rounds of generation for one batch, the first included."""
    eps: float = 1e-6
    """Rewards of a group that differ by no more than this, or than rounding, are the same."""

    def __post_init__(self) -> None:
        if self.max_rounds < 1:
            raise ConfigError(f"DynamicSampling.max_rounds={self.max_rounds}; one round at least fills the batch.")
        if self.eps < 0:
            raise ConfigError(f"DynamicSampling.eps={self.eps}; it must be 0 or more.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Refilled:
    """A batch's episodes, and what it took to get them."""

    episodes: list[Episode]
    failed: list[Episode]
    """Of groups that failed; they are here to be counted."""
    num_rounds: int
    num_zero_variance: int
    """Groups that were played and replaced because their rewards did not differ."""


async def refill(num_groups: int, *, take: Take, play: Play, settings: DynamicSampling) -> Refilled:
    """`num_groups` groups that teach something, or as many as the rounds brought."""
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
        for episodes in by_group(await play(groups)):
            if any(episode.failure for episode in episodes):
                failed += episodes
            elif _teaches(episodes, settings.eps):
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


def _teaches(episodes: Sequence[Episode], eps: float) -> bool:
    """True when some agent's rewards differ within the group. A single episode has nothing to be compared with."""
    if len(episodes) == 1:
        return True
    rewards: dict[GroupKey | None, list[float]] = {}
    for rollout in (rollout for episode in episodes for rollout in episode.rollouts if rollout.failure is None):
        rewards.setdefault(rollout.group, []).append(rollout.total_reward)
    return any(max(own) - min(own) > max(eps, rounding_of(own)) for own in rewards.values())
