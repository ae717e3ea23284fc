"""What is trained: a model gives a policy that samples, and takes batches to learn from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from rolo.generation import Policy
from rolo.rl import Trajectory


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Trajectories, whose completions hold prompt ids, completion ids and log-probs, with one advantage each."""

    trajectories: Sequence[Trajectory]
    advantages: Sequence[float]

    def __len__(self) -> int:
        return len(self.trajectories)


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
