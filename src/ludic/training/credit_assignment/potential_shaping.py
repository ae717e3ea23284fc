"""`PotentialShaping`: pay for progress without changing what is best (Ng, Harada and Russell 1999).

For use with `Relabelled`: `Relabelled(MonteCarloReturn(gamma=0.0), PotentialShaping(info_potential("progress")))`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ludic.training.credit_assignment.relabelled import with_turn_rewards
from ludic.training.credit_assignment.turns_and_groups import (
    Floats,
    check_discount,
    turn_rewards,
    turns_of,
)
from ludic.types import EnvironmentStep, Rollout

PotentialFn: TypeAlias = Callable[[Rollout], Sequence[float] | Floats]
"""How promising the state before each turn is: one number per turn, from what was known before it."""


@dataclass(frozen=True, slots=True)
class PotentialShaping:
    """Turn t earns gamma * Phi(s_{t+1}) − Phi(s_t) on top; Phi is 0 once the episode is over, however it ended.

    The extra rewards telescope: with the same gamma, G_t becomes G_t − Phi(s_t), which no later action can change. So
    every expected gradient stays what it was, and rules that look at whole episodes see no difference but noise. What
    it is for are rules that look a few turns ahead (a smaller gamma, GAE with lam < 1): to them, progress is visible
    at the turn that made it.

    A potential left standing where a time limit cuts the episode off would pay for ending in promising states; that
    is why it is 0 there too.
    """

    potential: PotentialFn
    gamma: float = 1.0
    """Discount per turn of the task, not of the rule that looks a few turns ahead."""

    def __post_init__(self) -> None:
        check_discount("PotentialShaping", "gamma", self.gamma)

    def __call__(self, rollout: Rollout) -> Rollout:
        rewards_T = turn_rewards(rollout)
        phi_T = np.asarray(self.potential(rollout), dtype=np.float64)
        if phi_T.shape != rewards_T.shape or not np.isfinite(phi_T).all():
            raise ValueError(
                f"PotentialShaping.potential gave {phi_T.tolist()} for rollout {rollout.id!r}, which has "
                f"{len(rewards_T)} turns. Return one finite number per turn: the potential before it."
            )
        after_T = np.append(phi_T[1:], 0.0) if len(phi_T) else phi_T
        return with_turn_rewards(rollout, rewards_T + self.gamma * after_T - phi_T)


def info_potential(key: str, *, start: float = 0.0) -> PotentialFn:
    """The last info[key] that the env gave before the turn; `start` before it gave any."""

    def potential(rollout: Rollout) -> list[float]:
        values = []
        latest = start
        for turn in turns_of(rollout):
            values.append(latest)
            told = [step.info[key] for step in turn.steps if isinstance(step, EnvironmentStep) and key in step.info]
            latest = float(told[-1]) if told else latest
        return values

    return potential
