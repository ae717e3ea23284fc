"""`StateGroupReturn`: groups within groups, by equal observations (GiGPO, Feng et al. 2025, arXiv:2505.10978).

Members of a group start from one point, so their paths cross. Wherever two of them stood in the same state and went
on differently, what followed tells the better move: a critic made of coincidences, without a second model.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, get_args

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
from ludic.types import AgentStep, ConfigError, EnvironmentStep, Rollout, Turn

StateFn: TypeAlias = Callable[[Turn], Hashable | None]
"""The state that a turn was taken in; None when it is not known, and then the turn is compared with no other."""

Comparison: TypeAlias = Literal["scaled", "mean", "others"]
"""How a return is compared with its group.

scaled: minus the mean, divided by the population standard deviation (plus 1e-8).
mean: minus the mean.
others: minus the mean over the *other* rollouts; later visits of the rollout itself are left out with it.
"""


def observation_before(turn: Turn) -> str | None:
    """What the env said before the turn; for a reply that never reached the env, the last message that was shown."""
    for step in turn.steps:
        if isinstance(step, EnvironmentStep):
            return step.prev_obs
    first = turn.steps[0]
    assert isinstance(first, AgentStep), "a turn without a transition is made of model calls"
    return str(first.prompt_messages[-1]["content"]) if first.prompt_messages else None


@dataclass(frozen=True, slots=True)
class StateGroupReturn:
    """A = A_episode + step_weight * A_step.

    A_episode compares total rewards within the group, the same on every step. A_step compares G_t with the G_t of all
    turns of the group that were taken in the same state; a state that was seen once gives 0.

    What is biased. "scaled" and "mean" hold the rollout's own return, and a state that a rollout visits twice holds
    returns that its first action has caused. With "others" each term has the right direction in every state; the step
    term is on in a state as often as another rollout visits it, so that well-trodden states are learned faster.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    gamma: float = 0.95
    """Discount per turn of the step term; below 1, the sooner of two ways to the same reward wins."""
    step_weight: float = 1.0
    """How much the step term counts beside the episode term (omega in the paper)."""
    comparison: Comparison = "scaled"
    """The same for both terms."""
    state_of: StateFn = observation_before
    """What counts as the same state. Strip what never repeats (a clock, moves left), or no two turns are alike."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        check_group_size("StateGroupReturn", self.group_size)
        check_discount("StateGroupReturn", "gamma", self.gamma)
        if not (math.isfinite(self.step_weight) and self.step_weight >= 0):
            raise ConfigError(f"StateGroupReturn.step_weight={self.step_weight}; it must be 0 or more.")
        if self.comparison not in get_args(Comparison):
            raise ConfigError(
                f"StateGroupReturn.comparison={self.comparison!r}; it is one of {', '.join(get_args(Comparison))}."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            rewards = [turn_rewards(rollout) for rollout in members]
            totals = [rollout.total_reward for rollout in members]
            episode_G = self._compared(totals, list(range(len(members))), np.concatenate(rewards))
            steps = self._step_terms(members, rewards)
            for rollout, episode, steps_T in zip(members, episode_G, steps, strict=True):
                weights |= one_per_turn(rollout, episode + self.step_weight * steps_T)
        return weights

    def _step_terms(self, members: Sequence[Rollout], rewards: Sequence[Floats]) -> list[Floats]:
        """A_step of every turn of every member."""
        returns = [returns_to_go(rewards_T, self.gamma) for rewards_T in rewards]
        largest = [largest_to_go(rewards_T) for rewards_T in rewards]
        terms = [np.zeros_like(returns_T) for returns_T in returns]
        for visits in self._visits(members).values():
            values, owners = [returns[i][t] for i, t in visits], [i for i, _ in visits]
            made_of = [largest[i][t] for i, t in visits]
            for (i, t), term in zip(visits, self._compared(values, owners, made_of), strict=True):
                terms[i][t] = term
        return terms

    def _visits(self, members: Sequence[Rollout]) -> dict[Hashable, list[tuple[int, int]]]:
        """State -> who stood in it: (member, turn)."""
        visits: dict[Hashable, list[tuple[int, int]]] = {}
        for i, rollout in enumerate(members):
            for t, turn in enumerate(rollout.turns()):
                state = self.state_of(turn)
                if state is not None:
                    visits.setdefault(state, []).append((i, t))
        return visits

    def _compared(self, values: Sequence[float], owners: Sequence[int], made_of: Sequence[float] | Floats) -> Floats:
        """Each value against its group; `owners` says which rollout it belongs to, `made_of` which rewards they are sums of."""
        if self.comparison == "others":
            return _against_others(np.asarray(values, dtype=np.float64), np.asarray(owners))
        return compared(values, made_of=made_of, scaled=self.comparison == "scaled")


def _against_others(values_N: Floats, owners_N: np.ndarray) -> Floats:
    own_sum_N, own_count_N = np.bincount(owners_N, values_N)[owners_N], np.bincount(owners_N)[owners_N]
    count_N = len(values_N) - own_count_N
    mean_N = (values_N.sum() - own_sum_N) / np.maximum(count_N, 1)
    return np.where(count_N > 0, values_N - mean_N, 0.0)
