"""A model's weights as files, and back into the same model, bit for bit.

A transformers model is written as `save_pretrained` writes it, so everything that reads Hugging Face folders reads a
checkpoint; a peft model as its adapter alone; any other module as one safetensors file. Reading copies into the tensors
that the model has, so whoever shares them (an engine, an optimizer) sees the new values; of a sharded model every rank
reads the same files and keeps its own part.
"""

import logging
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_model

from ludic.models.loading import no_progress_bar
from ludic.training.checkpoint.atomic import CheckpointError, listed_files, read_object, write_json
from ludic.types import ConfigError

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
BASE_FINGERPRINT = "base_fingerprint.json"
_SAMPLES = 16
_SCALE = ("r", "lora_alpha", "use_rslora", "alpha_pattern")
"""What LoRA's output is multiplied by comes from these; other kinds of adapters have none of them."""

Tensors: TypeAlias = Mapping[str, torch.Tensor]


def write_weights(model: torch.nn.Module, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """The files of the model, in a form that its kind of model is usually shared in."""
    own: Any = uncompiled(model)
    if is_peft(own):
        _write_adapters(own, folder)
    elif is_transformers(own):
        with no_progress_bar():
            own.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        save_model(own, str(folder / "model.safetensors"))


def read_weights(model: torch.nn.Module, folder: Path) -> None:
    """Give the model the weights that `write_weights` wrote. What does not fit exactly is an error."""
    model = uncompiled(model)
    if is_peft(model):
        _read_adapters(model, folder)
        return
    target = model.state_dict(keep_vars=True)
    stored = _stored_names(folder)
    if is_transformers(model) and _names_that_differ(stored, target):
        _copy_all(_converted(model, folder), target, folder)
    else:
        _copy_all(_Stored(stored), target, folder)


def is_peft(model: torch.nn.Module) -> bool:
    return _made_by("peft", "PeftModel", model)


def is_transformers(model: torch.nn.Module) -> bool:
    return _made_by("transformers", "PreTrainedModel", model)


def uncompiled(model: torch.nn.Module) -> Any:
    """The module itself: torch.compile wraps it and renames its weights."""
    return model._orig_mod if _made_by("torch._dynamo.eval_frame", "OptimizedModule", model) else model


def _made_by(package: str, name: str, thing: Any) -> bool:
    """Only a package that is loaded can have made it, so asking never loads one."""
    module = sys.modules.get(package)
    return module is not None and isinstance(thing, getattr(module, name))


# --- tensors of which a rank has a part -----------------------------------------------------------------------


def is_part(tensor: Any) -> bool:
    """Whether it is sharded: a DTensor."""
    return _made_by("torch.distributed.tensor", "DTensor", tensor)


def own_part(whole: torch.Tensor, like: Any) -> torch.Tensor:
    """What this rank keeps of a tensor that is sharded as `like` is. Nothing is sent: all ranks have the whole one."""
    if not is_part(like):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _whole(tensor: Any) -> Any:
    """Gathered from all ranks, which all ask for it. Parts that wait in CPU memory travel as the others do."""
    if not is_part(tensor):
        return tensor
    found: torch.Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return found


# --- whole models ---------------------------------------------------------------------------------------------


class _Stored(Mapping[str, torch.Tensor]):
    """The tensors of several files, read one at a time."""

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    def __getitem__(self, name: str) -> torch.Tensor:
        with _readable(self._files[name]), safe_open(self._files[name], framework="pt") as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextmanager
def _readable(file: Path) -> Iterator[None]:
    """What goes wrong inside is the file's fault."""
    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error


def _stored_names(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in listed_files(folder):
        if file.parent == folder and file.match("model*.safetensors"):
            with _readable(file), safe_open(file, framework="pt") as opened:
                found |= dict.fromkeys(opened.keys(), file)
    if not found:
        holds = sorted(path.name for path in folder.iterdir())
        advice = "Was it cleaned up?"
        if ADAPTER_WEIGHTS in holds:
            advice = "Wrap the model with peft first: it is an adapter."
        elif "shards" in holds:
            advice = f"Several ranks wrote it, each its part: `ludic export {folder} NEW_FOLDER` makes one that is read here."
        raise ConfigError(f"{folder} has no model*.safetensors; it holds {', '.join(holds)}. {advice}")
    return found


def _names_that_differ(stored: Mapping[str, Any], target: Tensors) -> list[str]:
    """Names on one side only. A tied weight is stored once, so one of its names is enough."""
    by_place: dict[Any, list[str]] = {}
    for name, tensor in target.items():
        by_place.setdefault(_place(name, tensor), []).append(name)
    missing = [name for names in by_place.values() if not any(name in stored for name in names) for name in names]
    return missing + [name for name in stored if name not in target]


def _place(name: str, tensor: torch.Tensor) -> Any:
    """The same for two names of one weight. A rank's part may be empty and have no address, but it is one object."""
    if is_part(tensor):
        return id(tensor)
    return (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else name


def _copy_all(source: Tensors, target: Tensors, folder: Path) -> None:
    differing = _names_that_differ(source, target)
    if differing:
        raise ConfigError(
            f"The weights in {folder} are not those of this model: {len(differing)} names are on one side only, such as "
            f"{', '.join(differing[:3])}. Build the model as it was when it was saved."
        )
    with torch.no_grad():
        for name in source:
            tensor = source[name]
            check_same_kind(name, tensor, target[name], folder)
            target[name].copy_(own_part(tensor, target[name]))


def check_same_kind(name: str, stored: Any, own: torch.Tensor, folder: Path) -> None:
    """`stored` is a tensor, or what is known of one: its shape and dtype."""
    if stored.shape != own.shape or stored.dtype != own.dtype:
        raise ConfigError(
            f"{name} in {folder} is {tuple(stored.shape)} {stored.dtype}, but {tuple(own.shape)} {own.dtype} in this model; "
            "converting would not restore what was saved. Load the model with the dtype and sizes it was trained with."
        )


def _converted(model: Any, folder: Path) -> Tensors:
    """Some families (mixtures of experts) are stored under other names than they have in memory; transformers knows."""
    with no_progress_bar():
        loaded, report = type(model).from_pretrained(
            folder, dtype="auto", use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    problems = {kind: sorted(map(str, names))[:3] for kind, names in report.items() if names}
    if problems:
        raise ConfigError(
            f"The weights in {folder} are not those of a {type(model).__name__}: {problems}. Build the model as it was when "
            "it was saved."
        )
    tensors: Tensors = loaded.state_dict()
    return tensors


# --- adapters -------------------------------------------------------------------------------------------------


def _write_adapters(model: Any, folder: Path) -> None:
    check_all_trained_is_in_an_adapter(model)
    # Whether embeddings were resized would be looked up on the hub; the fingerprint answers it without.
    model.save_pretrained(folder, save_embedding_layers=False)
    write_json(folder / BASE_FINGERPRINT, base_fingerprint(model))


def _read_adapters(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict

    for adapter in model.peft_config:
        file = adapter_folder(folder, adapter) / ADAPTER_WEIGHTS
        if not file.is_file():
            raise ConfigError(
                f"There is no adapter {adapter!r} in {folder}: {file.name} is not there. The model has the adapters "
                f"{', '.join(model.peft_config)}; a checkpoint of a whole model is loaded before it is wrapped by peft."
            )
        check_same_scale(model.peft_config[adapter].to_dict(), file.with_name(ADAPTER_CONFIG))
        with _readable(file):
            stored = load_file(file)
        own = adapter_tensors(model, adapter)
        differing = sorted(stored.keys() ^ own.keys())
        if differing:
            raise ConfigError(
                f"The adapter {adapter!r} in {folder} is another one: {', '.join(differing[:3])} are on one side only. Use "
                "the same LoraConfig (target_modules, modules_to_save) as when it was saved."
            )
        for name, tensor in stored.items():
            check_same_kind(name, tensor, own[name], folder)
        check_base(model, folder)
        if not any(map(is_part, own.values())):
            set_peft_model_state_dict(model, stored, adapter_name=adapter)
            continue
        with torch.no_grad():
            for name, tensor in stored.items():
                own[name].copy_(own_part(tensor, own[name]))


def adapter_folder(folder: Path, adapter: str) -> Path:
    """Where peft puts an adapter."""
    return folder if adapter == "default" else folder / adapter


def adapter_tensors(model: Any, adapter: str) -> dict[str, torch.Tensor]:
    """An adapter's weights under peft's names."""
    from peft import get_peft_model_state_dict

    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return found


def check_same_scale(own: Mapping[str, Any], file: Path) -> None:
    """The same tensors under another alpha are another adapter, and nothing else would tell."""
    saved = read_object(file)
    differing = [name for name in _SCALE if saved.get(name) != own.get(name)]
    if differing:
        values = ", ".join(f"{name} is {saved.get(name)} there and {own.get(name)} here" for name in differing)
        raise ConfigError(
            f"The adapter in {file.parent} was trained with another scale: {values}. Use the LoraConfig that it was saved with "
            "(ludic train: --lora-rank, --lora-alpha-mult)."
        )


def check_all_trained_is_in_an_adapter(model: Any) -> None:
    """Only adapters are written: a trained weight outside them would be lost."""
    written = {_address(tensor) for adapter in model.peft_config for tensor in adapter_tensors(model, adapter).values()}
    lost = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and _address(parameter) not in written
    ]
    if lost:
        raise ConfigError(
            f"{len(lost)} trained parameters belong to no adapter, such as {lost[0]}, and an adapter's checkpoint would lose "
            "them. Name their modules in LoraConfig.modules_to_save, or freeze them."
        )


def _address(tensor: Any) -> int:
    """Of an empty part it is 0; the ranks that hold something can tell."""
    own: torch.Tensor = tensor.to_local() if is_part(tensor) else tensor
    return own.data_ptr()


def base_fingerprint(model: torch.nn.Module) -> dict[str, str]:
    """Of all that is frozen. A sharded model's weights are gathered one by one, so every rank asks."""
    return _fingerprint(model, lambda parameter: not parameter.requires_grad)


def check_base(model: torch.nn.Module, folder: Path) -> None:
    """An adapter means something on top of its own base only."""
    file = folder / BASE_FINGERPRINT
    if not file.is_file():
        raise ConfigError(f"{folder} is not the checkpoint of an adapter: it has no {BASE_FINGERPRINT}.")
    saved = read_object(file)
    own = _fingerprint(model, lambda _: True)
    other = [name for name, value in saved.items() if own.get(name) != value]
    if other:
        raise ConfigError(
            f"The adapter in {folder} was trained on another base: {len(other)} of its {len(saved)} frozen weights differ here, "
            f"such as {other[0]}. Load the base that the run was started with, in the same dtype."
        )


def _fingerprint(model: torch.nn.Module, include: Callable[[torch.nn.Parameter], bool]) -> dict[str, str]:
    """Shape, dtype and a few values of each weight: enough to tell one model from another, and fast."""
    chosen = {
        name: parameter for name, parameter in model.named_parameters() if include(parameter) and parameter.numel()
    }
    if not chosen:
        return {}
    with torch.no_grad():
        rows_NK = torch.stack([_some_values(parameter) for parameter in chosen.values()]).cpu().numpy()
    return {
        name: f"{tuple(parameter.shape)} {parameter.dtype} {zlib.crc32(row_K.tobytes()):08x}"
        for (name, parameter), row_K in zip(chosen.items(), rows_NK, strict=True)
    }


def _some_values(parameter: torch.Tensor) -> torch.Tensor:
    flat = _whole(parameter.detach()).reshape(-1)
    # In whole numbers: a float32 cannot tell places beyond 2^24 apart, and rounds differently on another device.
    places_K = torch.arange(_SAMPLES, device=flat.device) * (len(flat) - 1) // (_SAMPLES - 1)
    return flat[places_K].float()
