"""A sharded model and its optimizer as files that each rank writes its part of, and back at any number of ranks.

    step_000100/shards/          torch.distributed.checkpoint: one file per rank, .metadata says what is where
    step_000100/optimizer.pt     of the optimizer what is no tensor: groups, settings
    step_000100/rank_00000.pt    what belongs to one rank alone: its random generators
    config.json, or adapter_config.json and base_fingerprint.json; the state as in state_files

Tensors have the names that they have in the plain model; of a peft model only adapters are stored. Writing and reading
can do without torch.distributed: then one process has all the parts.
"""

import copy
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ludic.training.durable import read_json, read_manifest, write_json
from ludic.training.model_files import (
    ADAPTER_CONFIG,
    BASE_FINGERPRINT,
    adapter_folder,
    adapter_tensors,
    check_base,
    check_same_kind,
    check_same_scale,
    is_peft,
    is_transformers,
    uncompiled,
)
from ludic.training.state_files import CheckpointError, load_optimizer, read_optimizer, read_tensor_file
from ludic.types import ConfigError

SHARDS = "shards"
SHARDED = "sharded"
"""The manifest's `format` of such a checkpoint; that of one process has none."""

Group: TypeAlias = Any
"""A process group whose ranks write or read together; None is one process alone."""


def is_sharded(folder: Path) -> bool:
    return (read_manifest(folder) or {}).get("format") == SHARDED


# --- which tensors ------------------------------------------------------------------------------------------------


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> this rank's part, of all that has to be stored; a tied weight once, under its first name."""
    own: Any = uncompiled(model)
    if is_peft(own):
        return {
            f"model.{adapter}.{name}": tensor
            for adapter in own.peft_config
            for name, tensor in adapter_tensors(own, adapter).items()
        }
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in own.state_dict(keep_vars=True).items():  # without it, every name has a tensor of its own
        found.setdefault(id(tensor), (f"model.{name}", tensor.detach()))
    return dict(found.values())


def optimizer_tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """The same for what `state_dict` of an optimizer returns. Parameters go by their number, as in torch."""
    slots = {
        f"optimizer.state.{index}.{slot}": value
        for index, values in state["state"].items()
        for slot, value in values.items()
        if isinstance(value, Tensor)
    }
    return slots | {f"optimizer.copies.{index}": copied for index, copied in enumerate(state.get("copies", []))}


def optimizer_rest(state: Mapping[str, Any]) -> dict[str, Any]:
    """What is no tensor."""
    plain = {
        index: {slot: value for slot, value in values.items() if not isinstance(value, Tensor)}
        for index, values in state["state"].items()
    }
    return {**state, "state": plain, **({"copies": []} if "copies" in state else {})}


def staged(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in CPU memory, that training does not change."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


# --- writing ------------------------------------------------------------------------------------------------------


def write_shards(tensors: Mapping[str, Tensor], folder: Path, group: Group) -> None:
    """Every rank calls it, and when it returns all have written. What fails on one rank fails on all."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.save(
            dict(tensors),
            storage_writer=dcp.FileSystemWriter(folder / SHARDS, overwrite=False),
            process_group=group,
            no_dist=group is None,
        )
    except dcp.CheckpointException as error:  # it is no Exception
        reasons = "; ".join(f"rank {rank}: {_reason(failure)}" for rank, failure in error.failures.items())
        raise CheckpointError(reasons) from error


def _reason(failure: Any) -> str:
    """torch keeps each rank's exception together with its traceback."""
    error = failure[0]
    return f"{type(error).__name__}: {error}"


def write_description(model: torch.nn.Module, fingerprint: Mapping[str, str], folder: Path) -> None:
    """What says which model the tensors belong to."""
    own: Any = uncompiled(model)
    if is_peft(own):
        for adapter, config in own.peft_config.items():
            place = adapter_folder(folder, adapter)
            place.mkdir(exist_ok=True)
            _written_config(own, config).save_pretrained(place)
        write_json(folder / BASE_FINGERPRINT, dict(fingerprint))
    elif is_transformers(own):
        config = copy.deepcopy(own.config)
        config.architectures = [_class_name(own)]
        config.save_pretrained(folder)
        if own.can_generate():
            own.generation_config.save_pretrained(folder)


def _written_config(model: Any, config: Any) -> Any:
    """As peft's own `save_pretrained` does: with the name of the base, and ready for use rather than for training."""
    written = copy.copy(config)
    base = model.base_model.model
    written.base_model_name_or_path = written.base_model_name_or_path or base.config.to_dict().get("_name_or_path")
    written.inference_mode = True
    return written


def _class_name(model: Any) -> str:
    """Sharding makes a class of its own, derived from the model's."""
    from torch.distributed.fsdp import FSDPModule

    return next(kind.__name__ for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))


def write_rank_state(folder: Path, rank: int, state: Mapping[str, Any]) -> None:
    torch.save(dict(state), _rank_file(folder, rank))


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.pt"


# --- reading ------------------------------------------------------------------------------------------------------


def read_shards(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path, group: Group = None
) -> None:
    """Give model and optimizer what is stored. What does not fit exactly is an error, before anything is copied."""
    stored = _stored(folder)
    tensors = model_tensors(model)
    _check_model(uncompiled(model), tensors, stored, folder)
    if optimizer is None:
        _load(tensors, folder, group)
        return
    rest = read_optimizer(folder)
    slots = _room_for_optimizer(optimizer, stored, folder)
    _load(tensors | slots, folder, group)
    load_optimizer(optimizer, _optimizer_state(rest, slots), folder)


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors under a prefix ("model."), whole, in CPU memory, without it."""
    found = {
        name: torch.empty(about.shape, dtype=about.dtype)
        for name, about in _stored(folder).items()
        if name.startswith(prefix)
    }
    _load(found, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def read_whole_optimizer(folder: Path) -> dict[str, Any]:
    """What `state_dict` of the optimizer of one process would have returned."""
    slots = {f"optimizer.{name}": tensor for name, tensor in read_tensors(folder, "optimizer.").items()}
    return _optimizer_state(read_optimizer(folder), slots)


def read_rank_state(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has saved for itself; empty if there was no such rank."""
    file = _rank_file(folder, rank)
    state: dict[str, Any] = read_tensor_file(file) if file.exists() else {}
    return state


class _About:
    """What is known of a stored tensor without reading it."""

    def __init__(self, metadata: Any) -> None:
        self.shape: torch.Size = metadata.size
        self.dtype: torch.dtype = metadata.properties.dtype


def _stored(folder: Path) -> dict[str, _About]:
    metadata = _reader(folder).read_metadata()
    return {name: _About(about) for name, about in metadata.state_dict_metadata.items()}


def _load(targets: dict[str, Tensor], folder: Path, group: Group) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            dcp.load(targets, storage_reader=_reader(folder), process_group=group, no_dist=group is None)
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {_reason(failure)}" for rank, failure in error.failures.items())
        raise CheckpointError(f"Cannot read {folder}: {reasons}") from error


def _reader(folder: Path) -> Any:
    """torch's own, but .metadata is a pickle, and only what belongs into it is let in: loading runs no code."""
    import torch.distributed.checkpoint as dcp

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            with (folder / SHARDS / ".metadata").open("rb") as file:
                return _Metadata(file).load()

    return Reader(folder / SHARDS)


class _Metadata(pickle.Unpickler):
    _ALLOWED = (
        *(("torch.distributed.checkpoint.metadata", name) for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING",
        )),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("pathlib", "PosixPath"),
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype)
        if is_dtype or (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint's .metadata; it was not run.")


# --- the optimizer ------------------------------------------------------------------------------------------------


def _room_for_optimizer(
    optimizer: torch.optim.Optimizer, stored: Mapping[str, _About], folder: Path
) -> dict[str, Tensor]:
    """Tensors to read into: what has a parameter's shape is sharded as it is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    copies = optimizer_tensors(optimizer.state_dict())
    room = {}
    for name, about in stored.items():
        if not name.startswith("optimizer."):
            continue
        kind, index = name.split(".")[1:3]
        if kind == "state" and int(index) < len(parameters):
            like = parameters[int(index)]
        elif name in copies:
            like = copies[name]
        else:
            raise CheckpointError(_does_not_fit(folder, f"it has {name}, which this one has no parameter for"))
        is_whole = like.shape == about.shape
        if not is_whole and len(about.shape):
            raise CheckpointError(
                _does_not_fit(
                    folder, f"{name} is {tuple(about.shape)} there, for a parameter of {tuple(like.shape)} here"
                )
            )
        room[name] = (
            torch.empty_like(like, dtype=about.dtype) if is_whole else torch.empty(about.shape, dtype=about.dtype)
        )
    return room


def _does_not_fit(folder: Path, why: str) -> str:
    return (
        f"The optimizer in {folder} does not fit: {why}. Train the same parameters, in the same groups, as when it was saved, or "
        "pass optimizer=None to go on with a fresh one."
    )


def _optimizer_state(rest: dict[str, Any], slots: Mapping[str, Tensor]) -> dict[str, Any]:
    state = {index: dict(values) for index, values in rest["state"].items()}
    copies: dict[int, Tensor] = {}
    for name, tensor in slots.items():
        kind, index, *slot = name.split(".")[1:]
        if kind == "copies":
            copies[int(index)] = tensor
        else:
            state[int(index)][".".join(slot)] = tensor
    whole = {**rest, "state": state}
    return {**whole, "copies": [copies[index] for index in sorted(copies)]} if "copies" in rest else whole


# --- checks -------------------------------------------------------------------------------------------------------


def _check_model(model: Any, tensors: Mapping[str, Tensor], stored: Mapping[str, _About], folder: Path) -> None:
    if is_peft(model):
        _check_adapters(model, folder)
    names = {name for name in stored if name.startswith("model.")}
    differing = sorted(name.removeprefix("model.") for name in names ^ tensors.keys())
    if differing:
        raise ConfigError(
            f"{folder} is the checkpoint of another model: it holds {_saved_kind(folder)}, and this is {_kind(model)}. "
            f"{len(differing)} names are on one side only, such as {', '.join(differing[:3])}. {_advice(model, folder)}"
        )
    for name in names:
        check_same_kind(name.removeprefix("model."), stored[name], tensors[name], folder)
    if is_peft(model):
        check_base(model, folder)


def _check_adapters(model: Any, folder: Path) -> None:
    for adapter, config in model.peft_config.items():
        file = adapter_folder(folder, adapter) / ADAPTER_CONFIG
        if not file.is_file():
            raise ConfigError(
                f"There is no adapter {adapter!r} in {folder}: it holds {_saved_kind(folder)}, and this is {_kind(model)}. A "
                "checkpoint of a whole model is loaded before it is wrapped by peft."
            )
        check_same_scale(config.to_dict(), file)


def _saved_kind(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return "an adapter"
    config = folder / "config.json"
    return _described(read_json(config)) if config.is_file() else "a plain module"


def _kind(model: Any) -> str:
    if is_peft(model):
        return f"{_class_name(model.base_model.model)} with the adapters {', '.join(model.peft_config)}"
    if is_transformers(model):
        return _described({**model.config.to_dict(), "architectures": [_class_name(model)]})
    return f"a {_class_name(model)}"


def _described(config: Mapping[str, Any]) -> str:
    sizes = ", ".join(
        f"{name} {config[name]}"
        for name in ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
        if name in config
    )
    return f"a {(config.get('architectures') or ['model'])[0]} ({sizes})"


def _advice(model: Any, folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file() and not is_peft(model):
        return "Wrap the model with peft first: it is an adapter."
    if is_peft(model):
        return "Use the same LoraConfig (target_modules, modules_to_save) as when it was saved."
    return "Build the model as it was when it was saved."
