"""`TurnGroupReturn`: return-to-go, compared turn by turn with the siblings that got as far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ludic.training.credit_assignment.turns_and_groups import (
    Floats,
    Weights,
    check_discount,
    check_group_size,
    compared,
    largest_to_go,
    one_per_turn,
    returns_to_go,
    rollouts_by_group,
    turn_rewards,
)
from ludic.types import Rollout


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
            rewards = [turn_rewards(rollout) for rollout in members]
            returns = [returns_to_go(rewards_T, self.gamma) for rewards_T in rewards]
            for rollout, weights_T in zip(members, self._by_turn(returns, rewards), strict=True):
                weights |= one_per_turn(rollout, weights_T)
        return weights

    def _by_turn(self, returns: Sequence[Floats], rewards: Sequence[Floats]) -> list[Floats]:
        """Each member's returns, every one against those of the members that reach its turn."""
        weights = [np.zeros_like(returns_T) for returns_T in returns]
        largest = [largest_to_go(rewards_T) for rewards_T in rewards]
        for t in range(max(map(len, returns), default=0)):
            there = [i for i, returns_T in enumerate(returns) if len(returns_T) > t]
            values = [returns[i][t] for i in there]
            weights_N = compared(values, made_of=[largest[i][t] for i in there], scaled=self.normalize)
            for i, weight in zip(there, weights_N, strict=True):
                weights[i][t] = weight
        return weights
