"""From a checkpoint to a folder that other programs read: `from_pretrained`, vLLM, peft, and CheckpointManager.

`export_checkpoint` puts the parts of several ranks together and leaves an adapter an adapter; `export_model` writes a model
that is in memory, such as a base with its adapter merged. `ludic export` calls both. The model has to fit into the memory of
this machine, not onto a GPU; no torch.distributed is needed.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ludic.models.loading import no_progress_bar
from ludic.training.checkpoint.atomic import (
    CheckpointError,
    finish_folder,
    problem_with,
    read_manifest,
    read_object,
    sync,
    write_json,
)
from ludic.training.checkpoint.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from ludic.training.checkpoint.rank_state import state_for
from ludic.training.checkpoint.shard_files import SHARDS, is_sharded, read_tensors, read_whole_optimizer
from ludic.training.checkpoint.state_files import (
    OPTIMIZER_FILE,
    STATE_FILE,
    TENSOR_STATE_FILE,
    read_optimizer,
    read_saved_metrics,
    read_state,
    write_optimizer,
    write_state,
)
from ludic.types import ConfigError


def export_checkpoint(
    folder: str | Path,
    target: str | Path,
    *,
    with_optimizer: bool = False,
    max_shard_size: str = "5GB",
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint in `folder` as one process would have written it; `target` must not exist.

    With the optimizer, a run of one process can go on from it: `Trainer(resume_from=target)`. `finish` may change what was
    written before it counts.
    """
    folder, target = Path(folder), Path(target)
    with _complete_or_absent(folder, target) as unfinished:
        _copy_files(folder, unfinished)
        if is_sharded(folder):
            _write_weights(folder, unfinished, max_shard_size)
        _write_rest(folder, unfinished, with_optimizer)
        if finish is not None:
            finish(unfinished)
    return target


def export_model(
    model: Any, tokenizer: Any, folder: str | Path, target: str | Path, *, max_shard_size: str = "5GB"
) -> Path:
    """Write a transformers model, which was made of the checkpoint in `folder`, with its tokenizer."""
    folder, target = Path(folder), Path(target)
    with _complete_or_absent(folder, target) as unfinished:
        write_pretrained(model, tokenizer, unfinished, max_shard_size=max_shard_size)
        saved = read_object(folder / STATE_FILE)
        write_json(unfinished / STATE_FILE, {**saved, "state": {}})
    return target


def write_pretrained(model: Any, tokenizer: Any, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """As `save_pretrained` writes it: weights, configuration, generation settings, tokenizer, chat template."""
    with no_progress_bar():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@contextmanager
def _complete_or_absent(folder: Path, target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it becomes `target` when all of it is written and synced."""
    _check(folder, target)
    unfinished = target.with_name(f".unfinished-{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        manifest = read_manifest(folder) or {}
        finish_folder(unfinished, {"step": manifest["step"], "serial": manifest["serial"]})
        unfinished.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def check_target(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists already; give the name of a folder to be made.")


def _check(folder: Path, target: Path) -> None:
    check_target(target)
    problem = problem_with(folder, checksums=True) if folder.is_dir() else "it does not exist"
    if problem is not None:
        raise CheckpointError(f"Cannot export {folder}: {problem}.")


def _copy_files(folder: Path, target: Path) -> None:
    """Configuration, tokenizer and weights that are whole; not what is written below."""
    manifest = read_manifest(folder) or {}
    for name in manifest["files"]:
        is_state = name in (OPTIMIZER_FILE, STATE_FILE, TENSOR_STATE_FILE) or name.startswith("rank_")
        if name.startswith(f"{SHARDS}/") or is_state:
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

    name = str((read_object(folder / "config.json").get("architectures") or ["model without a name"])[0])
    kind = getattr(transformers, name, None) if name in dir(transformers) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(f"{folder} holds a {name}, which transformers {transformers.__version__} does not have.")
    with torch.device("meta"):
        model: Any = kind(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model.load_state_dict(read_tensors(folder, "model."), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of a {name}, such as {missing[0]}.")
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _write_rest(folder: Path, target: Path, with_optimizer: bool) -> None:
    state = state_for(folder) if with_optimizer else {"step": read_state(folder)["step"]}  # weights alone do not go on
    step = state.pop("step")
    write_state(target, step, state, read_saved_metrics(folder))
    if with_optimizer:
        write_optimizer(read_whole_optimizer(folder) if is_sharded(folder) else read_optimizer(folder), target)
