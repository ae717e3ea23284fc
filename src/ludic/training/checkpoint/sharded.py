"""Checkpoints of a run on several ranks: each writes its own part, in the background, and one rename makes it count.

`save` copies what is to be written into CPU memory and returns; a thread of every rank writes, all agree that all have
written, and rank 0 writes the manifest and renames the folder. A rank that fails, or dies, leaves what was there before.
How many ranks load does not matter, and a checkpoint of one process loads, too. All ranks call everything together; all
need to see output_dir.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError

from ludic.training.checkpoint.atomic import SHARDED, CheckpointError, files_in, problem_with, synced, write_manifest
from ludic.training.checkpoint.manager import UNFINISHED, CheckpointConfig, CheckpointManager
from ludic.training.checkpoint.model_files import (
    base_fingerprint,
    check_all_trained_is_in_an_adapter,
    is_peft,
    own_part,
    read_weights,
    uncompiled,
)
from ludic.training.checkpoint.rank_state import RNG, state_for
from ludic.training.checkpoint.shard_files import (
    is_sharded,
    model_tensors,
    optimizer_rest,
    optimizer_tensors,
    read_shards,
    staged,
    write_description,
    write_rank_state,
    write_shards,
)
from ludic.training.checkpoint.state_files import (
    check_state,
    load_optimizer,
    read_optimizer,
    write_optimizer,
    write_state,
)
from ludic.types import ConfigError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_RANK_OF = re.compile(r"(?:__|rank_)(\d+)[_.].*")


@dataclass(frozen=True, slots=True)
class _Job:
    """All that the writing thread needs; training changes none of it."""

    step: int
    target: Path
    unfinished: Path
    tensors: dict[str, torch.Tensor]
    own_state: dict[str, Any]
    metrics: dict[str, float]
    on_committed: Callable[[Path], None] | None


class ShardedCheckpointManager(CheckpointManager):
    """The checkpoints of one run, as seen by one of its ranks."""

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
                "CheckpointManager, which reads sharded checkpoints as well."
            )
        self.per_rank, self.in_background = tuple(per_rank), in_background
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A group of its own: the writing thread talks while training does, and gloo needs no GPU for it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._fingerprint: dict[str, str] | None = None

    # --- writing ---

    def save(
        self,
        step: int,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        state: Mapping[str, Any] | None = None,
        metrics: Mapping[str, float] | None = None,
        tokenizer: Any = None,
        on_committed: Callable[[Path], None] | None = None,
    ) -> Path:
        """Start to write step_<step>; training may go on as soon as this returns.

        `on_committed` is told the folder, on every rank and from the writing thread, once the checkpoint counts. One that
        failed is an error here the next time, and in `finish`.
        """
        self.finish()
        state = dict(state or {})
        target = self.root / f"step_{step:06d}"
        unfinished = self.root / f"{UNFINISHED}{target.name}"
        self._together(lambda: self._check(step, model, state))
        fingerprint = self._base_of(model)
        shared = {name: value for name, value in state.items() if name not in self.per_rank}
        own = {name: value for name, value in state.items() if name in self.per_rank}
        optimizer_state = optimizer.state_dict() if optimizer is not None and self.config.save_optimizer else None
        with self._explained(target, unfinished):
            self._on_first(lambda: self._begin(unfinished))
            self._together(lambda: _check_is_seen(unfinished))
            self._on_first(lambda: self._write_small(unfinished, step, shared, metrics or {}, optimizer_state))
            self._on_first(lambda: write_description(model, fingerprint, unfinished))
            self._on_first(lambda: _write_tokenizer(tokenizer, unfinished))
        tensors = model_tensors(model) | (optimizer_tensors(optimizer_state) if optimizer_state is not None else {})
        job = _Job(step, target, unfinished, staged(tensors), _copied(own), dict(metrics or {}), on_committed)
        self._writing = self._thread.submit(self._write, job)
        self._writing.add_done_callback(_log_failure)
        if not self.in_background:
            self.finish()
        return target

    def finish(self) -> None:
        """Wait until the checkpoint that is being written counts; CheckpointError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _check(self, step: int, model: torch.nn.Module, state: Mapping[str, Any]) -> None:
        check_state(step, state)
        own = uncompiled(model)
        if is_peft(own):
            check_all_trained_is_in_an_adapter(own)

    def _base_of(self, model: torch.nn.Module) -> dict[str, str]:
        """Frozen weights do not change, so they are looked at once: every rank has to send its parts for it."""
        if self._fingerprint is None:
            own = uncompiled(model)
            self._fingerprint = base_fingerprint(own) if is_peft(own) else {}
        return self._fingerprint

    def _write_small(
        self,
        folder: Path,
        step: int,
        shared: Mapping[str, Any],
        metrics: Mapping[str, float],
        optimizer: Mapping[str, Any] | None,
    ) -> None:
        write_state(folder, step, shared, metrics)
        if optimizer is not None:
            write_optimizer(optimizer_rest(optimizer), folder)

    def _write(self, job: _Job) -> None:
        """In the thread, on every rank."""
        with self._explained(job.target, job.unfinished):
            self._together(lambda: write_rank_state(job.unfinished, self.rank, job.own_state))
            write_shards(job.tensors, job.unfinished, self._group)
            entries = self._together(lambda: synced(job.unfinished, self._own_files(job.unfinished)))
            self._on_first(lambda: self._make_it_count(job, entries))
        if job.on_committed is not None:
            job.on_committed(job.target)

    def _own_files(self, folder: Path) -> list[Path]:
        """Each rank reads back what it wrote itself; rank 0 the rest, too."""
        matches = [(file, _RANK_OF.fullmatch(file.name)) for file in files_in(folder)]
        return [file for file, match in matches if (int(match[1]) if match else 0) == self.rank]

    def _make_it_count(self, job: _Job, entries: Sequence[Mapping[str, Any]]) -> None:
        listed = {name: entry for of_rank in entries for name, entry in of_rank.items()}
        facts = {"step": job.step, "serial": self._next_serial(), "format": SHARDED, "world_size": self.world_size}
        write_manifest(job.unfinished, facts, listed)
        self._commit(job.unfinished, job.target, job.step, job.metrics)

    @contextmanager
    def _explained(self, target: Path, unfinished: Path) -> Iterator[None]:
        is_done = False
        try:
            yield
            is_done = True
        except (OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(self._why_not_written(target, error)) from error
        finally:
            if not is_done and self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)

    # --- reading ---

    def load(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        path: str | Path | None = None,
    ) -> dict[str, Any]:
        """As in CheckpointManager; the state that comes back is rank 0's, with what is this rank's own."""
        self.finish()
        folder = self.find(step=step, path=path)
        state = state_for(folder, rank=self.rank, world_size=self.world_size, per_rank=self.per_rank)
        if is_sharded(folder):
            read_shards(model, optimizer, folder, self._group)
            return state
        read_weights(model, folder)
        if optimizer is not None:
            load_optimizer(optimizer, _divided(optimizer, read_optimizer(folder, mapped=True)), folder)
        return state

    def _candidates(self, step: int | None, path: str | Path | None) -> list[Path]:
        """What rank 0 sees: all try the same ones."""
        return self._on_first(lambda: super(ShardedCheckpointManager, self)._candidates(step, path))

    def _problem_with(self, folder: Path) -> str | None:
        """The ranks divide the files among them."""
        share = slice(self.rank, None, self.world_size)
        problems = self._together(
            lambda: problem_with(folder, checksums=True, share=share) if folder.is_dir() else "it does not exist"
        )
        return next((problem for problem in problems if problem is not None), None)

    def _warn(self, message: str) -> None:
        if self.rank == 0:
            super()._warn(message)

    # --- all ranks ---

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """Do something on every rank and give everybody's result to all. What fails on one rank fails on all."""
        result, error = None, None
        try:
            result = action()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the others would wait for this rank; raised below
            error = failure
        outcomes: list[Any] = [None] * self.world_size
        reason = None if error is None else f"{type(error).__name__}: {error}"
        dist.all_gather_object(outcomes, (result, reason), group=self._group)
        if error is not None:
            raise error
        failed = [f"rank {rank}: {reason}" for rank, (_, reason) in enumerate(outcomes) if reason is not None]
        if failed:
            raise CheckpointError("; ".join(failed))
        return [result for result, _ in outcomes]

    def _on_first(self, action: Callable[[], Result]) -> Result:
        """The same on rank 0 alone."""
        results: list[Any] = self._together(lambda: action() if self.rank == 0 else None)
        first: Result = results[0]
        return first


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _check_is_seen(folder: Path) -> None:
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}, which rank 0 has just made, is not there for this rank. Choose an output_dir on a disk that all ranks "
            "share."
        )


def _log_failure(writing: "Future[None]") -> None:
    """Whoever asks next gets the error; if nobody does, it is on record."""
    error = writing.exception()
    if error is not None:
        logger.error("%s", error)


def _copied(value: Any) -> Any:
    """With tensors of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return type(value)((key, _copied(inner)) for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value


def _divided(optimizer: torch.optim.Optimizer, whole: dict[str, Any]) -> dict[str, Any]:
    """This rank's part of an optimizer's state that was saved by one process."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        index: {
            slot: own_part(value, parameters[index]).clone()
            if isinstance(value, torch.Tensor) and index < len(parameters) and value.shape == parameters[index].shape
            else value
            for slot, value in values.items()
        }
        for index, values in whole["state"].items()
    }
    if "copies" not in whole:
        return {**whole, "state": state}
    own = optimizer.state_dict()["copies"]
    copies = [own_part(saved, like) for saved, like in zip(whole["copies"], own, strict=True)]
    return {**whole, "state": state, "copies": copies}
