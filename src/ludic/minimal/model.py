"""The `Model` interface (sample and update, in this process or remote) and its training batch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, runtime_checkable

from ludic.batch_gen.external_rollouts import ExternalCall, rollout_of_calls
from ludic.minimal.generation import Policy
from ludic.minimal.rl import Reward, Trajectory
from ludic.types import Rollout, SAWBatch

TrainingBatch: TypeAlias = SAWBatch
"""Per item: token ids, the mask of sampled tokens, their log-probs, and one advantage (`weight`)."""


@dataclass(frozen=True, slots=True)
class UpdateResult:
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)


class Model(Protocol):
    def policy(self) -> Policy:
        """A policy that samples from the current weights at each call."""
        ...

    async def update(self, batch: TrainingBatch) -> UpdateResult:
        """One optimizer step; when it returns, policies sample from the new weights."""
        ...


@runtime_checkable
class SavesWeights(Protocol):
    async def save(self, folder: Path) -> str:
        """Save the current weights, replacing earlier ones in `folder`; returns their path."""
        ...


def as_rollout(trajectory: Trajectory, reward: Reward, group_id: str) -> Rollout:
    """The trajectory as a library rollout, for stitching, credit rules and `ludic view`."""
    calls = [ExternalCall(step.state.messages, step.action.text, step.completion) for step in trajectory.steps]
    return rollout_of_calls(calls, reward=reward.value, is_finished=trajectory.is_finished, group_id=group_id)
