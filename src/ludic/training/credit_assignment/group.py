"""Better or worse than the siblings of the group (GRPO, MaxRL, GDPO, ScaleRL, RLOO), or than the role's average (SPIRAL)."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeAlias

import numpy as np

from ludic.training.credit_assignment.grouping import (
    EPS,
    GroupRule,
    Weights,
    compared,
    compared_totals,
    finished,
    same_on_every_step,
)
from ludic.types import ConfigError, Rollout, scores_of, spread_of


@dataclass(frozen=True, slots=True)
class GroupNormalizedReturn(GroupRule):
    """Total reward minus the mean of the group, the same on every step (GRPO).

    With `normalize_adv` it is also divided by the group's own spread, which favours prompts on which all rollouts are
    nearly alike; Dr. GRPO leaves that out.
    """

    normalize_adv: bool = False
    """Divide by the population standard deviation of the group (plus 1e-8); differences that are mere rounding count as none."""
    positive_only: bool = False
    """Set what is below the mean to 0, after the division, so that the scale does not depend on it."""

    def _compare(self, members: list[Rollout]) -> Weights:
        advantages_G = compared_totals(members, scaled=self.normalize_adv)
        return same_on_every_step(members, np.maximum(advantages_G, 0.0) if self.positive_only else advantages_G)


@dataclass(frozen=True, slots=True)
class MaximumLikelihoodReturn(GroupRule):
    """(R − mean of the group) / mean of the group, the same on every step (MaxRL, arXiv:2602.02710).

    For rewards of 0 and 1, with success rate p, the mean gradient over groups of G is that of the series of log p up to order
    G − 1, −Σ_k (1 − p)^k / k: prompts that are rarely solved count more. A total below 0 counts as 0. A group in which
    all earn 0 gets 0.
    """

    def _compare(self, members: list[Rollout]) -> Weights:
        totals_G = np.maximum([rollout.total_reward for rollout in members], 0.0)
        mean = totals_G.mean()
        centred_G = compared(totals_G, made_of=totals_G, scaled=False)
        return same_on_every_step(members, centred_G / mean if mean else centred_G)


@dataclass(frozen=True, slots=True)
class ComponentNormalizedReturn(GroupRule):
    """Σ_k w_k · (r_k − mean of the group) / (its std + 1e-8) over the reward components k, the same on every step (GDPO).

    GRPO adds components up before it divides, so those with a large spread drown the others, and different combinations with
    equal totals get equal credit. The weights are those of `ludic.rewards.Rewards`: a component is divided by the spread of its
    score before the weight. A component that a rollout does not have counts as 0, as it does in the total.
    """

    weights: Mapping[str, float] = field(default_factory=dict)
    """Further factors by component, or by the name before its "/"; 1 if not given. For components that no `Rewards` weighted."""

    def _compare(self, members: list[Rollout]) -> Weights:
        components = [rollout.reward_components for rollout in members]
        scores = [rollout.scores for rollout in members]
        advantages_G = np.zeros(len(members))
        for name in dict.fromkeys(name for own in components for name in own):
            weighted_G = np.array([own.get(name, 0.0) for own in components])
            scores_G = [own.get(name, 0.0) for own in scores]
            parts = [scores_of(step).get(name, 0.0) for rollout in members for step in rollout.steps]
            if spread := spread_of(scores_G, parts):
                factor = self.weights.get(name, self.weights.get(name.split("/")[0], 1.0))
                advantages_G += factor * (weighted_G - weighted_G.mean()) / (spread + EPS)
        return same_on_every_step(members, advantages_G)


@dataclass(frozen=True, slots=True)
class HybridNormalizedReturn(GroupRule):
    """(R − mean of the group) / (spread of those differences over the whole batch + eps), the same on every step (ScaleRL).

    One scale for all prompts: dividing by each group's own spread would magnify groups whose rollouts are nearly alike.
    """

    eps: float = 1e-8
    positive_only: bool = False
    """Set what is below the mean to 0, after the division."""

    def __post_init__(self) -> None:
        GroupRule.__post_init__(self)
        if not self.eps > 0:
            raise ConfigError(
                f"HybridNormalizedReturn.eps={self.eps}; it must be positive, a batch may have no spread."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        groups = self._groups(rollouts)
        if not groups:
            return {}
        advantages = np.concatenate([compared_totals(members, scaled=False) for members in groups])
        advantages = advantages / (advantages.std() + self.eps)
        members = [rollout for group in groups for rollout in group]
        return same_on_every_step(members, np.maximum(advantages, 0.0) if self.positive_only else advantages)


@dataclass(frozen=True, slots=True)
class LeaveOneOutReturn(GroupRule):
    """Total reward minus the mean of the *other* rollouts of the group, the same on every step (RLOO).

    The baseline does not depend on the rollout that it is subtracted from, so the gradient is unbiased at any group
    size; the plain group mean shrinks it by (G − 1)/G.
    """

    def _compare(self, members: list[Rollout]) -> Weights:
        rewards, num_others = [rollout.total_reward for rollout in members], len(members) - 1
        total = sum(rewards)
        return same_on_every_step(members, [r - (total - r) / num_others if num_others else 0.0 for r in rewards])


RoleFn: TypeAlias = Callable[[Rollout], str]
"""The role of a rollout; each role has one baseline."""


def agent_in_env(rollout: Rollout) -> str:
    """One role per env, agent id and delegate."""
    parts = [rollout.env_name, rollout.agent_id, rollout.delegate]
    return "/".join(str(part) for part in parts if part is not None)


@dataclass(slots=True)
class RoleBaselineReturn:
    """Total reward minus a running mean of the role's total rewards, the same on every step.

    For self-play without groups (SPIRAL, arXiv:2506.24119). The side that moves first may win more often, so each role has its
    own baseline. A batch is compared with the batches before it and only then counted: the baseline does not depend on the
    actions that it is subtracted from, and the gradient is unbiased at any number of games per batch. (SPIRAL counts first.)
    The mean is part of a checkpoint. It belongs to the process that assigns credit: each actor of a pipeline keeps its own.
    """

    decay: float = 0.95
    """Share of the mean that is kept per batch in which the role occurs."""
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
        kept = finished(rollouts)
        roles = [self.role_of(rollout) for rollout in kept]
        pairs = list(zip(roles, [rollout.total_reward for rollout in kept], strict=True))
        weights = same_on_every_step(kept, [reward - self.baseline(role) for role, reward in pairs])
        for role in dict.fromkeys(roles):
            self._count(role, fmean(reward for other, reward in pairs if other == role))
        return weights

    def _count(self, role: str, mean: float) -> None:
        """Sum and mass decay alike, so that the first batches are not pulled towards 0."""
        self._sums[role] = self.decay * self._sums.get(role, 0.0) + (1.0 - self.decay) * mean
        self._masses[role] = self.decay * self._masses.get(role, 0.0) + (1.0 - self.decay)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(self._sums), "masses": dict(self._masses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sums, self._masses = dict(state["sums"]), dict(state["masses"])


def learnability(solved: float, *, target: float = 0.5) -> float:
    """1 for a task whose attempts are solved at the rate `target`, falling in a line to 0 at the rate furthest from it."""
    if not (0 <= solved <= 1 and 0 < target < 1):
        raise ConfigError(f"learnability(solved={solved}, target={target}); both are rates, the target not 0 or 1.")
    return 1.0 - abs(solved - target) / max(target, 1 - target)


@dataclass(frozen=True, slots=True)
class ProposerSolverReturn:
    """Total reward minus the mean, over the spread, of those that can be compared; the same on every step.

    Solvers: the attempts at one task, which are the other rollouts of the proposer's episode. An attempt that is alone in its
    episode is at a task of a dataset and compared in its group. Proposers: the proposals of one group, or of the batch if
    requests have no group. A trainer of a single role works as well.
    """

    group_size: int | None = None
    """Episodes of a request; groups of any size are taken."""
    proposer: str = "proposer"
    """The agent id that proposes."""
    normalize_adv: bool = True

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        sizes: dict[str, int] = {}
        for rollout in kept:
            sizes[_episode(rollout)] = sizes.get(_episode(rollout), 0) + 1
        teams: dict[Hashable, list[Rollout]] = {}
        for rollout in kept:
            group: Hashable = rollout.group
            if rollout.agent_id == self.proposer:
                key: Hashable = ("proposals", group)
            else:
                is_alone = sizes[_episode(rollout)] == 1 and group is not None
                key = ("group", group) if is_alone else ("episode", _episode(rollout))
            teams.setdefault(key, []).append(rollout)
        weights: Weights = {}
        for members in teams.values():
            weights |= same_on_every_step(members, compared_totals(members, scaled=self.normalize_adv))
        return weights


def _episode(rollout: Rollout) -> str:
    return rollout.episode_run or rollout.id
