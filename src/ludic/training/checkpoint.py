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
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from ludic.training.durable import finish_folder, problem_with, read_json, read_manifest, sync, write_json
from ludic.training.model_files import read_weights, write_weights
from ludic.training.rank_state import state_for
from ludic.training.sharded_files import is_sharded, read_shards
from ludic.training.state_files import (
    CheckpointError,
    check_state,
    load_optimizer,
    read_optimizer,
    write_optimizer,
    write_state,
)
from ludic.types import ConfigError

__all__ = ["CheckpointConfig", "CheckpointError", "CheckpointManager"]

logger = logging.getLogger(__name__)

UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_FOLDER = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d+)")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where, when and how much to save."""

    output_dir: str | Path
    every_n_steps: int = 0
    """0 saves only when asked to."""
    max_to_keep: int | None = 2
    """How many of the newest stay, beside the best; None keeps all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are never removed; 0 makes no such exception."""
    save_optimizer: bool = True
    """Without the optimizer a checkpoint is smaller, and a resumed run is not the same run."""
    best_metric: str | None = None
    """Name of the metric that decides which checkpoint is the best, such as "eval/accuracy"."""
    best_mode: Literal["max", "min"] = "max"
    max_shard_size: str = "5GB"
    """Larger weights are split into several files."""

    def __post_init__(self) -> None:
        if self.every_n_steps < 0:
            raise ConfigError(f"CheckpointConfig.every_n_steps={self.every_n_steps}; it is 0 (never) or more.")
        if self.max_to_keep is not None and self.max_to_keep < 1:
            raise ConfigError(f"CheckpointConfig.max_to_keep={self.max_to_keep}; keep at least 1, or None for all.")
        if self.keep_every < 0:
            raise ConfigError(f"CheckpointConfig.keep_every={self.keep_every}; it is 0 (no step is special) or more.")
        if self.keep_every and self.every_n_steps and self.keep_every % self.every_n_steps:
            raise ConfigError(
                f"CheckpointConfig.keep_every={self.keep_every} is no multiple of every_n_steps={self.every_n_steps}, so most of "
                "the steps to be kept would never be saved. Make it one."
            )
        if self.best_mode not in ("max", "min"):
            raise ConfigError(f"CheckpointConfig.best_mode={self.best_mode!r}; there are 'max' and 'min'.")


@dataclass(frozen=True, slots=True)
class _Saved:
    """A checkpoint that was finished."""

    folder: Path
    step: int
    serial: int
    """Counts saves: a run that went back to an older step and on from there has its newest checkpoint at a lower step."""


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
        when_durable: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write step_<step> and prune older ones. `state` may hold plain values and tensors, nested in lists and dicts.

        `when_durable` is told the folder once nothing can take it away any more: here before `save` returns, in managers that
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
        if when_durable is not None:
            when_durable(target)
        return target

    def finish(self) -> None:
        """Wait for what is being written. Here `save` has waited already."""

    def _next_serial(self) -> int:
        return 1 + max((saved.serial for saved in self._finished()), default=0)

    def _commit(self, unfinished: Path, target: Path, step: int, metrics: Mapping[str, float]) -> None:
        self._put_in_place(unfinished, target)
        self._point_to(target, step, metrics)
        self._prune()

    def _put_in_place(self, unfinished: Path, target: Path) -> None:
        replaced = self.root / f"{_REPLACED}{target.name}"
        if target.exists():  # a folder cannot replace another in one go; between the two renames the old one counts
            target.rename(replaced)
        unfinished.rename(target)
        sync(self.root)
        if replaced.exists():
            shutil.rmtree(replaced)

    def _point_to(self, target: Path, step: int, metrics: Mapping[str, float]) -> None:
        write_json(self.root / "latest.json", {"path": target.name, "step": step})
        name = self.config.best_metric
        if name is not None and name in metrics and self._is_best(float(metrics[name]), target):
            pointer = {"path": target.name, "step": step, "metric": name, "value": float(metrics[name])}
            write_json(self.root / "best.json", pointer)

    def _is_best(self, value: float, target: Path) -> bool:
        if not math.isfinite(value):
            return False
        best = self.best()
        # A step that is saved again is judged anew.
        if best is None or best == target:
            return True
        so_far = read_json(self.root / "best.json")
        if so_far["metric"] != self.config.best_metric:
            return True
        return bool(value > so_far["value"] if self.config.best_mode == "max" else value < so_far["value"])

    def _prune(self) -> None:
        if self.config.max_to_keep is None:
            return
        best = self.best()
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

    def steps(self) -> list[int]:
        """Of all complete checkpoints, the newest first."""
        return [saved.step for saved in self._finished()]

    def best(self) -> Path | None:
        """The checkpoint with the best metric so far."""
        pointer = self.root / "best.json"
        if not pointer.is_file():
            return None
        folder = self.root / read_json(pointer)["path"]
        problem = problem_with(folder, checksums=False)
        if problem is not None:
            logger.warning("best.json names %s, but %s.", folder, problem)
            return None
        return folder

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
        folder = self._chosen(step, path)
        state = state_for(folder)
        if is_sharded(folder):
            read_shards(model, optimizer, folder)
            return state
        read_weights(model, folder)
        if optimizer is not None:
            load_optimizer(optimizer, read_optimizer(folder), folder)
        return state

    def _chosen(self, step: int | None, path: str | Path | None) -> Path:
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
            problem = problem_with(folder, checksums=False)
            if problem is not None:
                self._warn(f"Skipping the checkpoint {folder}: {problem}.")
        return [saved.folder for saved in self._finished()]

    def _problem_with(self, folder: Path) -> str | None:
        return problem_with(folder, checksums=True) if folder.is_dir() else "it does not exist"

    def _warn(self, message: str) -> None:
        logger.warning("%s", message)

    def _folders(self) -> Iterator[Path]:
        if self.root.is_dir():
            yield from (path for path in sorted(self.root.iterdir()) if path.is_dir() and _FOLDER.fullmatch(path.name))

    def _finished(self) -> Iterator[_Saved]:
        """Complete checkpoints, the newest first."""
        found = []
        for folder in self._folders():
            manifest = read_manifest(folder)
            if manifest is not None and problem_with(folder, checksums=False) is None:
                found.append(_Saved(folder, manifest["step"], manifest["serial"]))
        yield from sorted(found, key=lambda saved: saved.serial, reverse=True)
