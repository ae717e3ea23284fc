"""Turn by turn: return-to-go, compared with that of the siblings at the same turn or in the same state."""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from ludic.training.credit_assignment.grouping import (
    Floats,
    GroupRule,
    Weights,
    check_discount,
    compared,
    largest_to_go,
    one_per_turn,
    returns_to_go,
    turn_rewards,
)
from ludic.types import AgentStep, ConfigError, EnvironmentStep, Rollout, Turn
from ludic.types.messages import text_of

StateFn: TypeAlias = Callable[[Turn], Hashable | None]
"""The state that a turn was taken in; None when it is not known, and then the turn is compared with no other."""

Comparison: TypeAlias = Literal["scaled", "mean", "others"]
"""The comparison of a return with its group.

scaled: minus the mean, divided by the population standard deviation (plus 1e-8).
mean: minus the mean.
others: minus the mean over the *other* rollouts; later visits of the rollout itself are left out with it.
"""


@dataclass(frozen=True, slots=True)
class TurnGroupReturn(GroupRule):
    """G_t minus the mean G_t of the group's members that reach turn t, so each turn is compared by what followed it.

    Biased: the mean holds the rollout's own G_t, which shrinks the expected gradient of turn t by (n_t − 1)/n_t, with n_t the
    number of members that reach it. So late turns, which few members reach, count for less, and a turn that one member reaches
    alone gets 0. (With one length for all, a step size absorbs it.) `normalize` adds a second bias, as in GRPO: it magnifies
    turns on which the members are nearly alike. `TurnLeaveOneOutReturn` has neither.

    Not biased: members at turn t are in different states, and those that ended early are missing. A baseline only has to be
    independent of the action, and who else reaches turn t is: this costs variance.
    """

    group_size: int | None = None
    gamma: float = 1.0
    """Discount per turn."""
    normalize: bool = False
    """Divide by the population standard deviation of G_t over the members that reach turn t (plus 1e-8)."""

    def __post_init__(self) -> None:
        GroupRule.__post_init__(self)
        check_discount(self, gamma=self.gamma)

    def _compare(self, members: list[Rollout]) -> Weights:
        how: Comparison = "scaled" if self.normalize else "mean"
        return one_per_turn(members, _compared_turns(members, self.gamma, how, state_of=lambda turn: turn.number))


@dataclass(frozen=True, slots=True)
class TurnLeaveOneOutReturn(GroupRule):
    """G_t minus the mean G_t of the *other* members that reach turn t; of their last turns where none of them reaches it.

    Unbiased, also where the policy decides when to stop: the baseline is made of the other rollouts and of the turn's number,
    and whether the rollout itself reaches turn t is settled before its action there. The expected gradient is that of
    `MonteCarloReturn` with the same gamma.
    """

    group_size: int | None = None
    gamma: float = 1.0
    """Discount per turn."""

    def __post_init__(self) -> None:
        GroupRule.__post_init__(self)
        check_discount(self, gamma=self.gamma)

    def _compare(self, members: list[Rollout]) -> Weights:
        returns = [returns_to_go(turn_rewards(rollout), self.gamma) for rollout in members]
        others = [returns[:i] + returns[i + 1 :] for i in range(len(members))]
        return one_per_turn(members, [_against_others(*pair) for pair in zip(returns, others, strict=True)])


def _against_others(own_T: Floats, others: Sequence[Floats]) -> Floats:
    return own_T - np.array([_expected(t, others) for t in range(len(own_T))]) if others else np.zeros_like(own_T)


def _expected(t: int, others: Sequence[Floats]) -> float:
    """Mean return of the others from turn t on; where all of them had stopped by then, from their last turns on."""
    reached = [returns_T[t] for returns_T in others if len(returns_T) > t]
    values = reached or [returns_T[-1] for returns_T in others if len(returns_T) > 0]
    return float(np.mean(values)) if values else 0.0


def observation_before(turn: Turn) -> str | None:
    """The observation before the turn; for a reply that never reached the env, the last message that was shown."""
    for step in turn.steps:
        if isinstance(step, EnvironmentStep):
            return None if step.prev_obs is None else text_of(step.prev_obs)
    first = turn.steps[0]
    assert isinstance(first, AgentStep), "a turn without a transition is made of model calls"
    return text_of(first.prompt_messages[-1]["content"]) if first.prompt_messages else None


@dataclass(frozen=True, slots=True)
class StateGroupReturn(GroupRule):
    """A = A_episode + step_weight * A_step (GiGPO, Feng et al. 2025, arXiv:2505.10978).

    Members of a group start from one point, so their paths cross. A_episode compares total rewards within the group, the same
    on every step. A_step compares G_t with the G_t of all turns of the group that were taken in the same state; a state that
    was seen once gives 0.

    Biased: "scaled" and "mean" hold the rollout's own return, and a state that a rollout visits twice holds returns that its
    first action has caused. With "others" each term has the right direction in every state; the step term counts in a state as
    often as another rollout visits it, so states on many paths are learned faster.
    """

    gamma: float = 0.95
    """Discount per turn of the step term; below 1, the sooner of two ways to the same reward wins."""
    step_weight: float = 1.0
    """Weight of the step term relative to the episode term (omega in the paper)."""
    comparison: Comparison = "scaled"
    """The same for both terms."""
    state_of: StateFn = observation_before
    """The key that makes two states the same. Strip what never repeats (a clock, moves left), or no two turns are alike."""

    def __post_init__(self) -> None:
        GroupRule.__post_init__(self)
        check_discount(self, gamma=self.gamma)
        if not (math.isfinite(self.step_weight) and self.step_weight >= 0):
            raise ConfigError(f"StateGroupReturn.step_weight={self.step_weight}; it must be 0 or more.")
        if self.comparison not in get_args(Comparison):
            raise ConfigError(
                f"StateGroupReturn.comparison={self.comparison!r}; it is one of {', '.join(get_args(Comparison))}."
            )

    def _compare(self, members: list[Rollout]) -> Weights:
        totals = [rollout.total_reward for rollout in members]
        rewards = np.concatenate([turn_rewards(rollout) for rollout in members])
        episode_G = _compared(totals, range(len(members)), rewards, self.comparison)
        steps = _compared_turns(members, self.gamma, self.comparison, self.state_of)
        pairs = zip(episode_G, steps, strict=True)
        return one_per_turn(members, [episode + self.step_weight * steps_T for episode, steps_T in pairs])


def _compared_turns(members: Sequence[Rollout], gamma: float, how: Comparison, state_of: StateFn) -> list[Floats]:
    """Each member's returns-to-go, every one compared with those of the group's turns in the same state; 0 where it is unknown."""
    rewards = [turn_rewards(rollout) for rollout in members]
    returns = [returns_to_go(rewards_T, gamma) for rewards_T in rewards]
    largest = [largest_to_go(rewards_T) for rewards_T in rewards]
    weights = [np.zeros_like(returns_T) for returns_T in returns]
    visits: dict[Hashable, list[tuple[int, int]]] = {}  # state → (member, turn)
    for i, rollout in enumerate(members):
        for t, turn in enumerate(rollout.turns()):
            if (state := state_of(turn)) is not None:
                visits.setdefault(state, []).append((i, t))
    for places in visits.values():
        values, made_of = [returns[i][t] for i, t in places], [largest[i][t] for i, t in places]
        weights_N = _compared(values, [i for i, _ in places], made_of, how)
        for (i, t), weight in zip(places, weights_N, strict=True):
            weights[i][t] = weight
    return weights


def _compared(
    values: Sequence[float], owners: Sequence[int], made_of: Sequence[float] | Floats, how: Comparison
) -> Floats:
    """Each value against the others; `owners` are their rollouts, `made_of` the rewards that they are sums of."""
    if how != "others":
        return compared(values, made_of=made_of, scaled=how == "scaled")
    values_N, owners_N = np.asarray(values, dtype=np.float64), np.asarray(owners)
    own_sum_N, own_count_N = np.bincount(owners_N, values_N)[owners_N], np.bincount(owners_N)[owners_N]
    count_N = len(values_N) - own_count_N
    mean_N = (values_N.sum() - own_sum_N) / np.maximum(count_N, 1)
    return np.where(count_N > 0, values_N - mean_N, 0.0)
