"""`GroupNormalizedReturn`: better or worse than one's siblings (GRPO, Dr. GRPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from ludic.training.credit_assignment.grouping import (
    Weights,
    check_group_size,
    compared_totals,
    finished,
    rollouts_by_group,
    same_on_every_step,
)
from ludic.types import ConfigError, Rollout


@dataclass(frozen=True, slots=True)
class GroupNormalizedReturn:
    """Total reward minus the mean of the group, the same on every step.

    With `normalize_adv` it is also divided by the group's own spread, which favours prompts on which all rollouts are
    nearly alike; Dr. GRPO leaves that out.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    normalize_adv: bool = False
    """Divide by the population standard deviation of the group (plus 1e-8); differences that are mere rounding count as none."""
    positive_only: bool = False
    """Set what is below the mean to 0, after the division, so that the scale does not depend on it."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        check_group_size("GroupNormalizedReturn", self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            for rollout, advantage in zip(members, self._advantages(members), strict=True):
                weights |= same_on_every_step(rollout, advantage)
        return weights

    def _advantages(self, members: Sequence[Rollout]) -> list[float]:
        advantages_G = compared_totals(members, scaled=self.normalize_adv)
        if self.positive_only:
            advantages_G = np.maximum(advantages_G, 0.0)
        return [float(a) for a in advantages_G]


# `HybridNormalizedReturn`: centred on the group, scaled by the batch (ScaleRL).


@dataclass(frozen=True, slots=True)
class HybridNormalizedReturn:
    """(R − mean of the group) / (spread of those differences over the whole batch + eps), the same on every step.

    One scale for all prompts: a group whose rollouts are nearly alike is not blown up, as dividing by its own spread
    would do.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    eps: float = 1e-8
    positive_only: bool = False
    """Set what is below the mean to 0, after the division."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising."""

    def __post_init__(self) -> None:
        check_group_size("HybridNormalizedReturn", self.group_size)
        if not self.eps > 0:
            raise ConfigError(
                f"HybridNormalizedReturn.eps={self.eps}; it must be positive, a batch may have no spread."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        members = [rollout for group in groups.values() for rollout in group]
        if not members:
            return {}
        advantages = np.concatenate([compared_totals(group, scaled=False) for group in groups.values()])
        advantages = advantages / (advantages.std() + self.eps)
        if self.positive_only:
            advantages = np.maximum(advantages, 0.0)
        weights: Weights = {}
        for rollout, advantage in zip(members, advantages, strict=True):
            weights |= same_on_every_step(rollout, advantage)
        return weights


# `LeaveOneOutReturn`: compared with the others only (RLOO).


@dataclass(frozen=True, slots=True)
class LeaveOneOutReturn:
    """Total reward minus the mean of the *other* rollouts of the group, the same on every step.

    The baseline does not depend on the rollout that it is subtracted from, so the gradient is unbiased at any group
    size; the plain group mean shrinks it by (G − 1)/G.
    """

    group_size: int
    """Rollouts per group; the request strategy uses the same number."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising. One rollout alone has no baseline and gets 0."""

    def __post_init__(self) -> None:
        check_group_size("LeaveOneOutReturn", self.group_size)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        groups = rollouts_by_group(rollouts, group_size=self.group_size, allow_partial=self.allow_partial)
        for members in groups.values():
            total = sum(rollout.total_reward for rollout in members)
            for rollout in members:
                weights |= same_on_every_step(rollout, _against_others(rollout.total_reward, total, len(members)))
        return weights


def _against_others(reward: float, total: float, size: int) -> float:
    return reward - (total - reward) / (size - 1) if size > 1 else 0.0


# `RoleBaselineReturn`: what a role usually earns, for self-play without groups (SPIRAL, arXiv:2506.24119).
# In a game of two sides the one who begins may win more often, whatever it does. One baseline for both would praise
# every move of one side and blame every move of the other; here each role is measured by its own past.

RoleFn: TypeAlias = Callable[[Rollout], str]
"""Who is measured by one baseline."""


def agent_in_env(rollout: Rollout) -> str:
    """One role per env, agent id and delegate."""
    parts = [rollout.env_name, rollout.agent_id, rollout.delegate]
    return "/".join(str(part) for part in parts if part is not None)


@dataclass(slots=True)
class RoleBaselineReturn:
    """Total reward minus a running mean of the role's total rewards, the same on every step.

    A batch is measured by the batches before it and only then counted, so the baseline knows nothing of the actions
    that it is subtracted from: the gradient is unbiased, at any number of games per batch. (SPIRAL counts first.)
    The mean is part of a checkpoint. It belongs to the process that assigns credit: each actor of a pipeline keeps its own.
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
