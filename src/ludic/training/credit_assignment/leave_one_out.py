"""`LeaveOneOutReturn`: compared with the others only (RLOO)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ludic.training.credit_assignment.turns_and_groups import (
    Weights,
    check_group_size,
    rollouts_by_group,
    same_on_every_step,
)
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class LeaveOneOutReturn:
    """Total reward minus the mean of the *other* rollouts of the group, the same on every step.

    The baseline does not depend on the rollout that it is subtracted from, so the gradient is unbiased at any group
    size; the plain group mean shrinks it by (G − 1)/G.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising. One rollout alone has no baseline and gets 0."""

    def __post_init__(self) -> None:
        check_group_size("LeaveOneOutReturn", self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            total = sum(rollout.total_reward for rollout in members)
            for rollout in members:
                weights |= same_on_every_step(rollout, _against_others(rollout.total_reward, total, len(members)))
        return weights


def _against_others(reward: float, total: float, size: int) -> float:
    return reward - (total - reward) / (size - 1) if size > 1 else 0.0
