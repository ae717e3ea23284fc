"""Returns over turns and comparisons within groups: what the credit rules share.

Turns are `Rollout.turns()`, groups are those of `GroupKey`: the rollouts of one role from one starting point
(`GRPORequestStrategy` gives them one group id). Failed rollouts belong to no group and get no weight.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ludic.types import ConfigError, GroupKey, Rollout, RolloutStepKey, spread_of

Floats = npt.NDArray[np.float64]
Weights = dict[RolloutStepKey, float]
"""The result of a credit rule: one number per step."""

EPS = 1e-8
"""Added to a standard deviation that is divided by."""

# --- turns ----------------------------------------------------------------------------------------------------


def turn_rewards(rollout: Rollout) -> Floats:
    return np.array([turn.reward for turn in rollout.turns()], dtype=np.float64)


def returns_to_go(rewards: Sequence[float] | Floats, gamma: float) -> Floats:
    """G_t = r_t + gamma * G_{t+1}, with nothing after the last."""
    returns = np.zeros(len(rewards), dtype=np.float64)
    after = 0.0
    for t in reversed(range(len(rewards))):
        after = returns[t] = rewards[t] + gamma * after
    return returns


def largest_to_go(rewards: Floats) -> Floats:
    """The largest absolute reward from turn t on, which bounds the rounding error of G_t."""
    return np.maximum.accumulate(np.abs(rewards)[::-1])[::-1]


def is_truncated(rollout: Rollout) -> bool:
    """True when a limit cut the episode off, so that more could have followed."""
    if rollout.stop is not None:
        return rollout.stop.is_truncation
    return bool(rollout.steps) and rollout.steps[-1].truncated


# --- groups ---------------------------------------------------------------------------------------------------


def finished(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """All but the failed ones. Weights are keyed by rollout id, so two rollouts must not share one."""
    kept = [rollout for rollout in rollouts if rollout.failure is None]
    ids = [rollout.id for rollout in kept]
    if len(set(ids)) < len(ids):
        twice = sorted({id for id in ids if ids.count(id) > 1})
        raise ValueError(f"Rollout ids must be unique, but {twice[:3]} occur more than once. Was a file loaded twice?")
    return kept


@dataclass(frozen=True, slots=True)
class GroupRule:
    """A rule that compares the finished rollouts of each group with each other."""

    group_size: int | None
    """Rollouts per group, the same number as in the request strategy; None takes groups of any size."""
    allow_partial: bool = field(default=False, kw_only=True)
    """Take groups of any size as they come, instead of raising. A rollout alone in its group gets 0."""

    def __post_init__(self) -> None:
        if self.group_size is not None and self.group_size < 2:
            raise ConfigError(
                f"{type(self).__name__}.group_size={self.group_size}, but comparing siblings takes at least 2 rollouts. Raise "
                "it, or use EpisodicReturn, which needs no group."
            )

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        return {key: weight for members in self._groups(rollouts) for key, weight in self._compare(members).items()}

    def _compare(self, members: list[Rollout]) -> Weights:
        """The weights of one group; not needed where `compute` looks at all groups together."""
        raise NotImplementedError

    def _groups(self, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        groups: dict[GroupKey, list[Rollout]] = {}
        for rollout in finished(rollouts):
            if rollout.group is None:
                raise ValueError(
                    f"Rollout {rollout.id!r} has no group: meta['request_meta']['group_id'] is missing (its meta has "
                    f"{sorted(rollout.meta)}). Expand requests with GRPORequestStrategy(group_size=…), or use a credit rule "
                    "without groups, such as MonteCarloReturn."
                )
            groups.setdefault(rollout.group, []).append(rollout)
        for key, members in groups.items():
            if self.group_size not in (None, len(members)) and not self.allow_partial:
                role = f"agent {key.agent_id!r}" + (f" (delegate {key.delegate!r})" if key.delegate else "")
                has_threads = any(member.is_thread for member in members)
                hint = " Some are threads of one session: wrap the rule in EpisodeCredit." if has_threads else ""
                raise ValueError(
                    f"Group {key.group_id!r} of {role} has {len(members)} finished rollouts, but group_size={self.group_size}. "
                    "Use the same group_size in GRPORequestStrategy and let the engine drop incomplete groups, or pass "
                    f"allow_partial=True.{hint}"
                )
        return list(groups.values())


def compared(values: Sequence[float] | Floats, *, made_of: Sequence[float] | Floats, scaled: bool) -> Floats:
    """Minus the mean, over the standard deviation if `scaled`; 0 where the values differ by no more than rounding."""
    values_N = np.asarray(values, dtype=np.float64)
    spread = spread_of(values_N, made_of)
    if spread == 0.0:
        return np.zeros_like(values_N)
    centred_N = values_N - values_N.mean()
    return centred_N / (spread + EPS) if scaled else centred_N


def compared_totals(members: Sequence[Rollout], *, scaled: bool) -> Floats:
    """`compared` over the total rewards of a group."""
    rewards = [step.reward for rollout in members for step in rollout.steps]
    return compared([rollout.total_reward for rollout in members], made_of=rewards, scaled=scaled)


# --- weights --------------------------------------------------------------------------------------------------


def same_on_every_step(rollouts: Sequence[Rollout], weights: Iterable[float]) -> Weights:
    """One weight per rollout."""
    pairs = zip(rollouts, weights, strict=True)
    return {(rollout.id, step.index): float(weight) for rollout, weight in pairs for step in rollout.steps}


def one_per_turn(rollouts: Sequence[Rollout], weights: Iterable[Sequence[float] | Floats]) -> Weights:
    """One weight per turn of each rollout; every step of the turn gets it."""
    return {
        (rollout.id, step.index): float(weight)
        for rollout, weights_T in zip(rollouts, weights, strict=True)
        for turn, weight in zip(rollout.turns(), weights_T, strict=True)
        for step in turn.steps
    }


def check_discount(rule: object, **values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value <= 1.0:
            raise ConfigError(f"{type(rule).__name__}.{name}={value}; it must be between 0 and 1.")
