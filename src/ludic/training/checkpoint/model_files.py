"""A model's weights as files, and back into the same model, bit for bit.

One process writes a transformers model as `save_pretrained` does, so that programs for Hugging Face folders read a checkpoint; a
peft model as its adapter alone; any other module as one safetensors file. Several ranks write their parts into the rank files,
and the configuration next to them. Reading copies into the model's own tensors, so an engine or an optimizer that shares them
sees the new values; of a sharded model every rank reads its part.
"""

import copy
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors.torch import save_model
from torch import Tensor

from ludic.models.loading import no_progress_bar
from ludic.training.checkpoint.manifest import listed_files, read_object
from ludic.training.checkpoint.rank_files import StoredTensors, WholeTensors, is_sharded, rank_files
from ludic.types import ConfigError
from ludic.util.files import write_json

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE_FINGERPRINT = "base_fingerprint.json"
MODEL = "model."
"""Prefix of weights in the rank files; for those of an adapter it is "model.<adapter>."."""
_SAMPLES = 16
_SCALE = ("r", "lora_alpha", "use_rslora", "alpha_pattern")
"""Settings of LoRA that determine its scale; other kinds of adapters have none of them."""

Matched: TypeAlias = tuple[StoredTensors | WholeTensors, dict[str, Tensor]]
"""Stored tensors, and the model's tensors that they are copied into."""


def is_peft(model: torch.nn.Module) -> bool:
    return _made_by("peft", "PeftModel", model)


def _is_transformers(model: torch.nn.Module) -> bool:
    return _made_by("transformers", "PreTrainedModel", model)


def uncompiled(model: torch.nn.Module) -> Any:
    """The module itself: torch.compile wraps it and renames its weights."""
    return model._orig_mod if _made_by("torch._dynamo.eval_frame", "OptimizedModule", model) else model


def _made_by(package: str, name: str, thing: Any) -> bool:
    """Never loads the package: only a loaded one can have made the thing."""
    module = sys.modules.get(package)
    return module is not None and isinstance(thing, getattr(module, name))


# --- writing ------------------------------------------------------------------------------------------------------


def check_storable(model: torch.nn.Module) -> None:
    """Only adapters of a peft model are written: a trained weight outside them would be lost."""
    own = uncompiled(model)
    if not is_peft(own):
        return
    written = {_address(tensor) for adapter in own.peft_config for tensor in _adapter_tensors(own, adapter).values()}
    trained = {name: parameter for name, parameter in own.named_parameters() if parameter.requires_grad}
    lost = [name for name, parameter in trained.items() if _address(parameter) not in written]
    if lost:
        raise ConfigError(
            f"{len(lost)} trained parameters belong to no adapter, such as {lost[0]}, and an adapter's checkpoint would lose "
            "them. Name their modules in LoraConfig.modules_to_save, or freeze them."
        )


def _address(tensor: Any) -> int:
    """0 for an empty part of a sharded tensor."""
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own.data_ptr()


def write_weights(model: torch.nn.Module, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Write the files of a model that one process holds, in the form that its kind of model is usually shared in."""
    own: Any = uncompiled(model)
    if is_peft(own):
        # peft would look up on the hub whether embeddings were resized; the fingerprint answers it without.
        own.save_pretrained(folder, save_embedding_layers=False)
        write_json(folder / BASE_FINGERPRINT, base_fingerprint(own))
    elif _is_transformers(own):
        with no_progress_bar():
            own.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        save_model(own, str(folder / "model.safetensors"))


def model_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name → this rank's part, of all weights that ranks write; a tied weight once, under its first name."""
    own: Any = uncompiled(model)
    if is_peft(own):
        return {
            f"{MODEL}{adapter}.{name}": tensor
            for adapter in own.peft_config
            for name, tensor in _adapter_tensors(own, adapter).items()
        }
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in own.state_dict(keep_vars=True).items():  # tied weights are one object only where vars are kept
        found.setdefault(id(tensor), (f"{MODEL}{name}", tensor.detach()))
    return dict(found.values())


def write_description(model: torch.nn.Module, fingerprint: Mapping[str, str], folder: Path) -> None:
    """Write which model the tensors in the rank files belong to."""
    own: Any = uncompiled(model)
    if is_peft(own):
        for adapter, config in own.peft_config.items():
            written = copy.copy(config)  # as peft's own `save_pretrained` writes it: with its base, and for use
            name = own.base_model.model.config.to_dict().get("_name_or_path")
            written.base_model_name_or_path = written.base_model_name_or_path or name
            written.inference_mode = True
            place = _adapter_folder(folder, adapter)
            place.mkdir(exist_ok=True)
            written.save_pretrained(place)
        write_json(folder / BASE_FINGERPRINT, dict(fingerprint))
    elif _is_transformers(own):
        config = copy.deepcopy(own.config)
        config.architectures = [_class_name(own)]
        config.save_pretrained(folder)
        if own.can_generate():
            own.generation_config.save_pretrained(folder)


def _class_name(model: Any) -> str:
    """Sharding derives a class from the model's; its name is not the one that transformers knows."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return next(kind.__name__ for kind in type(model).__mro__ if fsdp is None or not issubclass(kind, fsdp.FSDPModule))


def _adapter_folder(folder: Path, adapter: str) -> Path:
    """The folder in which peft puts an adapter."""
    return folder if adapter == "default" else folder / adapter


def _adapter_tensors(model: Any, adapter: str) -> dict[str, Tensor]:
    """An adapter's weights under peft's names."""
    from peft import get_peft_model_state_dict

    found: dict[str, Tensor] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return found


# --- reading ------------------------------------------------------------------------------------------------------


def read_weights(model: torch.nn.Module, folder: Path) -> None:
    """Give the model the weights of a checkpoint. What does not fit exactly is an error, before anything is copied."""
    matching_weights(model, folder)()


def matching_weights(model: torch.nn.Module, folder: Path) -> Callable[[], None]:
    """Compare the stored weights with the model; returns a function that copies them."""
    own: Any = uncompiled(model)
    pairs: list[Matched]
    if is_peft(own):
        pairs = [_matching_adapter(own, adapter, folder) for adapter in own.peft_config]
        _check_base(own, folder)
    else:
        pairs = [_matching_model(own, folder)]

    def copy_all() -> None:
        for stored, targets in pairs:
            stored.copy_into(targets)

    return copy_all


def stored_weights(folder: Path, adapter: str | None = None) -> StoredTensors:
    """The weights in a checkpoint, of the whole model or of one adapter, whether one process or several ranks wrote them."""
    of_ranks = StoredTensors(rank_files(folder), MODEL if adapter is None else f"{MODEL}{adapter}.")
    if of_ranks:
        return of_ranks
    listed = listed_files(folder)
    if adapter is None:
        files = [file for file in listed if file.parent == folder and file.match("model*.safetensors")]
    else:
        files = [file for file in listed if file == _adapter_folder(folder, adapter) / ADAPTER_WEIGHTS]
    return StoredTensors(files)


def _matching_model(model: Any, folder: Path) -> Matched:
    own, listed = model.state_dict(keep_vars=True), listed_files(folder)
    stored: StoredTensors | WholeTensors = stored_weights(folder)
    if not stored or folder / ADAPTER_CONFIG in listed:
        is_adapter = "Wrap the model with peft first: it is an adapter."
        raise ConfigError(
            f"{folder} has no weights of a whole model; it holds {', '.join(file.name for file in listed)}. "
            f"{is_adapter if folder / ADAPTER_CONFIG in listed else 'Give the folder of a checkpoint that has them.'}"
        )
    differing = _names_that_differ(stored, own)
    if differing and _is_transformers(model) and any(file.match("model*.safetensors") for file in listed):
        stored, unmatched = _converted(model, folder)
        differing = unmatched or _names_that_differ(stored, own)
    if differing:
        raise ConfigError(
            f"The weights in {folder} are not those of {_kind(model)}: it holds {_saved_kind(folder)}, and {len(differing)} names "
            f"are there or in this model only, such as {', '.join(differing[:3])}. Build the model as it was when it was saved."
        )
    return _same_kind(stored, own, folder)


def _names_that_differ(stored: Mapping[str, Any], own: Mapping[str, Tensor]) -> list[str]:
    """Names on one side only. A tied weight is stored once, so one of its names is enough."""
    by_place: dict[Any, list[str]] = {}
    for name, tensor in own.items():
        by_place.setdefault(_place(name, tensor), []).append(name)
    missing = [name for names in by_place.values() if not any(name in stored for name in names) for name in names]
    return missing + [name for name in stored if name not in own]


def _place(name: str, tensor: Tensor) -> Any:
    """Equal for two names of one weight. A rank's part may be empty and have no address, but it is one object."""
    if is_sharded(tensor):
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name


def _converted(model: Any, folder: Path) -> tuple[WholeTensors, list[str]]:
    """The weights under their names in memory, which differ for some families (mixtures of experts), as transformers converts
    them; and the names that it could not match."""
    with no_progress_bar():
        loaded, report = type(model).from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    return WholeTensors(loaded.state_dict()), sorted(str(name) for names in report.values() for name in names)


def _matching_adapter(model: Any, adapter: str, folder: Path) -> Matched:
    stored, file = stored_weights(folder, adapter), _adapter_folder(folder, adapter) / ADAPTER_CONFIG
    if not stored or file not in listed_files(folder):
        raise ConfigError(
            f"There is no adapter {adapter!r} in {folder}: it holds {_saved_kind(folder)}, and this is {_kind(model)}. A "
            "checkpoint of a whole model is loaded before it is wrapped by peft."
        )
    _check_scale(model.peft_config[adapter].to_dict(), file)
    own = _adapter_tensors(model, adapter)
    differing = sorted(stored.keys() ^ own.keys())
    if differing:
        raise ConfigError(
            f"The adapter {adapter!r} in {folder} is another one: {', '.join(differing[:3])} are on one side only. Use "
            "the same LoraConfig (target_modules, modules_to_save) as when it was saved."
        )
    return _same_kind(stored, own, folder)


def _same_kind(stored: Any, own: Mapping[str, Tensor], folder: Path) -> Matched:
    """Both, once shapes and dtypes agree."""
    for name, tensor in stored.items():
        if tensor.shape != own[name].shape or tensor.dtype != own[name].dtype:
            raise ConfigError(
                f"{name} in {folder} is {tuple(tensor.shape)} {tensor.dtype}, but {tuple(own[name].shape)} {own[name].dtype} in "
                "this model; converting would not restore what was saved. Load the model with the dtype and sizes it was "
                "trained with."
            )
    return stored, {name: own[name] for name in stored}


def _check_scale(own: Mapping[str, Any], file: Path) -> None:
    """The same tensors with another alpha are another adapter; no other check notices it."""
    saved = read_object(file)
    differing = [name for name in _SCALE if saved.get(name) != own.get(name)]
    if differing:
        values = ", ".join(f"{name} is {saved.get(name)} there and {own.get(name)} here" for name in differing)
        raise ConfigError(
            f"The adapter in {file.parent} was trained with another scale: {values}. Use the LoraConfig that it was saved with "
            "(ludic train: --lora-rank, --lora-alpha-mult)."
        )


# --- which model --------------------------------------------------------------------------------------------------


def _check_base(model: torch.nn.Module, folder: Path) -> None:
    """An adapter fits its own base only."""
    file = folder / BASE_FINGERPRINT
    if file not in listed_files(folder):
        raise ConfigError(f"{folder} is not the checkpoint of an adapter: it has no {BASE_FINGERPRINT}.")
    saved = read_object(file)
    own = base_fingerprint(model, frozen_only=False)
    other = [name for name, value in saved.items() if own.get(name) != value]
    if other:
        raise ConfigError(
            f"The adapter in {folder} was trained on another base: {len(other)} of its {len(saved)} frozen weights differ here, "
            f"such as {other[0]}. Load the base that the run was started with, in the same dtype."
        )


def base_fingerprint(model: torch.nn.Module, *, frozen_only: bool = True) -> dict[str, str]:
    """Shape, dtype and a few values of each weight: enough to tell one model from another, and fast.

    Weights of a sharded model are gathered one by one, so every rank calls it.
    """
    chosen = {name: p for name, p in model.named_parameters() if p.numel() and not (frozen_only and p.requires_grad)}
    if not chosen:
        return {}
    with torch.no_grad():
        rows_NK = torch.stack([_some_values(parameter.detach()) for parameter in chosen.values()]).cpu().numpy()
    return {
        name: f"{tuple(parameter.shape)} {parameter.dtype} {zlib.crc32(row_K.tobytes()):08x}"
        for (name, parameter), row_K in zip(chosen.items(), rows_NK, strict=True)
    }


def _some_values(parameter: Any) -> Tensor:
    if is_sharded(parameter):  # offloaded parts are moved to the device first
        parameter = parameter.to(parameter.device_mesh.device_type).full_tensor()
    flat = parameter.reshape(-1)
    # Integer arithmetic: a float32 is not exact beyond 2^24, and rounds differently on another device.
    places_K = torch.arange(_SAMPLES, device=flat.device) * (len(flat) - 1) // (_SAMPLES - 1)
    found: Tensor = flat[places_K].float()
    return found


def _saved_kind(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return "an adapter"
    config = folder / "config.json"
    return _described(read_object(config)) if config.is_file() else "a plain module"


def _kind(model: Any) -> str:
    if is_peft(model):
        return f"{_class_name(model.base_model.model)} with the adapters {', '.join(model.peft_config)}"
    if _is_transformers(model):
        return _described({**model.config.to_dict(), "architectures": [_class_name(model)]})
    return f"a {_class_name(model)}"


def _described(config: Mapping[str, Any]) -> str:
    shown = ("num_hidden_layers", "hidden_size", "vocab_size", "tie_word_embeddings")
    return f"a {architecture(config)} ({', '.join(f'{name} {config[name]}' for name in shown if name in config)})"


def architecture(config: Mapping[str, Any]) -> str:
    """The class of a transformers model, by its config.json."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "model"
