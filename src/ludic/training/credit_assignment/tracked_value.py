"""`TrackedValueReturn`: better or worse than this prompt went before (SPO)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ludic.training.credit_assignment.turns_and_groups import Weights, finished, same_on_every_step
from ludic.training.value_tracker import BetaValueTracker
from ludic.types import Rollout, prompt_key


def prompt_of(rollout: Rollout) -> str:
    return prompt_key(rollout.meta.get("request_meta", {}))


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
