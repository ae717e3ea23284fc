"""`TurnLeaveOneOutReturn`: return-to-go against the siblings that were still playing, at any mix of lengths.

Why it is unbiased though the policy decides when to stop. A baseline may know everything but the action that it is
subtracted from, and what came of it. Here it is made of the other rollouts and of the turn's number alone: who of
them was still playing, and what they earned from there on. Whether the rollout itself got to turn t was settled
before its action there.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ludic.training.credit_assignment.turns_and_groups import (
    Floats,
    Weights,
    check_discount,
    check_group_size,
    one_per_turn,
    returns_to_go,
    rollouts_by_group,
    turn_rewards,
)
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class TurnLeaveOneOutReturn:
    """G_t minus the mean G_t of the *other* members that reach turn t.

    A turn that no other member reaches is compared with the last turn of each of them. `TurnGroupReturn` gives such a
    turn 0 and shrinks those that few reach, so that it learns late turns too slowly; this one shrinks nothing, and its
    expected gradient is that of `MonteCarloReturn` with the same gamma.
    """

    group_size: int | None = None
    """Rollouts per group; None takes groups of any size."""
    gamma: float = 1.0
    """Discount per turn."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising. One rollout alone has no baseline and gets 0."""

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_group_size("TurnLeaveOneOutReturn", self.group_size)
        check_discount("TurnLeaveOneOutReturn", "gamma", self.gamma)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            returns = [returns_to_go(turn_rewards(rollout), self.gamma) for rollout in members]
            for i, rollout in enumerate(members):
                weights |= one_per_turn(rollout, _against_others(returns[i], returns[:i] + returns[i + 1 :]))
        return weights


def _against_others(own_T: Floats, others: Sequence[Floats]) -> Floats:
    if not others:
        return np.zeros_like(own_T)
    return own_T - np.array([_expected(t, others) for t in range(len(own_T))])


def _expected(t: int, others: Sequence[Floats]) -> float:
    """What the others earned from turn t on; where all of them had stopped by then, from their last turns on."""
    playing = [returns_T[t] for returns_T in others if len(returns_T) > t]
    compared = playing or [returns_T[-1] for returns_T in others if len(returns_T) > 0]
    return float(np.mean(compared)) if compared else 0.0
