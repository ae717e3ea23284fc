"""The parts of a checkpoint that are not weights: the optimizer's state, and whatever else a run needs to go on.

What JSON gives back exactly is written as JSON, for anybody to read; the rest as tensor files, which are read without
running code.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ludic.training.durable import read_json, write_json
from ludic.types import ConfigError, LudicError

OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
TENSOR_STATE_FILE = "state.pt"
_HOW = ("foreach", "fused", "capturable")
"""Settings of an optimizer that say how to compute, which this machine decides, and not what."""


class CheckpointError(LudicError, RuntimeError):
    """A checkpoint cannot be written or read."""


# --- state --------------------------------------------------------------------------------------------------------


def write_state(folder: Path, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    plain = {name: value for name, value in state.items() if _is_exact_in_json(value)}
    tensors = {name: value for name, value in state.items() if name not in plain}
    if tensors:
        torch.save(tensors, folder / TENSOR_STATE_FILE)
    write_json(folder / STATE_FILE, {"step": step, "metrics": _finite(metrics), "state": plain})


def read_state(folder: Path) -> dict[str, Any]:
    """What was written, with its `step`."""
    saved = read_json(folder / STATE_FILE)
    tensors = folder / TENSOR_STATE_FILE
    state = {**saved["state"], **(read_tensor_file(tensors) if tensors.exists() else {})}
    return {**state, "step": saved["step"]}


def read_tensor_file(path: Path, *, mapped: bool = False) -> Any:
    """`mapped` tensors are read from the disk as they are used; they are for copying from."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)


def check_state(step: int, state: Mapping[str, Any]) -> None:
    """Refuse what could not be read back, before anything is written."""
    if state.get("step", step) != step:
        raise ConfigError(
            f"The checkpoint is of step {step}, but its state says step {state['step']}. Leave it out there."
        )
    for name, value in state.items():
        if not _is_exact_in_json(value):
            _check_storable(name, value)


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


# --- optimizer ----------------------------------------------------------------------------------------------------


def write_optimizer(state: Mapping[str, Any], folder: Path) -> None:
    torch.save(state, folder / OPTIMIZER_FILE)


def read_optimizer(folder: Path, *, mapped: bool = False) -> dict[str, Any]:
    file = folder / OPTIMIZER_FILE
    if not file.exists():
        raise CheckpointError(
            f"{folder} holds no optimizer (save_optimizer=False). Pass optimizer=None to go on with a fresh one."
        )
    state: dict[str, Any] = read_tensor_file(file, mapped=mapped)
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], folder: Path) -> None:
    try:
        optimizer.load_state_dict(_computed_as_here(optimizer, state))
    except ValueError as error:
        raise CheckpointError(
            f"The optimizer in {folder} does not fit: {error}. Train the same parameters, in the same groups, as when it was "
            "saved, or pass optimizer=None to go on with a fresh one."
        ) from error


def _computed_as_here(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """What was saved on a CPU, or unsharded, may have been computed in a way that does not work here."""
    own_groups = optimizer.param_groups
    if len(own_groups) != len(state["param_groups"]):
        return state  # torch will say so
    groups = [
        {**saved, **{name: own[name] for name in _HOW if name in own}}
        for saved, own in zip(state["param_groups"], own_groups, strict=True)
    ]
    return {**state, "param_groups": groups}
