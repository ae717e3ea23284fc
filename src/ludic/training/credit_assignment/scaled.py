"""`ScaledCredit`: the weights of another rule times a number, where credit of several kinds is added up."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.training.credit_assignment.turns_and_groups import Weights
from ludic.types import ConfigError, CreditAssigner, FollowsDrift, Rollout, Stateful


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
