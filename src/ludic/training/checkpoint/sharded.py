"""Checkpoints of a run on several ranks: each writes its own part, in the background, and one rename finishes the checkpoint.

`save` copies what is to be written into CPU memory and returns. A thread of every rank writes; when all have written, rank 0
writes the manifest and renames the folder. A rank that fails, or dies, leaves what was there before. How many ranks load does
not matter. All ranks call everything together, and all need to see output_dir.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager, Result, SaveJob
from ludic.training.checkpoint.manifest import CheckpointError, problem_with
from ludic.training.checkpoint.model_files import (
    base_fingerprint,
    is_peft,
    model_tensors,
    uncompiled,
    write_description,
)
from ludic.training.checkpoint.state_files import RNG
from ludic.types import ConfigError

logger = logging.getLogger(__name__)


class ShardedCheckpointManager(CheckpointManager):
    """The checkpoints of one run, as seen by one of its ranks.

    `save` starts to write; training may go on as soon as it returns. `on_committed` is called on every rank, from the writing
    thread. A checkpoint that failed is an error of the next `save`, and of `finish`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        per_rank: Sequence[str] = (RNG,),
        in_background: bool = True,
        timeout_s: float = 1800.0,
    ) -> None:
        """`per_rank` names what of the state belongs to each rank alone; of everything else rank 0's counts. `timeout_s`
        is how long ranks wait for the slowest to write its part."""
        super().__init__(config)
        if not dist.is_initialized():
            raise ConfigError(
                "ShardedCheckpointManager needs torch.distributed, which is not initialised. Start the run by torchrun, or use "
                "CheckpointManager, which reads checkpoints of several ranks as well."
            )
        self.per_rank, self.in_background = tuple(per_rank), in_background
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A separate group: the writing thread communicates while training does, and gloo needs no GPU for it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._fingerprint: dict[str, str] | None = None

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; CheckpointError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_model(self, model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
        self._together(lambda: _check_is_seen(folder))
        if self._fingerprint is None:  # once: frozen weights do not change, and every rank has to send its parts for it
            own = uncompiled(model)
            self._fingerprint = base_fingerprint(own) if is_peft(own) else {}
        fingerprint = self._fingerprint
        self._on_first(lambda: write_description(model, fingerprint, folder))
        return model_tensors(model)

    def _start(self, job: SaveJob) -> None:
        """Write from copies, which training does not change."""
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in job.tensors.items()}
        self._writing = self._thread.submit(self._write, replace(job, tensors=copies))
        self._writing.add_done_callback(_log_failure)
        if not self.in_background:
            self.finish()

    def _candidates(self, step: int | None, path: str | Path | None) -> list[Path]:
        """What rank 0 sees: all try the same ones."""
        return self._on_first(lambda: super(ShardedCheckpointManager, self)._candidates(step, path))

    def _problem_with(self, folder: Path) -> str | None:
        """The ranks divide the files among them."""
        share = slice(self.rank, None, self.world_size)
        problems = self._together(lambda: problem_with(folder, checksums=True, share=share))
        return next((problem for problem in problems if problem is not None), None)

    def _warn(self, message: str) -> None:
        if self.rank == 0:
            super()._warn(message)

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """What fails on one rank fails on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001 - the other ranks would wait for this one; it is raised below
            error = failure
        outcomes: list[Any] = [None] * self.world_size
        reason = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(outcomes, (result, reason), group=self._group)
        if error is not None and not isinstance(error, (OSError, SafetensorError)):
            raise error
        failed = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason is not None]
        if failed:
            raise CheckpointError("; ".join(failed)) from error
        return [result for result, _ in outcomes]


def _check_is_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 has just made, is not there for this rank. Choose an output_dir on a disk that all ranks "
            "share."
        )


def _log_failure(writing: "Future[None]") -> None:
    """Log the failure now; the next `save` or `finish` raises it."""
    error = writing.exception()
    if error is not None:
        logger.error("%s", error)
