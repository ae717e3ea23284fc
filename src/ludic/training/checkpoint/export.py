"""Exports a checkpoint as a folder for other programs: `from_pretrained`, vLLM, peft, and CheckpointManager.

`export_checkpoint` puts the parts of several ranks together and leaves an adapter an adapter; `export_model` writes a model
that is in memory, such as a base with its adapter merged. `ludic export` calls both. The model must fit into CPU memory; neither
a GPU nor torch.distributed is needed.
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ludic.models.kinds import save_tokenizer
from ludic.models.loading import no_progress_bar
from ludic.training.checkpoint.manifest import CheckpointError, finish_folder, problem_with, read_manifest, read_object
from ludic.training.checkpoint.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, MODEL, architecture, stored_weights
from ludic.training.checkpoint.rank_files import RANKS, StoredTensors, rank_files, write_rank_files
from ludic.training.checkpoint.state_files import (
    OPTIMIZER,
    RNG,
    STATE_FILE,
    encoded_state,
    read_metrics,
    read_optimizer_values,
    read_state,
    write_plain_state,
)
from ludic.types import ConfigError
from ludic.util.files import UNFINISHED, sync


def export_checkpoint(
    folder: str | Path,
    target: str | Path,
    *,
    with_optimizer: bool = False,
    max_shard_size: str = "5GB",
    finish: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint in `folder` as one process would have written it; `target` must not exist.

    With the optimizer, a run of one process can resume from it: `Trainer(resume_from=target)`. `finish` may change what was
    written before the folder gets its name.
    """
    folder, target = Path(folder), Path(target)
    with _complete_or_absent(folder, target) as unfinished:
        for name in (read_manifest(folder) or {})["files"]:
            if name != STATE_FILE and not name.startswith(f"{RANKS}/"):
                (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(folder / name, unfinished / name)
        if StoredTensors(rank_files(folder), MODEL):
            _write_weights(folder, unfinished, max_shard_size)
        _write_state(folder, unfinished, with_optimizer)
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
        _write_state(folder, unfinished, with_optimizer=False)
    return target


def write_pretrained(model: Any, tokenizer: Any, folder: Path, *, max_shard_size: str = "5GB") -> None:
    """Write what `save_pretrained` writes: weights, configuration, generation settings, tokenizer, chat template."""
    with no_progress_bar():
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer is not None:
        save_tokenizer(tokenizer, folder)


def check_target(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists already; give the name of a folder to be made.")


@contextmanager
def _complete_or_absent(folder: Path, target: Path) -> Iterator[Path]:
    """A folder next to `target` to write into; it becomes `target` when all of it is written and synced."""
    check_target(target)
    problem = problem_with(folder, checksums=True)
    if problem is not None:
        raise CheckpointError(f"Cannot export {folder}: {problem}.")
    unfinished = target.with_name(f"{UNFINISHED}{target.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        yield unfinished
        manifest = read_manifest(folder) or {}
        finish_folder(unfinished, step=manifest["step"], serial=manifest["serial"])
        unfinished.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write_weights(folder: Path, target: Path, max_shard_size: str) -> None:
    """Put the parts of the ranks together."""
    adapters = sorted(target.rglob(ADAPTER_CONFIG))
    for config in adapters:
        adapter = "default" if config.parent == target else config.parent.name
        save_file(stored_weights(folder, adapter).whole(), config.with_name(ADAPTER_WEIGHTS), metadata={"format": "pt"})
    if not adapters and (target / "config.json").is_file():
        with no_progress_bar():
            _rebuilt(folder).save_pretrained(target, max_shard_size=max_shard_size)
    elif not adapters:
        save_file(stored_weights(folder).whole(), target / "model.safetensors", metadata={"format": "pt"})


def _rebuilt(folder: Path) -> Any:
    """The transformers model, which knows under which names its weights are shared."""
    import transformers

    name = architecture(read_object(folder / "config.json"))
    kind = getattr(transformers, name, None) if name in dir(transformers) else None
    if not isinstance(kind, type) or not issubclass(kind, transformers.PreTrainedModel):
        raise ConfigError(f"{folder} holds a {name}, which transformers {transformers.__version__} does not have.")
    with torch.device("meta"):
        model: Any = kind(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model.load_state_dict(stored_weights(folder).whole(), strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise CheckpointError(f"{folder} lacks {len(missing)} weights of a {name}, such as {missing[0]}.")
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def _write_state(folder: Path, target: Path, with_optimizer: bool) -> None:
    """With the optimizer, all that a run needs to resume; else the step and the metrics."""
    step, metrics = (read_manifest(folder) or {})["step"], read_metrics(folder)
    if not with_optimizer:
        write_plain_state(target, step, {}, metrics)
        return
    state = read_state(folder)
    own = {name: state.pop(name) for name in (RNG,) if name in state}
    write_plain_state(target, step, state, metrics)
    values = encoded_state(step, state, own, read_optimizer_values(folder))
    tensors = StoredTensors(rank_files(folder), f"{OPTIMIZER}.").whole()
    write_rank_files(target, 0, values | {f"{OPTIMIZER}.{name}": tensor for name, tensor in tensors.items()})
