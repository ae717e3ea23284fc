"""`GroupNormalizedReturn`: better or worse than one's siblings (GRPO, Dr. GRPO)."""

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
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class GroupNormalizedReturn:
    """Total reward minus the mean of the group, the same on every step.

    With `normalize_adv` it is also divided by the group's own spread, which favours prompts on which all rollouts are
    nearly alike; Dr. GRPO leaves that out.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    normalize_adv: bool = False
    """Divide by the population standard deviation of the group (plus 1e-8); differences that are mere rounding count as none."""
    positive_only: bool = False
    """Set what is below the mean to 0, after the division, so that the scale does not depend on it."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        check_group_size("GroupNormalizedReturn", self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            for rollout, advantage in zip(members, self._advantages(members), strict=True):
                weights |= same_on_every_step(rollout, advantage)
        return weights

    def _advantages(self, members: Sequence[Rollout]) -> list[float]:
        advantages_G = compared_totals(members, scaled=self.normalize_adv)
        if self.positive_only:
            advantages_G = np.maximum(advantages_G, 0.0)
        return [float(a) for a in advantages_G]
