"""A sharded model and its optimizer as files that each rank writes its part of, and back at any number of ranks.

    step_000100/shards/          torch.distributed.checkpoint: one file per rank, .metadata says what is where
    step_000100/optimizer.pt     of the optimizer what is no tensor: groups, settings
    step_000100/rank_00000.pt    what belongs to one rank alone: its random generators
    config.json, or adapter_config.json and base_fingerprint.json; the state as in state_files

Tensors have the names that they have in the plain model; of a peft model only adapters are stored. Writing and reading
can do without torch.distributed: then one process has all the parts.
"""

import copy
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ludic.training.checkpoint.atomic import (
    SHARDED,
    CheckpointError,
    listed_files,
    read_manifest,
    read_object,
    write_json,
)
from ludic.training.checkpoint.model_files import (
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
from ludic.training.checkpoint.state_files import load_optimizer, read_optimizer
from ludic.training.checkpoint.tensor_files import Record, numbers, read_pickle, read_tensor, read_tensor_file
from ludic.types import ConfigError

SHARDS = "shards"
_INDEX = ".metadata"
_LARGEST_INDEX = 1 << 30

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
        _load(tensors, stored, folder, group)
        return
    rest = read_optimizer(folder)
    slots = _room_for_optimizer(optimizer, stored, folder)
    _load(tensors | slots, stored, folder, group)
    load_optimizer(optimizer, _optimizer_state(rest, slots), folder)


def read_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """All tensors under a prefix ("model."), whole, in CPU memory, without it."""
    stored = _stored(folder)
    found = {
        name: torch.zeros(about.shape, dtype=about.dtype) for name, about in stored.items() if name.startswith(prefix)
    }
    _load(found, stored, folder, None)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def read_whole_optimizer(folder: Path) -> dict[str, Any]:
    """What `state_dict` of the optimizer of one process would have returned."""
    slots = {f"optimizer.{name}": tensor for name, tensor in read_tensors(folder, "optimizer.").items()}
    return _optimizer_state(read_optimizer(folder), slots)


def read_rank_state(folder: Path, rank: int) -> dict[str, Any]:
    """What a rank has saved for itself; empty if there was no such rank."""
    file = _rank_file(folder, rank)
    state = read_tensor_file(file) if file in listed_files(folder) else {}
    if not isinstance(state, dict):
        raise CheckpointError(f"{file} cannot be read: it holds a {type(state).__name__}, and no dictionary.")
    return state


def _load(targets: dict[str, Tensor], stored: "Mapping[str, _About]", folder: Path, group: Group) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is what is meant
            dcp.load(
                targets,
                storage_reader=_reader(stored, folder),
                planner=_planner(),
                process_group=group,
                no_dist=group is None,
            )
    except dcp.CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {_reason(failure)}" for rank, failure in error.failures.items())
        raise CheckpointError(f"Cannot read {folder}: {reasons}") from error


def _reader(stored: "Mapping[str, _About]", folder: Path) -> Any:
    """torch's own, which knows who needs what; but index and tensors are read by us, since torch unpickles them."""
    import torch.distributed.checkpoint as dcp
    from torch.futures import Future

    class Reader(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return _as_metadata(stored)

        def read_data(self, plan: Any, planner: Any) -> Any:
            for item in plan.items:
                index = item.storage_index
                tensor = _read_chunk(stored[index.fqn], tuple(index.offset), folder / SHARDS)
                for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    tensor = tensor.narrow(dim, start, length)
                target = planner.resolve_tensor(item).detach()
                target.copy_(tensor)
                planner.commit_tensor(item, target)
            done: Future[None] = Future()
            done.set_result(None)
            return done

    return Reader(folder / SHARDS)


def _planner() -> Any:
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

    class TensorsOnly(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: Any) -> None:
            # torch would unpickle it
            raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor; it was not read.")

    return TensorsOnly()


# --- the index: which tensor is where -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk of a tensor lies."""

    sizes: tuple[int, ...]
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _About:
    """What is known of a stored tensor without reading it."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: dict[tuple[int, ...], _Place]
    """By where they begin in the tensor."""


def _stored(folder: Path) -> dict[str, _About]:
    """The index, checked: torch pickles it, so everything in it could have been written by a stranger."""
    file = folder / SHARDS / _INDEX
    try:
        if file.stat().st_size > _LARGEST_INDEX:
            raise ValueError("it is too large for an index")
        index = _state_of(read_pickle(file.read_bytes()), "Metadata")
        places = _places(index["storage_data"])
        stored = {_text(name): _about(name, about, places) for name, about in index["state_dict_metadata"].items()}
        _check_files(places.values(), folder)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}" if isinstance(error, LookupError) else str(error)
        raise CheckpointError(f"{file} cannot be read: {reason}. Nothing in it was run.") from error
    return stored


def _state_of(value: Any, name: str) -> Any:
    """What an object of torch.distributed.checkpoint consists of."""
    if type(value) is not Record or not value.name.startswith("torch.distributed.checkpoint.") or value.arguments:
        raise ValueError(f"{getattr(value, 'name', type(value).__name__)} stands where {name} belongs")
    if value.name.rpartition(".")[2] != name:
        raise ValueError(f"{value.name} stands where {name} belongs")
    return value.state


def _places(storage_data: Any) -> dict[tuple[str, tuple[int, ...]], Any]:
    """(tensor, where the chunk begins in it) -> (file, offset, length)."""
    found: dict[tuple[str, tuple[int, ...]], Any] = {}
    for key, value in storage_data.items():
        index, info = _state_of(key, "MetadataIndex"), _state_of(value, "_StorageInfo")
        file, (offset, length) = _text(info["relative_path"]), numbers((info["offset"], info["length"]))
        if "/" in file or file in ("", ".", ".."):
            raise ValueError(f"{file!r} is not a file of the folder {SHARDS}")
        if info.get("transform_descriptors"):
            raise ValueError("its tensors are encoded in a way that Ludic does not write")
        found[_text(index["fqn"]), _size(index["offset"])] = (file, offset, length)
    if len(found) != len(storage_data):
        raise ValueError("it names a chunk twice")
    return found


def _about(name: str, about: Any, places: Mapping[tuple[str, tuple[int, ...]], Any]) -> _About:
    tensor = _state_of(about, "TensorStorageMetadata")
    dtype = _state_of(tensor["properties"], "TensorProperties")[0]
    shape = _size(tensor["size"])
    chunks: dict[tuple[int, ...], _Place] = {}
    if type(dtype) is not torch.dtype:
        raise ValueError(f"{name} has no dtype")
    for each in tensor["chunks"]:
        chunk = _state_of(each, "ChunkStorageMetadata")
        begins, sizes = _size(chunk["offsets"]), _size(chunk["sizes"])
        file, offset, length = places[name, begins]
        ends = zip(begins, sizes, shape, strict=True)
        if begins in chunks or any(first + count > whole for first, count, whole in ends):
            raise ValueError(f"the chunks of {name} do not fit into it")
        if math.prod(sizes) * dtype.itemsize > length:
            raise ValueError(f"{length} bytes cannot hold {sizes} of {name}")
        chunks[begins] = _Place(sizes, file, offset, length)
    if sum(math.prod(place.sizes) for place in chunks.values()) != math.prod(shape):
        raise ValueError(f"the chunks of {name} do not make up the whole")
    return _About(torch.Size(shape), dtype, chunks)


def _check_files(places: Any, folder: Path) -> None:
    """Each range lies in a file of this checkpoint, and no byte belongs to two: what is allocated is there to be read."""
    belongs = set(listed_files(folder))
    used: dict[str, int] = {}
    for name, offset, length in sorted(places):
        file = folder / SHARDS / name
        if file not in belongs or file.is_symlink():
            raise ValueError(f"{name!r} is not a file of this checkpoint")
        if offset < used.get(name, 0) or offset + length > file.stat().st_size:
            raise ValueError(
                f"bytes {offset} to {offset + length} of {name!r} are not there, or belong to another tensor"
            )
        used[name] = offset + length


def _size(value: Any) -> tuple[int, ...]:
    if type(value) is not Record or value.name != "torch.Size" or len(value.arguments) != 1:
        raise ValueError(f"{value!r} is no size")
    return numbers(value.arguments[0])


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} stands where a name belongs")
    return value


def _read_chunk(about: _About, begins: tuple[int, ...], folder: Path) -> Tensor:
    place = about.chunks[begins]
    tensor = read_tensor(folder / place.file, offset=place.offset, length=place.length)
    if tensor.shape != place.sizes or tensor.dtype != about.dtype:
        raise CheckpointError(
            f"{folder / place.file} has {tuple(tensor.shape)} {tensor.dtype} where the index says {place.sizes} {about.dtype}."
        )
    return tensor


def _as_metadata(stored: Mapping[str, _About]) -> Any:
    """As torch wants it; made here, of names and numbers."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, Any] = {
        name: TensorStorageMetadata(
            properties=TensorProperties(dtype=about.dtype),
            size=about.shape,
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(begins), sizes=torch.Size(place.sizes))
                for begins, place in about.chunks.items()
            ],
        )
        for name, about in stored.items()
    }
    storage = {
        MetadataIndex(name, begins): _StorageInfo(place.file, place.offset, place.length)
        for name, about in stored.items()
        for begins, place in about.chunks.items()
    }
    return Metadata(state_dict_metadata=tensors, storage_data=storage)


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
            torch.zeros_like(like, dtype=about.dtype) if is_whole else torch.zeros(about.shape, dtype=about.dtype)
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
    return _described(read_object(config)) if config.is_file() else "a plain module"


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
