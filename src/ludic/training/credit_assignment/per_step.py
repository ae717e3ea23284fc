"""`PerStepReward`: the immediate reward, and nothing of what came later."""

from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.turns_and_groups import Weights, finished
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class PerStepReward:
    """Every step gets its own reward.

    A reply that reached the env has its reward on the env step and 0 on the agent step; a sample made of a whole turn
    takes the weight of the turn's last step. For what a turn earned in all, use `MonteCarloReturn(gamma=0.0)`.
    """

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {(r.id, step.index): float(step.reward) for r in finished(rollouts) for step in r.steps}
