"""Checkpoints: everything a run needs to go on, written so that no crash can spoil what was there before.

    output_dir/step_000100/   weights (see model_files), tokenizer, optimizer.pt, trainer_state.json, state.pt, manifest.json
    output_dir/latest.json    {"path": "step_000100", "step": 100}; best.json likewise, with the metric

A checkpoint is written next to its place, synced, and renamed. One that is incomplete or damaged is never loaded.
"""

import logging
import math
import re
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError

from ludic.training.durable import finish_folder, problem_with, read_json, read_manifest, sync, write_json
from ludic.training.model_files import read_weights, write_weights
from ludic.types import ConfigError, LudicError

logger = logging.getLogger(__name__)

OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
TENSOR_STATE_FILE = "state.pt"
_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"
_FOLDER = re.compile(rf"(?:{re.escape(_REPLACED)})?step_(\d+)")


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint cannot be written or read."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where, when and how much to save."""

    output_dir: str | Path
    every_n_steps: int = 0
    """0 saves only when asked to."""
    max_to_keep: int | None = 2
    """How many of the newest stay, beside the best; None keeps all."""
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
    ) -> Path:
        """Write step_<step> and prune older ones. `state` may hold plain values and tensors, nested in lists and dicts.

        Whatever goes wrong, the checkpoints that were there stay as they were.
        """
        target = self.root / f"step_{step:06d}"
        unfinished = self.root / f"{_UNFINISHED}{target.name}"
        plain, tensors = _split_state(step, state or {})
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self._remove_leftovers()
            unfinished.mkdir()
            write_weights(model, unfinished, max_shard_size=self.config.max_shard_size)
            if tokenizer is not None:
                tokenizer.save_pretrained(unfinished)
            if optimizer is not None and self.config.save_optimizer:
                _torch_save(optimizer.state_dict(), unfinished / OPTIMIZER_FILE)
            if tensors:
                _torch_save(tensors, unfinished / TENSOR_STATE_FILE)
            write_json(unfinished / STATE_FILE, {"step": step, "metrics": _finite(metrics or {}), "state": plain})
            serial = 1 + max((saved.serial for saved in self._finished()), default=0)
            finish_folder(unfinished, {"step": step, "serial": serial})
            self._put_in_place(unfinished, target)
            self._point_to(target, step, metrics or {})
            self._prune()
        except (
            OSError,
            RuntimeError,
            SafetensorError,
        ) as error:  # torch and safetensors have their own for a full disk
            raise CheckpointError(self._why_not_written(target, error)) from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return target

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
            if saved.folder != best:
                # Renamed first: half a folder under its own name would look like damage.
                doomed = self.root / f"{_UNFINISHED}{saved.folder.name}"
                saved.folder.rename(doomed)
                shutil.rmtree(doomed)

    def _remove_leftovers(self) -> None:
        """What a killed writer left behind."""
        for leftover in self.root.glob(f"{_UNFINISHED}*"):
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
        read_weights(model, folder)
        if optimizer is not None:
            _read_optimizer(optimizer, folder)
        saved = read_json(folder / STATE_FILE)
        tensors = folder / TENSOR_STATE_FILE
        state = {**saved["state"], **(_torch_load(tensors) if tensors.exists() else {})}
        return {**state, "step": saved["step"]}

    def _chosen(self, step: int | None, path: str | Path | None) -> Path:
        if step is None and path is None:
            return self._newest_undamaged()
        folder = self.root / f"step_{step:06d}" if path is None else Path(path)
        problem = "it does not exist" if not folder.is_dir() else problem_with(folder, checksums=True)
        if problem is not None:
            there = ", ".join(saved.folder.name for saved in self._finished()) or "none"
            raise CheckpointError(f"Cannot load {folder}: {problem}. Complete checkpoints in {self.root}: {there}.")
        return folder

    def _newest_undamaged(self) -> Path:
        for folder in self._folders():
            problem = problem_with(folder, checksums=False)
            if problem is not None:
                logger.warning("Skipping the checkpoint %s: %s.", folder, problem)
        for saved in self._finished():
            problem = problem_with(saved.folder, checksums=True)
            if problem is None:
                return saved.folder
            logger.warning("Skipping the checkpoint %s: %s.", saved.folder, problem)
        raise CheckpointError(f"There is no undamaged checkpoint in {self.root}. Start the run without resuming.")

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


# --- the parts of a checkpoint --------------------------------------------------------------------------------


def _torch_save(value: Any, path: Path) -> None:
    torch.save(value, path)


def _torch_load(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _read_optimizer(optimizer: torch.optim.Optimizer, folder: Path) -> None:
    file = folder / OPTIMIZER_FILE
    if not file.exists():
        raise CheckpointError(
            f"{folder} holds no optimizer (save_optimizer=False). Pass optimizer=None to go on with a fresh one."
        )
    try:
        optimizer.load_state_dict(_torch_load(file))
    except ValueError as error:
        raise CheckpointError(
            f"The optimizer in {folder} does not fit: {error}. Train the same parameters, in the same groups, as when it was "
            "saved, or pass optimizer=None to go on with a fresh one."
        ) from error


def _split_state(step: int, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what JSON gives back exactly, what goes into a tensor file)."""
    if state.get("step", step) != step:
        raise ConfigError(
            f"The checkpoint is of step {step}, but its state says step {state['step']}. Leave it out there."
        )
    plain = {name: value for name, value in state.items() if _is_exact_in_json(value)}
    tensors = {name: value for name, value in state.items() if name not in plain}
    for name, value in tensors.items():
        _check_storable(name, value)
    return plain, tensors


def _is_exact_in_json(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_exact_in_json, value.values()))
    if type(value) is list:
        return all(map(_is_exact_in_json, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def _check_storable(path: str, value: Any) -> None:
    """A tensor file is read without running code, so it holds these types only."""
    if type(value) in (dict, OrderedDict):
        for key, inner in value.items():
            _check_storable(f"{path}[{key!r}]", inner)
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            _check_storable(f"{path}[{index}]", inner)
    elif not (value is None or isinstance(value, torch.Tensor) or type(value) in (str, int, float, bool)):
        raise ConfigError(
            f"state[{path}] is a {type(value).__name__}; a checkpoint holds plain values, lists, tuples, dicts and tensors. "
            "Turn it into one of these (array.tolist(), torch.from_numpy(array))."
        )


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
