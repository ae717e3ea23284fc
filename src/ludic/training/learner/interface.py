"""`Learner`: what the trainer's loop needs from a back end that trains a policy.

`TorchLearner` trains a model in this process or over ranks; `ludic_tinker.learner.TinkerLearner` trains one at a service.
What only several processes need has a default here, for a learner of one process.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.learner.batches import Describe, PreparedBatch, RankBatch, part_of_batch
from ludic.training.learner.gradients import batch_facts
from ludic.types import SAWItem

if TYPE_CHECKING:
    from ludic.training.checkpoint.manager import CheckpointManager

T = TypeVar("T")

OnCommitted: TypeAlias = Callable[[Path], None]
"""Gets the folder of a checkpoint once it is on disk."""


class Learner(ABC):
    """One policy in training: its weights, its optimizer, its checkpoints, and the publication of its weights.

    `step` is the number of optimizer steps done, and the version of the policy; the trainer counts it. All methods but `load`,
    `begin` and `check` may be called from a thread. With several processes, each of them calls the same methods in the same order.
    """

    algo: RLAlgorithm
    cfg: TrainerConfig
    tokenizer: Any = None
    """Saved with checkpoints, and used to show samples."""
    checkpointer: "CheckpointManager | None" = None
    is_first: bool = True
    """This process evaluates, logs and publishes."""
    is_alone: bool = True
    """No other process trains the same policy."""
    shares_weights: bool = False
    """Samples are drawn from the very weights that an update changes."""

    # --- before training ---

    def check(self, check: Callable[[], None]) -> None:
        """Run `check` on every process; if it raises a ConfigError on one, all raise one."""
        check()

    @abstractmethod
    def load(self, *, step: int | None = None, path: str | None = None) -> dict[str, Any]:
        """Restore a checkpoint, the newest by default; returns the state that was given to `save`, with "step" in it."""

    @abstractmethod
    def begin(self, step: int, *, is_resumed: bool) -> None:
        """Called once, before the first step: check the weights, and publish them if they were restored."""

    # --- one step ---

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """Entered around training: an error in one process is raised in all, naming the process that failed."""
        return contextlib.nullcontext()

    def check_servers(self, step: int) -> None:
        """Called before a batch is fetched: a server that has lost the published weights gets them again."""
        return

    def share(self, own: PreparedBatch | Exception, describe: Describe) -> RankBatch:
        """This process's part of the batch that all processes fetched together. `own` may be an error, which is raised."""
        if isinstance(own, Exception):
            raise own
        return RankBatch(own.items, batch_facts(own.items), describe(own))

    def prepare(self, batch: RankBatch) -> RankBatch:
        """Called once for a batch, before its first update: with what has to be computed with the weights from before it."""
        return batch

    def collect(self, batch: RankBatch) -> list[SAWItem]:
        """All samples of a batch, on the first process; none on the others."""
        return batch.items

    def share_part(self, items: list[SAWItem]) -> RankBatch:
        """This process's part of these samples, which the first process has."""
        return part_of_batch(items, items)

    @abstractmethod
    def update(self, step: int, batch: RankBatch, on_step: Callable[[], None]) -> dict[str, float]:
        """One optimizer step; returns its metrics. `on_step` is called as soon as the weights have changed."""

    @abstractmethod
    def publish(self, step: int, since: int) -> bool:
        """Called after a batch, whose updates were those after `since`: send the weights to the sampler if one of them is due;
        returns whether the next samples are of this version."""

    def broadcast(self, value: T) -> T:
        """The first process's value."""
        return value

    # --- checkpoints ---

    @abstractmethod
    def save(
        self, step: int, state: Mapping[str, Any], metrics: Mapping[str, float], on_committed: OnCommitted
    ) -> None:
        """Write a checkpoint of weights, optimizer and `state`."""
