"""`GAE`: generalised advantage estimation over turns (Schulman et al. 2016, arXiv:1506.02438).

Where the values come from (a value head, a table, a constant) is the caller's business: `value_fn` is any function
of a rollout. Nothing here touches tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ludic.training.credit_assignment.grouping import (
    Floats,
    Weights,
    check_discount,
    finished,
    is_truncated,
    one_per_turn,
    same_on_every_step,
    turn_rewards,
)
from ludic.training.value_tracker import BetaValueTracker
from ludic.types import Rollout, prompt_key

ValueFn: TypeAlias = Callable[[Rollout], Sequence[float] | Floats]
"""The value of the state before each turn; for a truncated episode, also the value of the state it was cut off in."""


def gae(
    rewards: Sequence[float] | Floats,
    values: Sequence[float] | Floats,
    *,
    gamma: float,
    lam: float,
    bootstrap: float = 0.0,
) -> Floats:
    """A_t = d_t + gamma * lam * A_{t+1}, where d_t = r_t + gamma * V_{t+1} − V_t.

    `bootstrap` is the value after the last turn: 0 when the episode is over, V of what would have followed when it
    was cut off.
    """
    if len(values) != len(rewards):
        raise ValueError(
            f"gae got {len(rewards)} rewards and {len(values)} values; there must be one value per reward."
        )
    advantages = np.zeros(len(rewards), dtype=np.float64)
    value_after, advantage_after = bootstrap, 0.0
    for t in reversed(range(len(rewards))):
        surprise = rewards[t] + gamma * value_after - values[t]
        advantage_after = advantages[t] = surprise + gamma * lam * advantage_after
        value_after = values[t]
    return advantages


@dataclass(frozen=True, slots=True)
class GAE:
    """The advantage of each turn over what the values expected, smoothed over the turns that follow."""

    gamma: float
    """Discount per turn."""
    lam: float
    """1 trusts the rewards (all variance), 0 trusts the values one turn ahead (all bias)."""
    value_fn: ValueFn
    """One value per turn, and for a truncated episode one more: the value of the state in which it was cut off."""

    def __post_init__(self) -> None:
        check_discount("GAE", "gamma", self.gamma)
        check_discount("GAE", "lam", self.lam)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        for rollout in finished(rollouts):
            advantages_T, _ = self._estimate(rollout)
            weights |= one_per_turn(rollout, advantages_T)
        return weights

    def value_targets(self, rollouts: Sequence[Rollout]) -> Weights:
        """What the values should have been, A_t + V_t: the regression target of a value head."""
        targets: Weights = {}
        for rollout in finished(rollouts):
            advantages_T, values_T = self._estimate(rollout)
            targets |= one_per_turn(rollout, advantages_T + values_T)
        return targets

    def _estimate(self, rollout: Rollout) -> tuple[Floats, Floats]:
        rewards_T = turn_rewards(rollout)
        values_T, bootstrap = self._values(rollout, len(rewards_T))
        return gae(rewards_T, values_T, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap), values_T

    def _values(self, rollout: Rollout, num_turns: int) -> tuple[Floats, float]:
        if num_turns == 0:
            return np.zeros(0), 0.0
        cut_off = is_truncated(rollout)
        values = np.asarray(self.value_fn(rollout), dtype=np.float64)
        if values.shape != (num_turns + cut_off,):
            wanted = "one more for the state it was cut off in (0.0 if running out of time is a failure of the task)"
            raise ValueError(
                f"GAE.value_fn gave values of shape {values.shape} for rollout {rollout.id!r}, which has {num_turns} "
                f"turns and was {'' if cut_off else 'not '}truncated. Return one value per turn"
                f"{', and ' + wanted if cut_off else ''}."
            )
        return values[:num_turns], float(values[-1]) if cut_off else 0.0


# `TrackedValueReturn`: better or worse than this prompt went before (SPO).


def prompt_of(rollout: Rollout) -> str:
    return prompt_key(rollout.request_meta)


@dataclass(frozen=True, slots=True)
class TrackedValueReturn:
    """Total reward minus the value that the tracker had for the prompt *before* this batch, the same on every step.

    A value that had already counted the rollout's own reward would depend on the action and shrink the gradient of
    prompts that are seen rarely. So all values of a batch are read first, and only then are its rewards counted.
    """

    tracker: BetaValueTracker
    key: Callable[[Rollout], str] = prompt_of
    """Which value is a rollout's. Roles of one episode share their prompt's; give each its own where they differ."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        weights: Weights = {}
        members = [(self.key(rollout), rollout) for rollout in finished(rollouts)]
        for key, rollout in members:
            weights |= same_on_every_step(rollout, rollout.total_reward - self.tracker.value_of(key))
        for key, rollout in members:
            self.tracker.observe(key, rollout.total_reward)
        return weights

    def initialise(self, rollouts: Sequence[Rollout]) -> None:
        """First values, from some rollouts of each prompt that were played before training."""
        rewards: dict[str, list[float]] = {}
        for rollout in finished(rollouts):
            rewards.setdefault(self.key(rollout), []).append(rollout.total_reward)
        for key, own in rewards.items():
            self.tracker.initialise(key, own)

    def notify_drift(self, kl: float) -> None:
        self.tracker.notify_drift(kl)

    def state_dict(self) -> dict[str, Any]:
        return self.tracker.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tracker.load_state_dict(state)
