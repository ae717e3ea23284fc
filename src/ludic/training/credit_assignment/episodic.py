"""`EpisodicReturn`: the whole episode's reward, everywhere."""

from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.turns_and_groups import Weights, finished, same_on_every_step
from ludic.types import Rollout


@dataclass(frozen=True, slots=True)
class EpisodicReturn:
    """Every step gets the rollout's total reward, with no baseline: raw REINFORCE on outcomes."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in finished(rollouts):
            weights |= same_on_every_step(rollout, rollout.total_reward)
        return weights
