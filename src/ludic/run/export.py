"""`ludic export`: it finds the checkpoint, and for an adapter the base that it was trained on."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ludic.models import TINY
from ludic.models.loading import SMOLLM2, LoadedModel, load_model
from ludic.run.config.model import ModelSettings
from ludic.run.config.run_config import RunConfig
from ludic.run.folder import require_one_policy
from ludic.run.model import base_settings, checkpoint_in, load_policy
from ludic.run.names import CHECKPOINTS, CONFIG
from ludic.run.settings import read_toml
from ludic.training.checkpoint.export import check_target, export_checkpoint, export_model, write_pretrained
from ludic.training.checkpoint.manager import CheckpointConfig, CheckpointManager
from ludic.training.checkpoint.manifest import CheckpointError, read_object
from ludic.training.checkpoint.model_files import ADAPTER_CONFIG, BASE_FINGERPRINT, is_peft
from ludic.types import ConfigError, MissingExtra
from ludic.util.files import write_json

BASE = "base"
"""Folder, in the export of an adapter, for a base that no other machine has."""


def export_run(
    run: Path,
    target: Path,
    *,
    step: int | None = None,
    adapter: bool = False,
    base: str | None = None,
    with_optimizer: bool = False,
) -> list[str]:
    """Write the folder; returns the lines to print about it. `with_optimizer` keeps an adapter an adapter."""
    check_target(target)
    folder = _find_checkpoint(run, step)
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if adapter and not with_optimizer and not is_adapter:
        raise ConfigError(f"{folder} is no adapter: the run trained all weights. Leave --adapter out.")
    if is_adapter and not adapter and not with_optimizer:
        return _merged(folder, target, base)
    if is_adapter and not with_optimizer:
        return _adapter(folder, target, base)
    export_checkpoint(folder, target, with_optimizer=with_optimizer)
    return [f"{target}: the weights of {folder}.", *_how_to_load(target)]


def _find_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint of a run folder, or the one that the path itself is."""
    if step is None:
        folder = checkpoint_in(run)
        if folder is None:
            problem = "it holds none" if run.is_dir() else "it does not exist"
            raise ConfigError(
                f"There is no complete checkpoint in {run}: {problem}. Give the folder of a run or a checkpoint."
            )
        return folder
    require_one_policy(run)
    for root in (run / CHECKPOINTS, run):
        steps = CheckpointManager(CheckpointConfig(root)).steps()
        if step in steps:
            return root / f"step_{step:06d}"
        if steps:
            raise ConfigError(f"{run} has no checkpoint of step {step}. It has {', '.join(map(str, sorted(steps)))}.")
    raise ConfigError(f"--step {step}: {run} is not the folder of a run with checkpoints.")


# --- adapters --------------------------------------------------------------------------------------------------


def _merged(folder: Path, target: Path, base: str | None) -> list[str]:
    loaded = _with_adapter(folder, base)
    export_model(loaded.model.merge_and_unload(), loaded.tokenizer, folder, target)
    return [f"{target}: {folder}, the adapter merged into its base.", *_how_to_load(target)]


def _adapter(folder: Path, target: Path, base: str | None) -> list[str]:
    """The adapter names a base that other machines can load, or the base is written to its folder."""
    name = base or _name_elsewhere(folder)

    def name_base(place: Path) -> None:
        if name is None:
            write_pretrained(*_base_of(folder), place / BASE)
        for file in place.rglob(ADAPTER_CONFIG):
            write_json(file, {**read_object(file), "base_model_name_or_path": name or BASE})

    export_checkpoint(folder, target, finish=name_base)
    place = name if name is not None else str(target / BASE)
    only_here = "" if name is not None else ", which other machines do not have and which is there too"
    return [
        f"{target}: the adapter of {folder}, for the base {place}{only_here}.",
        f'Load it: PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("{place}"), "{target}")',
    ]


def _name_elsewhere(folder: Path) -> str | None:
    """The base's hub id; None where it is a file or folder of this machine, or made here."""
    run = _run_of(folder)
    if run is None:
        name = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or ""
        return None if not name or Path(name).exists() else name
    settings = base_settings(run.model)
    is_made_here = settings.model in (TINY, SMOLLM2) or Path(settings.model).suffix in (".gguf", ".json")
    is_local = Path(settings.model).exists() or settings.fork_from is not None
    return None if is_made_here or is_local else settings.model


def _with_adapter(folder: Path, base: str | None) -> LoadedModel:
    """The base with the adapter on it, checked to be the base that it was trained on."""
    run = None if base is not None else _run_of(folder)
    if run is not None:
        loaded = load_policy(_held_here(run.model, folder), seed=run.trainer.seed)
    else:
        loaded = _wrapped(folder, base or _named_base(folder))
    if not is_peft(loaded.model):
        raise ConfigError(f"{folder} is an adapter, but its run has no --lora-rank. Give --base.")
    CheckpointManager(CheckpointConfig(folder.parent)).load(model=loaded.model, path=folder)
    return loaded


def _wrapped(folder: Path, base: str) -> LoadedModel:
    try:
        from peft import PeftConfig, get_peft_model
    except ImportError as error:
        raise MissingExtra("lora", f"Merging the adapter {folder}") from error
    loaded = load_model(base, dtype=_dtype_of(folder), device="cpu")
    config = PeftConfig.from_pretrained(str(folder))
    config.inference_mode = False
    return replace(loaded, model=get_peft_model(loaded.model, config))


def _named_base(folder: Path) -> str:
    name = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not name:
        raise ConfigError(f"{folder} does not say what its adapter was trained on. Give --base.")
    return str(name)


def _base_of(folder: Path) -> tuple[Any, Any]:
    """The base as the adapter found it, and its tokenizer."""
    run = _run_of(folder)
    if run is None:
        loaded = load_model(_named_base(folder), dtype=_dtype_of(folder), device="cpu")
        return loaded.model, loaded.tokenizer
    # Wrapped and unwrapped again, and not just loaded: a fork may have replaced the base's weights.
    loaded = load_policy(_held_here(run.model, folder), seed=run.trainer.seed)
    return loaded.model.unload(), loaded.tokenizer


def _run_of(folder: Path) -> RunConfig | None:
    file = folder.resolve().parents[1] / CONFIG
    return read_toml(RunConfig, file) if file.is_file() else None


def _held_here(settings: ModelSettings, folder: Path) -> ModelSettings:
    """On the CPU, in the number format of the run: an adapter fits its base in no other."""
    name: Any = str(_dtype_of(folder)).removeprefix("torch.")
    return replace(settings, device="cpu", dtype=name)


def _dtype_of(folder: Path) -> torch.dtype:
    """Number format of the frozen weights, read from a fingerprint such as "(64, 32) torch.float32 1a2b3c4d"."""
    fingerprint = str(next(iter(read_object(folder / BASE_FINGERPRINT).values()), ""))
    found = getattr(torch, ["", "", *fingerprint.split()][-2].removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"{folder / BASE_FINGERPRINT} does not say what its base is.")
    return found


def _how_to_load(target: Path) -> list[str]:
    if not (target / "config.json").is_file():
        return ["It is a plain module: safetensors.torch.load_file reads model.safetensors."]
    return [f'Load it: AutoModelForCausalLM.from_pretrained("{target}"), or ludic eval --model {target}']
