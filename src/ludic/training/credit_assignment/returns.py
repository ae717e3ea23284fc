"""Rules without a baseline: returns, rewards and constants."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.grouping import (
    Weights,
    check_discount,
    finished,
    one_per_turn,
    returns_to_go,
    same_on_every_step,
    turn_rewards,
)
from ludic.types import ConfigError, Rollout


@dataclass(frozen=True, slots=True)
class MonteCarloReturn:
    """The return-to-go of the step's turn: G_t = r_t + gamma * G_{t+1}, where t counts turns.

    r_t is everything earned in turn t. The discount counts turns, not steps, so a tool loop of five model calls discounts the
    future no more than a single call does.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_discount(self, gamma=self.gamma)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        return one_per_turn(kept, [returns_to_go(turn_rewards(rollout), self.gamma) for rollout in kept])


@dataclass(frozen=True, slots=True)
class ConstantCredit:
    """One number on every step, whatever was earned: supervised fine-tuning on rollouts."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"ConstantCredit.value={self.value}; a weight must be finite.")

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        return same_on_every_step(kept, [self.value] * len(kept))


@dataclass(frozen=True, slots=True)
class EpisodicReturn:
    """Every step gets the rollout's total reward, with no baseline: raw REINFORCE on outcomes."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        return same_on_every_step(kept, [rollout.total_reward for rollout in kept])


@dataclass(frozen=True, slots=True)
class PerStepReward:
    """Every step gets its own reward and nothing of what comes later.

    A reply that reached the env has its reward on the env step and 0 on the agent step; a sample made of a whole turn
    takes the weight of the turn's last step. For what a turn earned in all, use `MonteCarloReturn(gamma=0.0)`.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {(r.id, step.index): float(step.reward) for r in finished(rollouts) for step in r.steps}
