"""`RoleBaselineReturn`: what a role usually earns, for self-play without groups (SPIRAL, arXiv:2506.24119).

In a game of two sides the one who begins may win more often, whatever it does. One baseline for both would praise
every move of one side and blame every move of the other; here each role is measured by its own past.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

from ludic.training.credit_assignment.turns_and_groups import Weights, finished, same_on_every_step
from ludic.types import ConfigError, Rollout

RoleFn: TypeAlias = Callable[[Rollout], str]
"""Who is measured by one baseline."""


def agent_in_env(rollout: Rollout) -> str:
    """One role per env, agent id and delegate."""
    parts = [rollout.meta.get(name) for name in ("env_name", "agent_id", "delegate")]
    return "/".join(str(part) for part in parts if part is not None)


@dataclass(slots=True)
class RoleBaselineReturn:
    """Total reward minus a running mean of the role's total rewards, the same on every step.

    A batch is measured by the batches before it and only then counted, so the baseline knows nothing of the actions
    that it is subtracted from: the gradient is unbiased, at any number of games per batch. (SPIRAL counts first.)
    The mean is part of a checkpoint. It belongs to whoever assigns credit: each actor of a pipeline keeps its own.
    """

    decay: float = 0.95
    """How much of the mean is kept per batch in which the role occurs."""
    role_of: RoleFn = agent_in_env
    _sums: dict[str, float] = field(default_factory=dict, init=False, repr=False)
    _masses: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ConfigError(f"RoleBaselineReturn.decay={self.decay}; it must be at least 0 and below 1.")

    def baseline(self, role: str) -> float:
        """0 for a role that has never been seen."""
        return self._sums[role] / self._masses[role] if role in self._sums else 0.0

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        earned: dict[str, list[float]] = {}
        for rollout in finished(rollouts):
            role, reward = self.role_of(rollout), rollout.total_reward
            earned.setdefault(role, []).append(reward)
            weights |= same_on_every_step(rollout, reward - self.baseline(role))
        for role, rewards in earned.items():
            self._count(role, fmean(rewards))
        return weights

    def _count(self, role: str, mean: float) -> None:
        """Sum and mass decay alike, so that the first batches are not pulled towards 0."""
        self._sums[role] = self.decay * self._sums.get(role, 0.0) + (1.0 - self.decay) * mean
        self._masses[role] = self.decay * self._masses.get(role, 0.0) + (1.0 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "masses": dict(self._masses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._masses = dict(state["sums"]), dict(state["masses"])
