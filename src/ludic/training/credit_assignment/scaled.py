"""`ScaledCredit`: the weights of another rule times a number, where credit of several kinds is added up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ludic.training.credit_assignment.turns_and_groups import Weights
from ludic.types import ConfigError, CreditAssigner, Rollout


@dataclass(frozen=True, slots=True)
class ScaledCredit:
    """coeff · weight on every step."""

    inner: CreditAssigner
    coeff: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coeff):
            raise ConfigError(f"ScaledCredit.coeff={self.coeff}; a weight must be finite.")

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {step: self.coeff * weight for step, weight in self.inner.compute(rollouts).items()}
