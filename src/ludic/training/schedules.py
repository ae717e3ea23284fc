"""Learning-rate schedules: what the base rate is multiplied with, as a pure function of the step.

Nothing is stored, so resuming at step n needs nothing but n. Step 0 is the first optimizer step.
"""

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from ludic.types import ConfigError

ScheduleKind: TypeAlias = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, slots=True)
class LRSchedule:
    """Warm up, then stay or go down."""

    kind: ScheduleKind = "constant"
    """`wsd` is warm-up, stable, decay: constant until the last `decay_steps`, then linear."""
    warmup_steps: int = 0
    """The first step uses 1/warmup_steps of the rate, and the last of the warm-up all of it."""
    total_steps: int | None = None
    """Where the decay arrives at `min_ratio`; later steps stay there. Every kind but `constant` needs it."""
    min_ratio: float = 0.0
    """The share of the rate that is left at the end."""
    decay_steps: int | None = None
    """How long `wsd` decays; None is a fifth of `total_steps`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ScheduleKind):
            raise ConfigError(f"LRSchedule.kind={self.kind!r}; there are {', '.join(get_args(ScheduleKind))}.")
        if self.warmup_steps < 0:
            raise ConfigError(f"LRSchedule.warmup_steps={self.warmup_steps}; it must be 0 or more.")
        if not 0.0 <= self.min_ratio <= 1.0:
            raise ConfigError(f"LRSchedule.min_ratio={self.min_ratio}; it is a share of the rate, between 0 and 1.")
        if self.kind != "constant":
            self._check_length()
        if self.decay_steps is not None:
            self._check_decay(self.decay_steps)

    def _check_length(self) -> None:
        if self.total_steps is None:
            raise ConfigError(
                f"LRSchedule(kind={self.kind!r}) must know when it ends. Set total_steps, or use kind='constant'."
            )
        if self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"LRSchedule.total_steps={self.total_steps} leaves no step after warmup_steps={self.warmup_steps}. "
                "Warm up for less, or train for longer."
            )

    def _check_decay(self, decay_steps: int) -> None:
        if self.kind != "wsd":
            raise ConfigError(f"LRSchedule.decay_steps is for kind='wsd'; kind={self.kind!r} decays all the way.")
        longest = self._end - self.warmup_steps
        if not 1 <= decay_steps <= longest:
            raise ConfigError(
                f"LRSchedule.decay_steps={decay_steps}; between warm-up and end there is room for {longest}."
            )

    def __call__(self, step: int) -> float:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.kind == "constant":
            return 1.0
        first = self._end - self._wsd_decay if self.kind == "wsd" else self.warmup_steps
        progress = min(max((step - first) / (self._end - first), 0.0), 1.0)
        left = 0.5 * (1 + math.cos(math.pi * progress)) if self.kind == "cosine" else 1 - progress
        return self.min_ratio + (1 - self.min_ratio) * left

    @property
    def _end(self) -> int:
        assert self.total_steps is not None, "checked when the schedule was made"
        return self.total_steps

    @property
    def _wsd_decay(self) -> int:
        fifth = max(self._end // 5, 1)
        return min(self.decay_steps or fifth, self._end - self.warmup_steps)
