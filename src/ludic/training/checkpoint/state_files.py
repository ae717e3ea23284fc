"""The content of a checkpoint besides weights: the state of the run, random generators among it, and the optimizer.

Plain values of the state are in trainer_state.json, for people to read; all else is in the rank files. Another number of ranks
can read a checkpoint: the optimizer is divided as the parameters are, and new ranks get new random generators. A position in
the data cannot be divided: some samples would come twice and others never.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.training.checkpoint.manifest import CheckpointError, read_object
from ludic.training.checkpoint.rank_files import StoredTensors, encoded, num_ranks, rank_files, read_values
from ludic.training.checkpoint.rng import rng_of_new_rank
from ludic.types import ConfigError
from ludic.util.files import write_json

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
RNG = "rng"
OPTIMIZER = "optimizer"
_HOW = ("foreach", "fused", "capturable")
"""Settings of an optimizer that depend on the machine."""


# --- state --------------------------------------------------------------------------------------------------------


def write_plain_state(folder: Path, step: int, state: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
    """Write the values that JSON stores exactly; `encoded_state` has the rest."""
    plain = {name: value for name, value in state.items() if _is_exact_in_json(value)}
    finite = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
    write_json(folder / STATE_FILE, {"step": step, "metrics": finite, "state": plain})


def encoded_state(
    step: int, shared: Mapping[str, Any], own: Mapping[str, Any], optimizer: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """The rest for a rank file; `shared` is what rank 0 writes for all, `optimizer` what its `state_dict` returned."""
    said = shared.get("step", step)
    if said != step:
        raise ConfigError(f"The checkpoint is of step {step}, but its state says step {said}. Leave it out there.")
    rest = {name: value for name, value in shared.items() if not _is_exact_in_json(value)}
    tables = {"shared": rest, "own": own}
    return encoded(tables if optimizer is None else {**tables, OPTIMIZER: _without_tensors(optimizer)})


def _is_exact_in_json(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_exact_in_json, value.values()))
    if type(value) is list:
        return all(map(_is_exact_in_json, value))
    if type(value) is float:
        return math.isfinite(value)
    return value is None or type(value) in (str, int, bool)


def read_metrics(folder: Path) -> dict[str, float]:
    """The finite metrics of a checkpoint."""
    metrics = read_object(folder / STATE_FILE).get("metrics")
    found = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in found if type(value) in (int, float)}


def read_state(folder: Path, *, rank: int = 0, world_size: int = 1, per_rank: Sequence[str] = (RNG,)) -> dict[str, Any]:
    """The state in `folder` that this rank continues from, with its `step`; `per_rank` names what each rank has for itself."""
    saved = read_object(folder / STATE_FILE)
    step, plain = saved.get("step"), saved.get("state")
    if type(step) is not int or type(plain) is not dict or type(saved.get("metrics")) is not dict:
        raise CheckpointError(
            f"{folder / STATE_FILE} cannot be read: it does not have the step, state and metrics of a run."
        )
    num_saved = num_ranks(folder)
    first = read_values(folder, 0)
    of_first, own = _table(first, "own"), _table(read_values(folder, rank) if rank else first, "own")
    shared = {**plain, **_table(first, "shared"), "step": step}
    is_split = world_size > 1
    divided = [n for n in of_first if n != RNG and (num_saved != world_size or (is_split and n not in per_rank))]
    if divided:
        raise CheckpointError(
            f"{folder} was saved by {num_saved} ranks, each with its own {', '.join(divided)}, which cannot be divided again. "
            f"Resume with {num_saved} ranks that read their own data (now: {world_size}), or start a new run from the weights."
        )
    if undivided := [name for name in per_rank if name != RNG and name in shared and is_split]:
        raise CheckpointError(
            f"{folder} has one {', '.join(undivided)} for all ranks, but each of the {world_size} ranks here has its own. Let "
            "rank 0 read the data for all, as when it was saved, or start a new run from the weights."
        )
    if num_saved == world_size:
        return {**shared, **own}
    if rank == 0:
        logger.warning(
            "%s was saved by %d ranks and there are %d now; random numbers will differ.", folder, num_saved, world_size
        )
    before = of_first.get(RNG, shared.get(RNG))
    if before is not None and not own and rank:
        own = {RNG: rng_of_new_rank(before, rank)}
    return {**shared, **own}


def _table(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name, {})
    if type(found) is not dict:
        raise CheckpointError(
            f"A rank file cannot be read: its {name!r} is a {type(found).__name__}, and no dictionary."
        )
    return found


# --- optimizer ----------------------------------------------------------------------------------------------------


def optimizer_tensors(state: Mapping[str, Any] | None) -> dict[str, Tensor]:
    """Name -> this rank's part, of what `state_dict` of an optimizer returned. Parameters go by their number, as in torch."""
    if state is None:
        return {}
    slots = {
        f"{OPTIMIZER}.state.{index}.{slot}": value
        for index, values in state["state"].items()
        for slot, value in values.items()
        if isinstance(value, Tensor)
    }
    return slots | {f"{OPTIMIZER}.copies.{index}": copied for index, copied in enumerate(state.get("copies", []))}


def _without_tensors(state: Mapping[str, Any]) -> dict[str, Any]:
    """The rest of it: groups, settings, and the values of each parameter's state that are not tensors."""
    plain = {
        index: {slot: value for slot, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {**state, "state": plain, **({"copies": []} if "copies" in state else {})}


class StoredOptimizer:
    """The optimizer of a checkpoint, checked against the one that gets it: first `copy`, then `load`."""

    def __init__(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._optimizer = folder, optimizer
        self._values = read_optimizer_values(folder)
        self._tensors = StoredTensors(rank_files(folder), f"{OPTIMIZER}.")
        self._targets = self._empty_targets()

    def copy(self) -> None:
        """Read this rank's part."""
        self._tensors.copy_into(self._targets)

    def load(self) -> None:
        """Give it to the optimizer."""
        try:
            self._optimizer.load_state_dict(self._computed_as_here(self._state_dict()))
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:  # torch trusts its argument
            raise self._misfit(str(error)) from error

    def _empty_targets(self) -> dict[str, Tensor]:
        """Tensors to read into: what has a parameter's shape is sharded as it is."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        copies = self._optimizer.state_dict().get("copies", [])
        like = {f"copies.{index}": copied for index, copied in enumerate(copies)}
        like |= {f"state.{index}": parameter for index, parameter in enumerate(parameters)}
        targets = {}
        for name, about in self._tensors.items():
            own = like.get(".".join(name.split(".")[:2]))
            if own is None:
                raise self._misfit(f"it has {name}, which this one has no parameter for")
            if own.shape != about.shape and len(about.shape):
                raise self._misfit(f"{name} is {tuple(about.shape)} there, for a parameter of {tuple(own.shape)} here")
            is_alike = own.shape == about.shape
            targets[name] = torch.zeros_like(own, dtype=about.dtype) if is_alike else torch.zeros((), dtype=about.dtype)
        return targets

    def _state_dict(self) -> dict[str, Any]:
        whole = {**self._values, "state": {index: dict(values) for index, values in self._values["state"].items()}}
        copies = {}
        for name, tensor in self._targets.items():
            kind, index, *slot = name.split(".")
            if kind == "copies":
                copies[int(index)] = tensor
            else:
                whole["state"][int(index)][".".join(slot)] = tensor
        return {**whole, "copies": [copies[index] for index in sorted(copies)]} if "copies" in whole else whole

    def _computed_as_here(self, state: dict[str, Any]) -> dict[str, Any]:
        """With this machine's settings of how to compute: those of a CPU, or of unsharded weights, may not work here."""
        own_groups = self._optimizer.param_groups
        if len(own_groups) != len(state["param_groups"]):
            return state  # torch raises
        groups = [
            {**saved, **{name: own[name] for name in _HOW if name in own}}
            for saved, own in zip(state["param_groups"], own_groups, strict=True)
        ]
        return {**state, "param_groups": groups}

    def _misfit(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"The optimizer in {self._folder} does not fit: {why}. Train the same parameters, in the same groups, as when it was "
            "saved, or pass optimizer=None to continue with a fresh one."
        )


def read_optimizer_values(folder: Path) -> dict[str, Any]:
    """Groups and settings of the optimizer, without its tensors."""
    values = read_values(folder, 0).get(OPTIMIZER)
    if values is None:
        raise CheckpointError(
            f"{folder} holds no optimizer (save_optimizer=False), so training cannot go on as it was. Start a new run from its "
            "weights (`ludic train … --model RUN`), or pass optimizer=None in code."
        )
    if type(values) is dict and type(values.get("state")) is dict and type(values.get("param_groups")) is list:
        return values
    raise CheckpointError(f"The optimizer in {folder} cannot be read: it has no state and groups.")
