"""Returns over turns and comparisons within groups: what the credit rules share.

Turns are `Rollout.turns()`, groups are those of `GroupKey`: the rollouts of one role from one starting point
(`GRPORequestStrategy` gives them one group id). Failed rollouts belong to no group and get no weight.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ludic.types import ConfigError, GroupKey, Rollout, RolloutStepKey, spread_of

Floats = npt.NDArray[np.float64]
Weights = dict[RolloutStepKey, float]
"""What a credit rule returns: one number per step."""


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
    """The size of the largest reward from turn t on: what the rounding of G_t depends on."""
    return np.maximum.accumulate(np.abs(rewards)[::-1])[::-1]


def is_truncated(rollout: Rollout) -> bool:
    """True when a limit cut the episode off, so that more could have followed."""
    if rollout.stop is not None:
        return rollout.stop.is_truncation
    return bool(rollout.steps) and rollout.steps[-1].truncated


# --- groups ---------------------------------------------------------------------------------------------------


def finished(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """All but the failed ones. Weights are filed under rollout ids, so two rollouts must not share one."""
    kept = [rollout for rollout in rollouts if rollout.failure is None]
    if len({rollout.id for rollout in kept}) < len(kept):
        ids = [rollout.id for rollout in kept]
        twice = sorted({id for id in ids if ids.count(id) > 1})
        raise ValueError(f"Rollout ids must be unique, but {twice[:3]} occur more than once. Was a file loaded twice?")
    return kept


def group_key(rollout: Rollout) -> GroupKey:
    if rollout.group is None:
        raise ValueError(
            f"Rollout {rollout.id!r} has no group: meta['request_meta']['group_id'] is missing (its meta has "
            f"{sorted(rollout.meta)}). Expand requests with GRPORequestStrategy(group_size=…), or use a credit rule "
            "without groups, such as MonteCarloReturn."
        )
    return rollout.group


def rollouts_by_group(
    rollouts: Sequence[Rollout], *, group_size: int | None, allow_partial: bool
) -> dict[GroupKey, list[Rollout]]:
    """Finished rollouts by group, in the order they came. `group_size=None` expects no particular size."""
    groups: dict[GroupKey, list[Rollout]] = {}
    for rollout in finished(rollouts):
        groups.setdefault(group_key(rollout), []).append(rollout)
    if group_size is not None and not allow_partial:
        for key, members in groups.items():
            _check_size(key, len(members), group_size)
    return groups


def _check_size(key: GroupKey, size: int, group_size: int) -> None:
    if size != group_size:
        role = f"agent {key.agent_id!r}" + (f" (delegate {key.delegate!r})" if key.delegate else "")
        raise ValueError(
            f"Group {key.group_id!r} of {role} has {size} finished rollouts, but group_size={group_size}. Use the same "
            "group_size in GRPORequestStrategy and let the engine drop incomplete groups, or pass allow_partial=True."
        )


EPS = 1e-8
"""Added to a standard deviation that is divided by."""


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


def same_on_every_step(rollout: Rollout, weight: float) -> Weights:
    return {(rollout.id, step.index): float(weight) for step in rollout.steps}


def one_per_turn(rollout: Rollout, weights: Sequence[float] | Floats) -> Weights:
    """Every step of a turn gets the turn's weight."""
    pairs = zip(rollout.turns(), weights, strict=True)
    return {(rollout.id, step.index): float(weight) for turn, weight in pairs for step in turn.steps}


# --- settings -------------------------------------------------------------------------------------------------


def check_discount(rule: str, name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ConfigError(f"{rule}.{name}={value}; it must be between 0 and 1.")


def check_group_size(rule: str, group_size: int) -> None:
    if group_size < 2:
        raise ConfigError(
            f"{rule}.group_size={group_size}, but comparing siblings takes at least 2 rollouts. Raise it, or use "
            "EpisodicReturn, which needs no group."
        )
