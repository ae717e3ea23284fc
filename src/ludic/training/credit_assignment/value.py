"""Better or worse than an expected value: GAE over turns, and a tracked value per prompt (SPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
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
from ludic.types import ConfigError, Rollout, prompt_key

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
        """Targets of the values, A_t + V_t: the regression target of a value head."""
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


@dataclass(frozen=True, slots=True)
class _Belief:
    """The belief about one prompt."""

    wins: float
    """Alpha of the Beta distribution."""
    losses: float
    """Beta of the Beta distribution."""
    seen_at: float
    """The tracker's drift when the prompt was last seen."""

    @property
    def mean(self) -> float:
        return self.wins / (self.wins + self.losses)


class BetaValueTracker:
    """Share of episodes that solve each prompt, remembered from one visit to the next; prompts go by a key that never changes.

    Rewards are counted as a Beta distribution counts successes and failures. Before a new reward is added, the old counts shrink
    by rho, the more the further the policy has moved since the prompt was last seen (SPO, arXiv 2509.13232). The trainer reports
    how far each update moved the policy (`notify_drift`); a curriculum reads the values to choose prompts.
    """

    def __init__(
        self,
        *,
        d_half: float = 0.1,
        rho_min: float = 0.875,
        rho_max: float = 0.96,
        low: float = 0.0,
        high: float = 1.0,
    ) -> None:
        """`d_half`: the KL (nats per token) after which old counts are worth half. `rho_min`, `rho_max`: the least and the
        largest share of them that a visit keeps. `low`, `high`: the worst and the best total reward of an episode."""
        if d_half <= 0:
            raise ConfigError(f"BetaValueTracker.d_half={d_half}; it is a KL that halves old counts, so above 0.")
        if not 0 < rho_min <= rho_max < 1:
            raise ConfigError(
                f"BetaValueTracker(rho_min={rho_min}, rho_max={rho_max}); 0 < rho_min <= rho_max < 1 is needed. With 1 no count "
                "would ever shrink."
            )
        if not low < high:
            raise ConfigError(f"BetaValueTracker(low={low}, high={high}); the best reward is above the worst.")
        self.d_half, self.rho_min, self.rho_max = d_half, rho_min, rho_max
        self.low, self.high = low, high
        self.drift = 0.0
        """The distance that the policy has moved since the run began: the sum of all updates' KL."""
        self._beliefs: dict[str, _Belief] = {}

    @property
    def initial_count(self) -> float:
        """The weight of a first estimate: as much as the shortest memory can hold, 1 + rho_min + rho_min² + …"""
        return 1 / (1 - self.rho_min)

    def __len__(self) -> int:
        return len(self._beliefs)

    # --- what is known ---

    def success_of(self, key: str) -> float:
        """The prompt's value between 0 (always `low`) and 1 (always `high`); one half where nothing is known."""
        return self._belief(key).mean

    def value_of(self, key: str) -> float:
        """The total reward to expect of the prompt."""
        return self.low + (self.high - self.low) * self.success_of(key)

    def rho_of(self, key: str) -> float:
        """The share of its counts that the prompt's next visit keeps: 2^(−KL / d_half), within its bounds."""
        kept: float = 2 ** (-(self.drift - self._belief(key).seen_at) / self.d_half)
        return min(max(kept, self.rho_min), self.rho_max)

    def _belief(self, key: str) -> _Belief:
        return self._beliefs.get(key) or _Belief(1.0, 1.0, self.drift)

    # --- what is learned ---

    def initialise(self, key: str, rewards: Sequence[float]) -> None:
        """Begin with the mean of these rewards, counted `initial_count` times; earlier counts are dropped."""
        if not rewards:
            raise ConfigError(
                f"BetaValueTracker.initialise({key!r}) needs at least one reward; without any, leave it out."
            )
        share = fmean(self._share(key, reward) for reward in rewards)
        count = self.initial_count
        self._beliefs[key] = _Belief(count * share, count * (1 - share), self.drift)

    def observe(self, key: str, reward: float) -> None:
        """Shrink the old counts, then count this reward. Read the value before: afterwards it depends on the reward."""
        share, rho, known = self._share(key, reward), self.rho_of(key), self._belief(key)
        self._beliefs[key] = _Belief(rho * known.wins + share, rho * known.losses + 1 - share, self.drift)

    def notify_drift(self, kl: float) -> None:
        """An update has moved the policy by this KL (nats per token)."""
        self.drift += max(kl, 0.0)

    def _share(self, key: str, reward: float) -> float:
        if not self.low <= reward <= self.high:
            raise ConfigError(
                f"Prompt {key!r} earned {reward}, but the tracker is for total rewards from {self.low} to {self.high}, penalties "
                f"of a parser included. Give the range of the env: --algo-set low={min(reward, self.low):g} (or high=…) for ludic "
                "train, BetaValueTracker(low=…, high=…) in code."
            )
        return (reward - self.low) / (self.high - self.low)

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        beliefs = {key: [known.wins, known.losses, known.seen_at] for key, known in self._beliefs.items()}
        return {"drift": self.drift, "beliefs": beliefs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drift = state["drift"]
        self._beliefs = {key: _Belief(*counts) for key, counts in state["beliefs"].items()}


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
