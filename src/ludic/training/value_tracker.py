"""`BetaValueTracker`: how often each prompt is solved, remembered from one visit to the next.

A prompt's rewards are counted as a Beta distribution counts successes and failures. Before a new reward is added, the old
counts shrink by rho, the more the further the policy has moved since the prompt was last seen (SPO, arXiv 2509.13232).
The trainer reports how far each update moved the policy (`notify_drift`); a curriculum reads the values to choose prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ludic.types import ConfigError


@dataclass(frozen=True, slots=True)
class _Belief:
    """What is known of one prompt."""

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
    """One value per prompt, under a key that never changes."""

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
                f"BetaValueTracker(rho_min={rho_min}, rho_max={rho_max}); 0 < rho_min <= rho_max < 1 is needed. With 1 "
                "nothing would ever be forgotten."
            )
        if not low < high:
            raise ConfigError(f"BetaValueTracker(low={low}, high={high}); the best reward is above the worst.")
        self.d_half, self.rho_min, self.rho_max = d_half, rho_min, rho_max
        self.low, self.high = low, high
        self.drift = 0.0
        """How far the policy has moved since the run began: the sum of all updates' KL."""
        self._beliefs: dict[str, _Belief] = {}

    @property
    def initial_count(self) -> float:
        """What a first estimate counts for: as much as the shortest memory can hold, 1 + rho_min + rho_min² + …"""
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
        """Begin with the mean of these rewards, counted `initial_count` times. What was known is forgotten."""
        if not rewards:
            raise ConfigError(
                f"BetaValueTracker.initialise({key!r}) needs at least one reward; without any, leave it out."
            )
        share = fmean(self._share(key, reward) for reward in rewards)
        count = self.initial_count
        self._beliefs[key] = _Belief(count * share, count * (1 - share), self.drift)

    def observe(self, key: str, reward: float) -> None:
        """Forget a little, then count this reward. Ask for the value before: afterwards it depends on the reward."""
        share, rho, known = self._share(key, reward), self.rho_of(key), self._belief(key)
        self._beliefs[key] = _Belief(rho * known.wins + share, rho * known.losses + 1 - share, self.drift)

    def notify_drift(self, kl: float) -> None:
        """An update has moved the policy by this KL (nats per token)."""
        self.drift += max(kl, 0.0)

    def _share(self, key: str, reward: float) -> float:
        if not self.low <= reward <= self.high:
            raise ConfigError(
                f"Prompt {key!r} earned {reward}, but the tracker was made for total rewards from {self.low} to "
                f"{self.high}. Penalties of a parser count too. Make it with BetaValueTracker(low=…, high=…)."
            )
        return (reward - self.low) / (self.high - self.low)

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        beliefs = {key: [known.wins, known.losses, known.seen_at] for key, known in self._beliefs.items()}
        return {"drift": self.drift, "beliefs": beliefs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.drift = state["drift"]
        self._beliefs = {key: _Belief(*counts) for key, counts in state["beliefs"].items()}
