"""Checkpoints: everything a run needs to go on, written so that no crash can spoil what was there before.

    output_dir/step_000100/   weights (see model_files), tokenizer, optimizer.pt, trainer_state.json, state.pt, manifest.json
    output_dir/latest.json    {"path": "step_000100", "step": 100}; best.json likewise, with the metric

A checkpoint is written next to its place, synced, and renamed. One that is incomplete or damaged is never loaded.
"""

import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ludic.training.checkpoint.atomic import (
    CheckpointError,
    finish_folder,
    problem_with,
    read_manifest,
    read_object,
    sync,
    write_json,
)
from ludic.training.checkpoint.model_files import read_weights, write_weights
from ludic.training.checkpoint.rank_state import state_for
from ludic.training.checkpoint.shard_files import is_sharded, read_shards
from ludic.training.checkpoint.state_files import (
    check_state,
    load_optimizer,
    read_optimizer,
    read_saved_metrics,
    write_optimizer,
    write_state,
)
from ludic.training.config import CheckpointConfig

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointManager"]

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_BEST = "best.json"
_FOLDER = re.compile(rf"(?:{re.escape(_REPLACED)})?step_([0-9]{{1,18}})")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint that was finished."""

    folder: Path
    step: int
    serial: int
    """Counts saves: a run that went back to an older step and on from there has its newest checkpoint at a lower step."""


@dataclass(frozen=True, slots=True)
class _Best:
    """The checkpoint that best.json names."""

    folder: Path
    step: int
    metric: str
    value: float


class CheckpointManager:
    """The checkpoints of one run. One process writes; any number may read."""

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

        `on_committed` is told the folder once nothing can take it away any more: here before `save` returns, in managers that
        write in the background later. Whatever goes wrong, the checkpoints that were there stay as they were.
        """
        target = self.root / f"step_{step:06d}"
        unfinished = self.root / f"{UNFINISHED}{target.name}"
        check_state(step, state or {})
        try:
            self._begin(unfinished)
            write_weights(model, unfinished, max_shard_size=self.config.max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            if optimizer is not None and self.config.save_optimizer:
                write_optimizer(optimizer.state_dict(), unfinished)
            write_state(unfinished, step, state or {}, metrics or {})
            finish_folder(unfinished, {"step": step, "serial": self._next_serial()})
            self._commit(unfinished, target, step, metrics or {})
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            raise CheckpointError(self._why_not_written(target, error)) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        if on_committed is not None:
            on_committed(target)
        return target

    def finish(self) -> None:
        """Wait for what is being written. Here `save` has waited already."""

    def _next_serial(self) -> int:
        return 1 + max((saved.serial for saved in self._finished()), default=0)

    def _commit(self, unfinished: Path, target: Path, step: int, metrics: Mapping[str, float]) -> None:
        best = self._best()
        self._put_in_place(unfinished, target)
        write_json(self.root / "latest.json", {"path": target.name, "step": step})
        best = self._note_best(best, target, step, metrics)
        self._prune(None if best is None else best.folder)

    def _put_in_place(self, unfinished: Path, target: Path) -> None:
        replaced = self.root / f"{_REPLACED}{target.name}"
        if target.exists():  # a folder cannot replace another in one go; between the two renames the old one counts
            target.rename(replaced)
        unfinished.rename(target)
        sync(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _note_best(self, best: _Best | None, target: Path, step: int, metrics: Mapping[str, float]) -> _Best | None:
        """Write which checkpoint is the best, now that `target` is there and `best` was the best before."""
        name = self.config.best_metric
        if name is None:
            return best
        value = float(metrics.get(name, math.nan))
        is_saved_again = best is not None and best.folder == target  # it is judged by its new value
        if math.isfinite(value) and (
            best is None or is_saved_again or best.metric != name or self._is_better(value, best.value)
        ):
            best = _Best(target, step, name, value)
        elif is_saved_again:
            best = self._best_of_saved(name)
        if best is not None:
            pointer = {"path": best.folder.name, "step": best.step, "metric": best.metric, "value": best.value}
            write_json(self.root / _BEST, pointer)
        return best

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.config.best_mode == "max" else value < other

    def _prune(self, best: Path | None) -> None:
        if self.config.max_to_keep is None:
            return
        for saved in list(self._finished())[self.config.max_to_keep :]:
            if saved.folder != best and not self._is_kept_for_good(saved.step):
                # Renamed first: half a folder under its own name would look like damage.
                doomed = self.root / f"{UNFINISHED}{saved.folder.name}"
                saved.folder.rename(doomed)
                shutil.rmtree(doomed)

    def _is_kept_for_good(self, step: int) -> bool:
        return self.config.keep_every > 0 and step % self.config.keep_every == 0

    def _begin(self, unfinished: Path) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        unfinished.mkdir()

    def _remove_leftovers(self) -> None:
        """What a killed writer left behind."""
        for leftover in self.root.glob(f"{UNFINISHED}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        for replaced in self.root.glob(f"{_REPLACED}*"):
            target = self.root / replaced.name.removeprefix(_REPLACED)
            shutil.rmtree(replaced) if target.exists() else replaced.rename(target)

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
        newest = next(self._finished(), None)
        return None if newest is None else newest.folder

    def is_empty(self) -> bool:
        """Whether no checkpoint was ever finished here; a damaged one is one."""
        return next(self._folders(), None) is None

    def steps(self) -> list[int]:
        """Of all complete checkpoints, the newest first."""
        return [saved.step for saved in self._finished()]

    def best(self) -> Path | None:
        """The checkpoint with the best metric so far."""
        best = self._best()
        return None if best is None else best.folder

    def _best(self) -> _Best | None:
        """What best.json says. If that cannot be true, the best of the checkpoints that are there, by their own metrics."""
        pointer = self.root / _BEST
        if not pointer.exists():
            return None
        try:
            return self._named_best(pointer)
        except CheckpointError as error:
            name = self.config.best_metric
            found = None if name is None else self._best_of_saved(name)
            instead = (
                "No other is known to be the best." if found is None else f"The best is {found.folder.name} instead."
            )
            self._warn(f"{error} {instead}")
            return found

    def _named_best(self, pointer: Path) -> _Best:
        named = read_object(pointer)
        folder, metric, value = (named.get(key) for key in ("path", "metric", "value"))
        if not isinstance(folder, str) or not _FOLDER.fullmatch(folder) or not isinstance(metric, str):
            raise CheckpointError(f"{pointer} is damaged: it names no checkpoint and metric.")
        problem = self._quick_problem(self.root / folder)
        if problem is not None:
            raise CheckpointError(f"{pointer} names {folder}, but {problem}.")
        if type(value) is not float or read_saved_metrics(self.root / folder).get(metric) != value:
            raise CheckpointError(f"{pointer} is damaged: its value is not the one that {folder} has.")
        return _Best(self.root / folder, _step_of(self.root / folder), metric, value)

    def _best_of_saved(self, name: str) -> _Best | None:
        best: _Best | None = None
        for saved in self._finished():
            value = read_saved_metrics(saved.folder).get(name)
            if value is not None and (best is None or self._is_better(value, best.value)):
                best = _Best(saved.folder, saved.step, name, value)
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
        folder = self.find(step=step, path=path)
        state = state_for(folder)
        if is_sharded(folder):
            read_shards(model, optimizer, folder)
            return state
        read_weights(model, folder)
        if optimizer is not None:
            load_optimizer(optimizer, read_optimizer(folder), folder)
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
                there = ", ".join(saved.folder.name for saved in self._finished()) or "none"
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
        return [saved.folder for saved in self._finished()]

    def _problem_with(self, folder: Path) -> str | None:
        return problem_with(folder, checksums=True) if folder.is_dir() else "it does not exist"

    def _quick_problem(self, folder: Path) -> str | None:
        """Of a folder under its own name; the content of its files is not read."""
        problem = problem_with(folder, checksums=False)
        if problem is None and _step_of(folder) != (read_manifest(folder) or {}).get("step"):
            return "its manifest.json is that of another step"
        return problem

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)

    def _folders(self) -> Iterator[Path]:
        if self.root.is_dir():
            yield from (path for path in sorted(self.root.iterdir()) if _FOLDER.fullmatch(path.name) and path.is_dir())

    def _finished(self) -> Iterator[_Saved]:
        """Complete checkpoints, the newest first."""
        found = []
        for folder in self._folders():
            manifest = read_manifest(folder)
            if manifest is not None and self._quick_problem(folder) is None:
                found.append(_Saved(folder, manifest["step"], manifest["serial"]))
        yield from sorted(found, key=lambda saved: saved.serial, reverse=True)


def _step_of(folder: Path) -> int:
    named = _FOLDER.fullmatch(folder.name)
    assert named is not None, "only called for folders that are named so"
    return int(named[1])
