"""`TurnGroupReturn`: return-to-go, compared turn by turn with the siblings that got as far."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ludic.training.credit_assignment.grouping import (
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


# `TurnLeaveOneOutReturn`: return-to-go against the siblings that were still playing, at any mix of lengths.
# Why it is unbiased though the policy decides when to stop. A baseline may know everything but the action that it is
# subtracted from, and what came of it. Here it is made of the other rollouts and of the turn's number alone: who of
# them was still playing, and what they earned from there on. Whether the rollout itself got to turn t was settled
# before its action there.


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
