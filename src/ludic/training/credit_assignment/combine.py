"""Rules made of other rules: the weights of one times a number, or a rule for each objective."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.training.credit_assignment.grouping import Weights
from ludic.types import ConfigError, CreditAssigner, FollowsDrift, Rollout, Stateful


class RuleOfRules(ABC):
    """Saves the state of its inner rules, and refuses those that the trainer must tell how far the policy moved."""

    __slots__ = ()

    @abstractmethod
    def _rules(self) -> Mapping[str, CreditAssigner]:
        """Name → inner rule."""

    def _refuse_drift(self) -> None:
        for name, rule in self._rules().items():
            if isinstance(rule, FollowsDrift):
                raise ConfigError(
                    f"{type(self).__name__} has {name}={type(rule).__name__}(…): the trainer tells this rule how far the policy "
                    "moved, but cannot reach it there. Train with that rule alone, or use one without a tracker, such as "
                    "GroupNormalizedReturn."
                )

    def state_dict(self) -> dict[str, Any]:
        return {name: rule.state_dict() for name, rule in self._rules().items() if isinstance(rule, Stateful)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, rule in self._rules().items():
            if isinstance(rule, Stateful) and name in state:
                rule.load_state_dict(state[name])


@dataclass(frozen=True, slots=True)
class ScaledCredit(RuleOfRules):
    """coeff · weight on every step, where credit of several kinds is added up."""

    inner: CreditAssigner
    coeff: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.coeff):
            raise ConfigError(f"ScaledCredit.coeff={self.coeff}; a weight must be finite.")
        self._refuse_drift()

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {step: self.coeff * weight for step, weight in self.inner.compute(rollouts).items()}

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return {"inner": self.inner}


class RoutedCredit(RuleOfRules):
    """The rule of the objective that a rollout's request names; siblings are only compared within one objective."""

    def __init__(self, assigners: Mapping[str, CreditAssigner], *, default: str | None = None) -> None:
        """`default`: the objective of rollouts that name none."""
        if default is not None and default not in assigners:
            raise ConfigError(f"default={default!r}; there are the objectives {', '.join(assigners)}.")
        self.assigners, self.default = dict(assigners), default
        self._refuse_drift()

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        members: dict[str, list[Rollout]] = {}
        for rollout in rollouts:
            members.setdefault(self._objective(rollout), []).append(rollout)
        return {
            key: weight for name, own in members.items() for key, weight in self.assigners[name].compute(own).items()
        }

    def _objective(self, rollout: Rollout) -> str:
        name = rollout.objective or self.default
        if name is None or name not in self.assigners:
            raise ConfigError(
                f"Rollout {rollout.id} has the objective {name!r}; there are {', '.join(self.assigners)}. Name one in "
                'RolloutRequest(meta={"objective": …}), or give each source the algorithm for its objective.'
            )
        return name

    def _rules(self) -> Mapping[str, CreditAssigner]:
        return self.assigners
