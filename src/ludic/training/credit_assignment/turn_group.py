"""`TurnGroupReturn`: return-to-go, compared turn by turn with the siblings that got as far."""

from collections import defaultdict
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

_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class TurnGroupReturn:
    """G_t minus the mean G_t of the group's members that reach turn t.

    Each turn is judged by what followed it, so a good turn early in a lost episode is not blamed for what was earned
    before it, nor praised for it.

    What is biased. The mean holds the rollout's own G_t, which shrinks the expected gradient of turn t by
    (n_t − 1)/n_t, with n_t the number of members that reach it. The direction at each turn is right, but late turns,
    which few members reach, count for less than they should, and a turn that one member reaches alone gets 0. (With
    one length for all, every turn shrinks alike and a step size absorbs it.) `normalize` adds a second bias, as in
    GRPO: turns on which the members are nearly alike are blown up. `TurnLeaveOneOutReturn` has neither.

    What is not. Members at turn t stand in different states, and those that ended early are not among them. A baseline
    need not know the state, only be independent of the action, and who else reaches turn t is: this costs variance,
    not bias.
    """

    group_size: int | None = None
    """Rollouts per group; None takes groups of any size."""
    gamma: float = 1.0
    """Discount per turn."""
    normalize: bool = False
    """Divide by the population standard deviation of G_t over the members that reach turn t (plus 1e-8)."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        if self.group_size is not None:
            check_group_size("TurnGroupReturn", self.group_size)
        check_discount("TurnGroupReturn", "gamma", self.gamma)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            returns = [returns_to_go(turn_rewards(rollout), self.gamma) for rollout in members]
            mean_T, scale_T = self._baseline(returns)
            for rollout, returns_T in zip(members, returns, strict=True):
                T = len(returns_T)
                weights |= one_per_turn(rollout, (returns_T - mean_T[:T]) / scale_T[:T])
        return weights

    def _baseline(self, returns: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Mean and divisor per turn, over the members that reach it."""
        by_turn: dict[int, list[float]] = defaultdict(list)
        for returns_T in returns:
            for t, value in enumerate(returns_T):
                by_turn[t].append(value)
        mean_T = np.array([np.mean(values) for values in by_turn.values()])
        if not self.normalize:
            return mean_T, np.ones_like(mean_T)
        return mean_T, np.array([np.std(values) + _EPS for values in by_turn.values()])
