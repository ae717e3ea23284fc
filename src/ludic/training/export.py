"""From a sharded checkpoint to one that everybody reads: `from_pretrained`, vLLM, peft, and CheckpointManager.

The model has to fit into the memory of this machine, not onto a GPU; no torch.distributed is needed.
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ludic.models.loading import no_progress_bar
from ludic.training.durable import finish_folder, problem_with, read_json, read_manifest, sync
from ludic.training.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ludic.training.rank_state import state_for
from ludic.training.sharded_files import SHARDS, is_sharded, read_tensors, read_whole_optimizer
from ludic.training.state_files import (
    OPTIMIZER_FILE,
    STATE_FILE,
    TENSOR_STATE_FILE,
    CheckpointError,
    read_state,
    write_optimizer,
    write_state,
)
from ludic.types import ConfigError


def export_checkpoint(
    folder: str | Path, target: str | Path, *, with_optimizer: bool = False, max_shard_size: str = "5GB"
) -> Path:
    """Write the checkpoint in `folder` as one process would have written it; `target` must not exist.

    With the optimizer, a run of one process can go on from it: `Trainer(resume_from=target)`.
    """
    folder, target = Path(folder), Path(target)
    _check(folder, target)
    unfinished = target.with_name(f".unfinished-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        _copy_descriptions(folder, unfinished)
        _write_weights(folder, unfinished, max_shard_size)
        _write_rest(folder, unfinished, with_optimizer)
        manifest = read_manifest(folder) or {}
        finish_folder(unfinished, {"step": manifest["step"], "serial": manifest["serial"]})
        unfinished.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return target


def _check(folder: Path, target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists already; give the name of a folder to be made.")
    problem = problem_with(folder, checksums=True) if folder.is_dir() else "it does not exist"
    if problem is not None:
        raise CheckpointError(f"Cannot export {folder}: {problem}.")
    if not is_sharded(folder):
        raise CheckpointError(f"{folder} was written by one process and needs no export: it is in that format.")


def _copy_descriptions(folder: Path, target: Path) -> None:
    """Configuration and tokenizer; not what is written anew."""
    manifest = read_manifest(folder) or {}
    for name in manifest["files"]:
        is_written_anew = name in (OPTIMIZER_FILE, STATE_FILE, TENSOR_STATE_FILE) or name.startswith("rank_")
        if name.startswith(f"{SHARDS}/") or is_written_anew:
            continue
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(folder / name, target / name)


def _write_weights(folder: Path, target: Path, max_shard_size: str) -> None:
    adapters = sorted(target.rglob(ADAPTER_CONFIG))
    if adapters:
        for config in adapters:
            place = config.parent
            adapter = "default" if place == target else place.name
            save_file(read_tensors(folder, f"model.{adapter}."), place / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    elif (folder / "config.json").is_file():
        with no_progress_bar():
            _rebuilt(folder).save_pretrained(target, max_shard_size=max_shard_size)
    else:
        save_file(read_tensors(folder, "model."), target / "model.safetensors", metadata={"format": "pt"})


def _rebuilt(folder: Path) -> Any:
    """The transformers model; it knows under which names its family is shared."""
    import transformers

    name = read_json(folder / "config.json")["architectures"][0]
    if name not in dir(transformers):
        raise ConfigError(f"{folder} holds a {name}, which transformers {transformers.__version__} does not have.")
    with torch.device("meta"):
        model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(folder))
    model.load_state_dict(read_tensors(folder, "model."), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of a {name}, such as {missing[0]}.")
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _write_rest(folder: Path, target: Path, with_optimizer: bool) -> None:
    # A run that goes on needs its own position in the data; for weights alone it does not matter.
    state = state_for(folder) if with_optimizer else read_state(folder)
    step = state.pop("step")
    metrics = read_json(folder / STATE_FILE)["metrics"]
    write_state(target, step, state, {name: value for name, value in metrics.items() if value is not None})
    if with_optimizer:
        write_optimizer(read_whole_optimizer(folder), target)
