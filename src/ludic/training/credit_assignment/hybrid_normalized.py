"""`HybridNormalizedReturn`: centred on the group, scaled by the batch (ScaleRL)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ludic.training.credit_assignment.turns_and_groups import (
    Weights,
    check_group_size,
    compared_totals,
    rollouts_by_group,
    same_on_every_step,
)
from ludic.types import ConfigError, Rollout


@dataclass(frozen=True, slots=True)
class HybridNormalizedReturn:
    """(R − mean of the group) / (spread of those differences over the whole batch + eps), the same on every step.

    One scale for all prompts: a group whose rollouts are nearly alike is not blown up, as dividing by its own spread
    would do.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    eps: float = 1e-8
    positive_only: bool = False
    """Set what is below the mean to 0, after the division."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        check_group_size("HybridNormalizedReturn", self.group_size)
        if not self.eps > 0:
            raise ConfigError(
                f"HybridNormalizedReturn.eps={self.eps}; it must be positive, a batch may have no spread."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        members = [rollout for group in groups.values() for rollout in group]
        if not members:
            return {}
        advantages = np.concatenate([compared_totals(group, scaled=False) for group in groups.values()])
        advantages = advantages / (advantages.std() + self.eps)
        if self.positive_only:
            advantages = np.maximum(advantages, 0.0)
        weights: Weights = {}
        for rollout, advantage in zip(members, advantages, strict=True):
            weights |= same_on_every_step(rollout, advantage)
        return weights
