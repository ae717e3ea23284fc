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

from ludic.training.checkpoint.atomic import CheckpointError, listed_files, read_object, write_json
from ludic.training.checkpoint.tensor_files import read_tensor_file
from ludic.types import ConfigError

OPTIMIZER_FILE = "optimizer.pt"
STATE_FILE = "trainer_state.json"
TENSOR_STATE_FILE = "state.pt"
_HOW = ("foreach", "fused", "capturable")
"""Settings of an optimizer that say how to compute, which this machine decides, and not what."""


# --- state --------------------------------------------------------------------------------------------------------


def write_state(folder: Path, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    plain = {name: value for name, value in state.items() if _is_exact_in_json(value)}
    tensors = {name: value for name, value in state.items() if name not in plain}
    if tensors:
        torch.save(tensors, folder / TENSOR_STATE_FILE)
    write_json(folder / STATE_FILE, {"step": step, "metrics": _finite(metrics), "state": plain})


def read_state(folder: Path) -> dict[str, Any]:
    """What was written, with its `step`."""
    file, tensors = folder / STATE_FILE, folder / TENSOR_STATE_FILE
    saved = read_object(file)
    step, state = saved.get("step"), saved.get("state")
    if type(step) is not int or type(state) is not dict or type(saved.get("metrics")) is not dict:
        raise CheckpointError(f"{file} cannot be read: it does not have the step, the state and the metrics of a run.")
    return {**state, **(_read_table(tensors) if tensors in listed_files(folder) else {}), "step": step}


def read_saved_metrics(folder: Path) -> dict[str, float]:
    """Those that are finite."""
    metrics = read_object(folder / STATE_FILE).get("metrics")
    found = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in found if type(value) in (int, float)}


def _read_table(file: Path, *, mapped: bool = False) -> dict[str, Any]:
    found = read_tensor_file(file, mapped=mapped)
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} cannot be read: it holds a {type(found).__name__}, and no dictionary.")
    return found


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
    elif isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_conj() or value.is_neg():
            raise ConfigError(f"state[{path}] is a tensor of an unusual kind; give state[{path}].to_dense().clone().")
    elif not (value is None or type(value) in (str, int, float, bool)):
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
    if file not in listed_files(folder):
        raise CheckpointError(
            f"{folder} holds no optimizer (save_optimizer=False). Pass optimizer=None to go on with a fresh one."
        )
    state = _read_table(file, mapped=mapped)
    if type(state.get("state")) is not dict or type(state.get("param_groups")) is not list:
        raise CheckpointError(f"{file} cannot be read: it holds no state of an optimizer.")
    return state


def load_optimizer(optimizer: torch.optim.Optimizer, state: dict[str, Any], folder: Path) -> None:
    try:
        optimizer.load_state_dict(_computed_as_here(optimizer, state))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:  # torch trusts what it is given
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
