"""`MonteCarloReturn`: what was still to come."""

from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.turns_and_groups import (
    Weights,
    check_discount,
    finished,
    one_per_turn,
    returns_to_go,
    turn_rewards,
)
from ludic.types import Rollout


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
