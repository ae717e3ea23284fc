"""`ConstantCredit`: everything that was done counts alike."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.turns_and_groups import Weights, finished, same_on_every_step
from ludic.types import ConfigError, Rollout


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
