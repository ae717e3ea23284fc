"""`MonteCarloReturn`: what was still to come."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.training.credit_assignment.grouping import (
    Weights,
    check_discount,
    finished,
    one_per_turn,
    returns_to_go,
    same_on_every_step,
    turn_rewards,
)
from ludic.types import ConfigError, CreditAssigner, FollowsDrift, Rollout, Stateful


@dataclass(frozen=True, slots=True)
class MonteCarloReturn:
    """The return-to-go of the step's turn: G_t = r_t + gamma * G_{t+1}, where t counts turns.

    r_t is everything earned in turn t. Discounting per turn and not per step means that a tool loop of five model
    calls makes the future no more distant than a single call does.
    """

    gamma: float = 1.0

    def __post_init__(self) -> None:
        check_discount("MonteCarloReturn", "gamma", self.gamma)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in finished(rollouts):
            weights |= one_per_turn(rollout, returns_to_go(turn_rewards(rollout), self.gamma))
        return weights


# `ConstantCredit`: everything that was done counts alike.


@dataclass(frozen=True, slots=True)
class ConstantCredit:
    """One number on every step: supervised fine-tuning on rollouts, where rewards play no part."""

    value: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ConfigError(f"ConstantCredit.value={self.value}; a weight must be finite.")

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in finished(rollouts):
            weights |= same_on_every_step(rollout, self.value)
        return weights


# `EpisodicReturn`: the whole episode's reward, everywhere.


@dataclass(frozen=True, slots=True)
class EpisodicReturn:
    """Every step gets the rollout's total reward, with no baseline: raw REINFORCE on outcomes."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in finished(rollouts):
            weights |= same_on_every_step(rollout, rollout.total_reward)
        return weights


# `PerStepReward`: the immediate reward, and nothing of what came later.


@dataclass(frozen=True, slots=True)
class PerStepReward:
    """Every step gets its own reward.

    A reply that reached the env has its reward on the env step and 0 on the agent step; a sample made of a whole turn
    takes the weight of the turn's last step. For what a turn earned in all, use `MonteCarloReturn(gamma=0.0)`.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {(r.id, step.index): float(step.reward) for r in finished(rollouts) for step in r.steps}


# `ScaledCredit`: the weights of another rule times a number, where credit of several kinds is added up.


@dataclass(frozen=True, slots=True)
class ScaledCredit:
    """coeff · weight on every step. What the inner rule remembers is saved with it."""

    inner: CreditAssigner
    coeff: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coeff):
            raise ConfigError(f"ScaledCredit.coeff={self.coeff}; a weight must be finite.")
        if isinstance(self.inner, FollowsDrift):
            raise ConfigError(
                f"ScaledCredit(inner={type(self.inner).__name__}): this rule must hear from the trainer how far the policy "
                "moved, and would not through ScaledCredit. Use a rule that does not, such as GroupNormalizedReturn."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {step: self.coeff * weight for step, weight in self.inner.compute(rollouts).items()}

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict()} if isinstance(self.inner, Stateful) else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(self.inner, Stateful):
            self.inner.load_state_dict(state["inner"])
