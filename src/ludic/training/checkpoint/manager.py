"""Checkpoints: everything a run needs to go on, written so that no crash can spoil what was there before.

    output_dir/step_000100/   weights and tokenizer (see model_files), trainer_state.json, ranks/ (see rank_files), manifest.json
    output_dir/latest.json    {"path": "step_000100", "step": 100}; best.json likewise, with the metric

A checkpoint is written next to its place, synced, and renamed. One that is incomplete or damaged is never loaded. Everything
is written for any number of ranks; `CheckpointManager` is the only rank, `sharded` has what several ranks need beside.
"""

import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor

from ludic.training.checkpoint.manifest import (
    CheckpointError,
    problem_with,
    read_manifest,
    read_object,
    synced,
    write_manifest,
)
from ludic.training.checkpoint.model_files import check_storable, matching_weights, write_weights
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
from ludic.types.files import UNFINISHED, sync, write_json

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointManager"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
_REPLACED = ".replaced-"
_BEST = "best.json"
_FOLDER = re.compile(rf"(?:{re.escape(_REPLACED)})?step_([0-9]{{1,18}})")


@dataclass(frozen=True, slots=True)
class _Best:
    """A checkpoint and the value that makes it the best."""

    folder: Path
    metric: str
    value: float


@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that is needed to write a rank's files and finish the checkpoint."""

    step: int
    target: Path
    unfinished: Path
    tensors: dict[str, Tensor]
    metrics: dict[str, float]
    on_committed: Callable[[Path], None] | None


class CheckpointManager:
    """The checkpoints of one run. One process writes; any number may read."""

    rank, world_size = 0, 1
    per_rank: Sequence[str] = (RNG,)
    """What of the state each rank has for itself."""

    def __init__(self, config: CheckpointConfig) -> None:
        self.config = config
        self.root = Path(config.output_dir)

    # --- writing ---

    def should_save(self, step: int) -> bool:
        every = self.config.every_n_steps
        return every > 0 and step > 0 and step % every == 0

    def maybe_save(self, step: int, **what: Any) -> Path | None:
        """`save`, if this step is one of those to be saved."""
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

        `on_committed` is told the folder once the checkpoint is complete and on the disk: here before `save` returns, on several
        ranks later. If saving fails, the checkpoints that were there stay as they were.
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
                tokenizer.save_pretrained(unfinished)

        self._together(check_and_encode)
        with self._explained(target, unfinished):
            self._on_first(lambda: self._begin(unfinished))
            divided = self._write_model(model, unfinished) | optimizer_tensors(saved)
            self._on_first(write_small_files)
        tensors |= {name: tensor for name, tensor in divided.items() if is_written_by(self.rank, tensor)}
        self._start(SaveJob(step, target, unfinished, tensors, dict(metrics or {}), on_committed))
        return target

    def _write_model(self, model: torch.nn.Module, folder: Path) -> dict[str, Tensor]:
        """Write the files of the model; what comes back goes into the rank files."""
        write_weights(model, folder, max_shard_size=self.config.max_shard_size)
        return {}

    def _start(self, job: SaveJob) -> None:
        self._write(job)

    def _write(self, job: SaveJob) -> None:
        """On every rank: write its files, and when all have, rank 0 finishes the checkpoint."""
        with self._explained(job.target, job.unfinished):
            self._together(lambda: write_rank_files(job.unfinished, self.rank, job.tensors))
            entries = self._together(lambda: synced(job.unfinished, written_by(self.rank, job.unfinished)))
            self._on_first(lambda: self._make_it_count(job, entries))
        if job.on_committed is not None:
            job.on_committed(job.target)

    @contextmanager
    def _explained(self, target: Path, unfinished: Path) -> Iterator[None]:
        """What fails in the block is a CheckpointError, and leaves no unfinished folder."""
        is_done = False
        try:
            yield
            is_done = True
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            raise CheckpointError(self._why_not_written(target, error)) from error
        finally:
            if not is_done and self.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)

    def finish(self) -> None:
        """Wait for what is being written. Here `save` has waited already."""

    def _together(self, action: Callable[[], Result]) -> list[Result]:
        """Do something on every rank; what comes back are the results of all."""
        return [action()]

    def _on_first(self, action: Callable[[], Result]) -> Result:
        """Do something on rank 0; what comes back is its result, on every rank."""
        results: list[Any] = self._together(lambda: action() if self.rank == 0 else None)
        first: Result = results[0]
        return first

    def _begin(self, unfinished: Path) -> None:
        """Make the folder, after removing what a killed writer left behind."""
        self.root.mkdir(parents=True, exist_ok=True)
        for leftover in self.root.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for replaced in self.root.glob(f"{_REPLACED}*"):
            target = self.root / replaced.name.removeprefix(_REPLACED)
            shutil.rmtree(replaced) if target.exists() else replaced.rename(target)
        unfinished.mkdir()

    def _make_it_count(self, job: SaveJob, entries: Sequence[Mapping[str, Any]]) -> None:
        """Give the folder its manifest and its name, note the best, and remove what is too old."""
        newest = next(iter(self._finished()), None)
        # Counts saves: a run that went back to an older step and on from there has its newest checkpoint at a lower step.
        serial = 1 if newest is None else 1 + (read_manifest(newest) or {})["serial"]
        listed = {name: entry for of_rank in entries for name, entry in of_rank.items()}
        write_manifest(job.unfinished, listed, step=job.step, serial=serial)
        best = self._best()
        replaced = self.root / f"{_REPLACED}{job.target.name}"
        if (
            job.target.exists()
        ):  # a folder cannot replace another in one step; between the two renames the old one counts
            job.target.rename(replaced)
        job.unfinished.rename(job.target)
        sync(self.root)
        shutil.rmtree(replaced, ignore_errors=True)
        write_json(self.root / "latest.json", {"path": job.target.name, "step": job.step})
        best = self._note_best(best, job.target, job.metrics)
        self._prune(None if best is None else best.folder)

    def _note_best(self, best: _Best | None, target: Path, metrics: Mapping[str, float]) -> _Best | None:
        """Write which checkpoint is the best, now that `target` is there and `best` was the best before."""
        name = self.config.best_metric
        if name is None:
            return best
        value = float(metrics.get(name, math.nan))
        is_saved_again = best is not None and best.folder == target  # it is judged by its new value
        if math.isfinite(value) and (
            best is None or is_saved_again or best.metric != name or self._is_better(value, best.value)
        ):
            best = _Best(target, name, value)
        elif is_saved_again:
            best = self._best_of_saved(name)
        if best is not None:
            named = {
                "path": best.folder.name,
                "step": _step_of(best.folder),
                "metric": best.metric,
                "value": best.value,
            }
            write_json(self.root / _BEST, named)
        return best

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.config.best_mode == "max" else value < other

    def _prune(self, best: Path | None) -> None:
        keep_every, max_to_keep = self.config.keep_every, self.config.max_to_keep
        for folder in [] if max_to_keep is None else self._finished()[max_to_keep:]:
            if folder != best and not (keep_every and _step_of(folder) % keep_every == 0):
                # Renamed first: half a folder under its own name would look like damage.
                shutil.rmtree(folder.rename(self.root / f"{UNFINISHED}{folder.name}"))

    def _why_not_written(self, target: Path, error: Exception) -> str:
        intact = self.latest()
        before = "There is no earlier one." if intact is None else f"{intact.name} is intact and can be loaded."
        there = next(folder for folder in (self.root, *self.root.absolute().parents) if folder.exists())
        free = shutil.disk_usage(there).free / 2**20
        return (
            f"Could not write {target}: {type(error).__name__}: {error}. {before} {free:.0f} MiB are free there: if that is "
            f"too little, free some, choose another output_dir, lower max_to_keep (now {self.config.max_to_keep}), or set "
            "save_optimizer=False."
        )

    # --- reading ---

    def latest(self) -> Path | None:
        """The newest complete checkpoint (files and sizes are compared; `load` also compares their content)."""
        return next(iter(self._finished()), None)

    def is_empty(self) -> bool:
        """Whether no checkpoint was ever finished here; a damaged one is one."""
        return not self._folders()

    def steps(self) -> list[int]:
        """Of all complete checkpoints, the newest first."""
        return list(map(_step_of, self._finished()))

    def best(self) -> Path | None:
        """The checkpoint with the best metric so far."""
        best = self._best()
        return None if best is None else best.folder

    def _best(self) -> _Best | None:
        """What best.json says. If that cannot be true, the best of the checkpoints that are there, by their own metrics."""
        pointer, name = self.root / _BEST, self.config.best_metric
        if not pointer.exists():
            return None
        try:
            return self._named_best(pointer)
        except CheckpointError as error:
            found = None if name is None else self._best_of_saved(name)
            known = (
                "No other is known to be the best." if found is None else f"The best is {found.folder.name} instead."
            )
            self._warn(f"{error} {known}")
            return found

    def _named_best(self, pointer: Path) -> _Best:
        named = read_object(pointer)
        name, metric, value = (named.get(key) for key in ("path", "metric", "value"))
        if not isinstance(name, str) or not _FOLDER.fullmatch(name) or not isinstance(metric, str):
            raise CheckpointError(f"{pointer} is damaged: it names no checkpoint and metric.")
        folder = self.root / name
        problem = self._quick_problem(folder)
        if problem is not None:
            raise CheckpointError(f"{pointer} names {name}, but {problem}.")
        if type(value) is not float or read_metrics(folder).get(metric) != value:
            raise CheckpointError(f"{pointer} is damaged: its value is not the one that {name} has.")
        return _Best(folder, metric, value)

    def _best_of_saved(self, metric: str) -> _Best | None:
        best: _Best | None = None
        for folder in self._finished():
            value = read_metrics(folder).get(metric)
            if value is not None and (best is None or self._is_better(value, best.value)):
                best = _Best(folder, metric, value)
        return best

    def load(
        self,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        step: int | None = None,
        path: str | Path | None = None,
    ) -> dict[str, Any]:
        """Put weights and optimizer back in place and return the state that was saved, with its `step`.

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
        """The checkpoint that `load` loads: `path`, else that of `step`, else the newest that is undamaged. It warns about
        each one that it skips; CheckpointError if there is none."""
        is_asked_for = step is not None or path is not None
        for folder in self._candidates(step, path):
            problem = self._problem_with(folder)
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
            problem = self._quick_problem(folder)
            if problem is not None:
                self._warn(f"Skipping the checkpoint {folder}: {problem}.")
        return self._finished()

    def _problem_with(self, folder: Path) -> str | None:
        return problem_with(folder, checksums=True)

    def _quick_problem(self, folder: Path) -> str | None:
        """Of a folder under its own name; the content of its files is not read."""
        problem = problem_with(folder, checksums=False)
        if problem is None and _step_of(folder) != (read_manifest(folder) or {}).get("step"):
            return "its manifest.json is that of another step"
        return problem

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)

    def _folders(self) -> list[Path]:
        there = sorted(self.root.iterdir()) if self.root.is_dir() else []
        return [path for path in there if _FOLDER.fullmatch(path.name) and path.is_dir()]

    def _finished(self) -> list[Path]:
        """Complete checkpoints, the newest first."""
        complete = [folder for folder in self._folders() if self._quick_problem(folder) is None]
        return sorted(complete, key=lambda folder: (read_manifest(folder) or {}).get("serial", 0), reverse=True)


def _step_of(folder: Path) -> int:
    named = _FOLDER.fullmatch(folder.name)
    assert named is not None, "only called for folders that are named so"
    return int(named[1])
