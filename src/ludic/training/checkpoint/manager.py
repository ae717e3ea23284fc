"""Checkpoints: everything a run needs to continue, written so that no crash can spoil what was there before.

    output_dir/step_000100/   weights and tokenizer (see model_files), trainer_state.json, ranks/ (see rank_files), manifest.json
    output_dir/latest.json    {"path": "step_000100", "step": 100}; best.json likewise, with the metric. Both are for people

A checkpoint is written next to its place, synced, and renamed. One that is incomplete or damaged is never loaded.
One process writes a whole model. Of a model that is sharded over ranks, each rank has a manager that writes its own part, in the
background. Any number of ranks can load what any number wrote.
"""

import logging
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor

from ludic.models.kinds import save_tokenizer
from ludic.training.checkpoint.manifest import CheckpointError, problem_with, read_manifest, synced, write_manifest
from ludic.training.checkpoint.model_files import (
    base_fingerprint,
    check_storable,
    is_peft,
    matching_weights,
    model_tensors,
    uncompiled,
    write_description,
    write_weights,
)
from ludic.training.checkpoint.rank_files import is_written_by, write_rank_files, written_by
from ludic.training.checkpoint.state_files import (
    RNG,
    StoredOptimizer,
    encoded_state,
    optimizer_tensors,
    read_metrics,
    read_state,
    write_plain_state,
)
from ludic.training.config import CheckpointConfig
from ludic.types import ConfigError
from ludic.util.files import UNFINISHED, NotWritten, sync, write_json

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointManager"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_REPLACED = ".replaced-"
_FOLDER = re.compile(rf"(?:{re.escape(_REPLACED)})?step_([0-9]{{1,18}})")


class _NotSaved(NotWritten):
    advice = (
        "free some, choose another output_dir, lower max_to_keep, or set save_optimizer=False (`--no-save-optimizer`)"
    )


@dataclass(frozen=True, slots=True)
class _SaveJob:
    """All that is needed to write a rank's files and finish the checkpoint."""

    step: int
    target: Path
    unfinished: Path
    tensors: dict[str, Tensor]
    on_committed: Callable[[Path], None] | None


class CheckpointManager:
    """The checkpoints of one run, as seen by the one process that writes them, or by one of the ranks of a sharded model.

    Ranks call everything together, and see one output_dir. There `save` copies what is to be written into CPU memory and returns; a
    thread of every rank writes. When all have written, rank 0 writes the manifest and renames the folder. A rank that fails, or
    dies, leaves what was there before. `on_committed` is called on every rank, from the writing thread. The error of a failed
    checkpoint is raised by the next `save` or `finish`.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        *,
        is_sharded: bool = False,
        per_rank: Sequence[str] = (RNG,),
        timeout_s: float = 1800.0,
    ) -> None:
        """`per_rank`: which parts of the state each rank has for itself; of everything else rank 0's is saved. `timeout_s`: how
        long ranks wait for the slowest to write its part."""
        self.config, self.is_sharded, self.per_rank = config, is_sharded, tuple(per_rank)
        self.root = Path(config.output_dir)
        self.rank, self.world_size = 0, 1
        self._writing: Future[None] | None = None
        self._fingerprint: dict[str, str] | None = None
        if not is_sharded:
            return
        if not dist.is_initialized():
            raise ConfigError(
                "CheckpointManager(is_sharded=True) needs torch.distributed, which is not initialised. Start the run by torchrun, "
                "or leave is_sharded out: one process reads checkpoints of several ranks as well."
            )
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        # A separate group: the writing thread communicates while training does, and gloo needs no GPU for it.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    # --- writing ---

    def should_save(self, step: int) -> bool:
        every = self.config.every_n_steps
        return every > 0 and step > 0 and step % every == 0

    def maybe_save(self, step: int, **what: Any) -> Path | None:
        """`save`, if this step is due."""
        return self.save(step, **what) if self.should_save(step) else None

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
        """Write step_<step> and prune older ones. `state` may hold plain values and tensors, nested in lists and dicts.

        `on_committed` is called with the folder once the checkpoint is complete and on disk: before `save` returns, or later if
        several ranks write. If saving fails, the checkpoints that were there are unchanged.
        """
        self.finish()
        target = self.root / f"step_{step:06d}"
        unfinished = self.root / f"{UNFINISHED}{target.name}"
        shared = {name: value for name, value in (state or {}).items() if name not in self.per_rank}
        own = {name: value for name, value in (state or {}).items() if name in self.per_rank}
        saved = optimizer.state_dict() if optimizer is not None and self.config.save_optimizer else None
        tensors: dict[str, Tensor] = {}

        def check_and_encode() -> None:
            check_storable(model)
            is_first = self.rank == 0
            tensors.update(encoded_state(step, shared if is_first else {}, own, saved if is_first else None))

        def write_small_files() -> None:
            write_plain_state(unfinished, step, shared, metrics or {})
            if tokenizer is not None:
                save_tokenizer(tokenizer, unfinished)

        self._together(check_and_encode)
        with self._explained(target, unfinished):
            self._on_first(lambda: self._make_folder(unfinished))
            divided = self._write_model(model, unfinished) | optimizer_tensors(saved)
            self._on_first(write_small_files)
        tensors |= {name: tensor for name, tensor in divided.items() if is_written_by(self.rank, tensor)}
        self._start(_SaveJob(step, target, unfinished, tensors, on_committed))
        return target

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; CheckpointError if it could not be written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _write_model(self, model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
        """Write the files of the model; returns the tensors that go into the rank files."""
        if not self.is_sharded:
            write_weights(model, folder, max_shard_size=self.config.max_shard_size)
            return {}
        self._together(lambda: _check_is_seen(folder))
        if self._fingerprint is None:  # once: frozen weights do not change, and every rank has to send its parts for it
            own = uncompiled(model)
            self._fingerprint = base_fingerprint(own) if is_peft(own) else {}
        fingerprint = self._fingerprint
        self._on_first(lambda: write_description(model, fingerprint, folder))
        return model_tensors(model)

    def _start(self, job: _SaveJob) -> None:
        """One process writes at once; ranks write from copies, which training does not change."""
        if not self.is_sharded:
            self._write(job)
            return
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in job.tensors.items()}
        self._writing = self._thread.submit(self._write, replace(job, tensors=copies))
        self._writing.add_done_callback(_log_failure)

    def _write(self, job: _SaveJob) -> None:
        """On every rank: write its files. When all have, rank 0 finishes the checkpoint."""
        with self._explained(job.target, job.unfinished):
            self._together(lambda: write_rank_files(job.unfinished, self.rank, job.tensors))
            entries = self._together(lambda: synced(job.unfinished, written_by(self.rank, job.unfinished)))
            self._on_first(lambda: self._commit(job, entries))
        if job.on_committed is not None:
            job.on_committed(job.target)

    @contextmanager
    def _explained(self, target: Path, unfinished: Path) -> Iterator[None]:
        """Turns an error in the block into a CheckpointError, and leaves no unfinished folder."""
        is_done = False
        try:
            yield
            is_done = True
        except (OSError, RuntimeError, SafetensorError) as error:  # a full disk is a RuntimeError in torch
            raise self._not_written(target, error) from error
        finally:
            if not is_done and self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)

    def _not_written(self, target: Path, error: Exception) -> "CheckpointError":
        intact = self.latest()
        before = "There is no earlier one. " if intact is None else f"{intact.name} is intact and can be loaded. "
        return CheckpointError(str(_NotSaved.of(target, error, before)))

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """Call `action` on every rank; returns the results of all. An error on one rank is raised on all."""
        if not self.is_sharded:
            return [action()]
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

    def _on_first(self, action: Callable[[], Result]) -> Result:
        """Call `action` on rank 0; returns its result on every rank."""
        results: list[Any] = self._together(lambda: action() if self.rank == 0 else None)
        first: Result = results[0]
        return first

    def _make_folder(self, unfinished: Path) -> None:
        """Make the folder, after removing what a killed writer left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for replaced in self.root.glob(f"{_REPLACED}*"):
            target = self.root / replaced.name.removeprefix(_REPLACED)
            shutil.rmtree(replaced) if target.exists() else replaced.rename(target)
        unfinished.mkdir()

    def _commit(self, job: _SaveJob, entries: Sequence[Mapping[str, Any]]) -> None:
        """Give the folder its manifest and its name, write the pointers, and remove what is too old."""
        newest = self.latest()
        # Counts saves: a run that went back to an older step has its newest checkpoint at a lower step.
        serial = 1 if newest is None else 1 + (read_manifest(newest) or {})["serial"]
        listed = {name: entry for of_rank in entries for name, entry in of_rank.items()}
        write_manifest(job.unfinished, listed, step=job.step, serial=serial)
        replaced = self.root / f"{_REPLACED}{job.target.name}"
        if job.target.exists():  # a folder cannot replace another at once; between the two renames the old one counts
            job.target.rename(replaced)
        job.unfinished.rename(job.target)
        sync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        write_json(self.root / "latest.json", {"path": job.target.name, "step": job.step})
        best = self._best()
        if best is not None:
            folder, value = best
            named = {"path": folder.name, "step": _step_of(folder), "metric": self.config.best_metric, "value": value}
            write_json(self.root / "best.json", named)
        self._prune(None if best is None else best[0])

    def _prune(self, best: Path | None) -> None:
        keep_every, max_to_keep = self.config.keep_every, self.config.max_to_keep
        for folder in [] if max_to_keep is None else self._finished()[max_to_keep:]:
            if folder != best and not (keep_every and _step_of(folder) % keep_every == 0):
                # Renamed first: half a folder under its own name would look like damage.
                shutil.rmtree(folder.rename(self.root / f"{UNFINISHED}{folder.name}"))

    # --- reading ---

    def latest(self) -> Path | None:
        """The newest complete checkpoint (files and sizes are compared; `load` also compares their content)."""
        return next(iter(self._finished()), None)

    def is_empty(self) -> bool:
        """True if no checkpoint was ever finished here, not even one that is damaged now."""
        return not self._folders()

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, the newest first."""
        return list(map(_step_of, self._finished()))

    def best(self) -> Path | None:
        """The checkpoint with the best `best_metric`; None if no checkpoint has it."""
        best = self._best()
        return None if best is None else best[0]

    def _best(self) -> tuple[Path, float] | None:
        """The best checkpoint and its metric, by the checkpoints' own files; of equal ones the oldest."""
        name, sign = self.config.best_metric, 1 if self.config.best_mode == "max" else -1
        if name is None:
            return None
        best: tuple[Path, float] | None = None
        for folder in reversed(self._finished()):
            try:
                value = read_metrics(folder).get(name)
            except CheckpointError as error:
                self._warn(f"{folder.name} cannot be the best checkpoint: {error}")
                continue
            if value is not None and (best is None or sign * value > sign * best[1]):
                best = folder, value
        return best

    def load(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        path: str | Path | None = None,
    ) -> dict[str, Any]:
        """Copy weights and optimizer into place and return the state that was saved, with its `step`.

        The checkpoint is `path`, else that of `step`, else the newest that is undamaged.
        """
        self.finish()
        folder = self.find(step=step, path=path)
        state = read_state(folder, rank=self.rank, world_size=self.world_size, per_rank=self.per_rank)
        copy_weights = matching_weights(model, folder)
        stored = None if optimizer is None else StoredOptimizer(folder, optimizer)
        self._together(copy_weights)
        if stored is not None:
            self._together(stored.copy)
            stored.load()
        return state

    def find(self, *, step: int | None = None, path: str | Path | None = None) -> Path:
        """The checkpoint that `load` loads; it warns about each one that it skips. CheckpointError if there is none."""
        is_asked_for = step is not None or path is not None
        share = slice(self.rank, None, self.world_size)  # ranks divide the files among them
        for folder in self._on_first(lambda: self._candidates(step, path)):
            problems = self._together(partial(problem_with, folder, checksums=True, share=share))
            problem = next((problem for problem in problems if problem is not None), None)
            if problem is None:
                return folder
            if is_asked_for:
                there = ", ".join(each.name for each in self._finished()) or "none"
                raise CheckpointError(f"Cannot load {folder}: {problem}. Complete checkpoints in {self.root}: {there}.")
            self._warn(f"Skipping the checkpoint {folder}: {problem}.")
        raise CheckpointError(f"There is no undamaged checkpoint in {self.root}. Start the run without resuming.")

    def _candidates(self, step: int | None, path: str | Path | None) -> list[Path]:
        """The one that was asked for, or all that are complete, the newest first."""
        if path is not None:
            return [Path(path)]
        if step is not None:
            return [self.root / f"step_{step:06d}"]
        for folder in self._folders():
            problem = _quick_problem(folder)
            if problem is not None:
                self._warn(f"Skipping the checkpoint {folder}: {problem}.")
        return self._finished()

    def _warn(self, message: str) -> None:
        if self.rank == 0:
            logger.warning("%s", message)

    def _folders(self) -> list[Path]:
        there = sorted(self.root.iterdir()) if self.root.is_dir() else []
        return [path for path in there if _FOLDER.fullmatch(path.name) and path.is_dir()]

    def _finished(self) -> list[Path]:
        """Complete checkpoints, the newest first."""
        complete = [folder for folder in self._folders() if _quick_problem(folder) is None]
        return sorted(complete, key=lambda folder: (read_manifest(folder) or {}).get("serial", 0), reverse=True)


def _quick_problem(folder: Path) -> str | None:
    """The problem of a folder under its own name; the content of its files is not read."""
    problem = problem_with(folder, checksums=False)
    if problem is None and _step_of(folder) != (read_manifest(folder) or {}).get("step"):
        return "its manifest.json is that of another step"
    return problem


def _step_of(folder: Path) -> int:
    named = _FOLDER.fullmatch(folder.name)
    assert named is not None, "only called for folders that are named so"
    return int(named[1])


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
