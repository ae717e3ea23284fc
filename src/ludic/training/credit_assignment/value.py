"""Better or worse than an expected value: GAE over turns, and a tracked value per prompt (SPO)."""

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
    """Generalised advantage estimation over turns (Schulman et al. 2016, arXiv:1506.02438)."""

    gamma: float
    """Discount per turn."""
    lam: float
    """1 trusts the rewards (all variance), 0 trusts the values one turn ahead (all bias)."""
    value_fn: ValueFn
    """Any function of a rollout: a value head, a table, a constant."""

    def __post_init__(self) -> None:
        check_discount(self, gamma=self.gamma, lam=self.lam)

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        return one_per_turn(kept, [self._estimate(rollout)[0] for rollout in kept])

    def value_targets(self, rollouts: Sequence[Rollout]) -> Weights:
        """What the values should have been, A_t + V_t: the regression target of a value head."""
        kept = finished(rollouts)
        return one_per_turn(kept, [advantages_T + values_T for advantages_T, values_T in map(self._estimate, kept)])

    def _estimate(self, rollout: Rollout) -> tuple[Floats, Floats]:
        """Advantages and values of the turns."""
        rewards_T = turn_rewards(rollout)
        num_turns = len(rewards_T)
        if num_turns == 0:
            return np.zeros(0), np.zeros(0)
        cut_off = is_truncated(rollout)
        values = np.asarray(self.value_fn(rollout), dtype=np.float64)
        if values.shape != (num_turns + cut_off,):
            wanted = "one more for the state it was cut off in (0.0 if running out of time is a failure of the task)"
            raise ValueError(
                f"GAE.value_fn gave values of shape {values.shape} for rollout {rollout.id!r}, which has {num_turns} "
                f"turns and was {'' if cut_off else 'not '}truncated. Return one value per turn"
                f"{', and ' + wanted if cut_off else ''}."
            )
        values_T, bootstrap = values[:num_turns], float(values[-1]) if cut_off else 0.0
        return gae(rewards_T, values_T, gamma=self.gamma, lam=self.lam, bootstrap=bootstrap), values_T


def prompt_of(rollout: Rollout) -> str:
    return prompt_key(rollout.request_meta)


@dataclass(frozen=True, slots=True)
class TrackedValueReturn:
    """Total reward minus the value that the tracker had for the prompt *before* this batch, the same on every step (SPO).

    A value that counted the rollout's own reward would depend on the action and shrink the gradient of prompts that are
    seen rarely. So all values of a batch are read first, and only then are its rewards counted.
    """

    tracker: BetaValueTracker
    key: Callable[[Rollout], str] = prompt_of
    """The key of a rollout's value. Roles of one episode share their prompt's; give each its own where they differ."""

    def compute(self, rollouts: Sequence[Rollout]) -> Weights:
        kept = finished(rollouts)
        pairs = [(self.key(rollout), rollout.total_reward) for rollout in kept]
        weights = same_on_every_step(kept, [reward - self.tracker.value_of(key) for key, reward in pairs])
        for key, reward in pairs:
            self.tracker.observe(key, reward)
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
