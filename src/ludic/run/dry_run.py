"""The plan of a run, made without loading weights."""

from pathlib import Path
from typing import Any

import torch

from ludic.models import SMOLLM2, TINY
from ludic.models.tiny import make_tiny
from ludic.run.config import ModelSettings
from ludic.run.folder import ResumePoint
from ludic.run.model import (
    base_settings,
    checkpoint_in,
    default_device,
    dtype_of,
    find_device,
    forked_checkpoint,
    make_template,
)
from ludic.run.parts import eval_samples, first_env, make_algorithm, train_samples
from ludic.run.resolve import ResolvedRun
from ludic.run.teacher import check_teacher
from ludic.types import ConfigError

_SMOLLM2_PARAMETERS = 134_515_008


def plan_lines(run: ResolvedRun, start: ResumePoint) -> list[str]:
    """The plan in sentences; ConfigError for what cannot work."""
    samples = train_samples(run)
    eval_samples(run)
    first_env(run)
    check_teacher(run, make_algorithm(run))
    return [
        *_model_lines(run),
        _update_line(run, None if samples is None else len(samples)),
        _token_line(run),
        f"Updates {start.first_step + 1} to {run.steps}; everything is written to {run.folder}.",
    ]


def _update_line(run: ResolvedRun, num_samples: int | None) -> str:
    total = run.config.rollouts.rollouts_per_update
    line = f"{run.steps} updates × {total} rollouts ({run.num_groups} groups of {run.group_size})"
    if num_samples is None:
        return f"{line}: {run.steps * total:,} episodes, each group with its own seed."
    passes = run.steps * run.num_groups / num_samples
    return f"{line}: {run.steps * total:,} episodes, {passes:.2f} passes over {num_samples:,} samples."


def _token_line(run: ResolvedRun) -> str:
    per_episode = min(run.max_steps * run.sampling.max_tokens, run.trainer.max_seq_len)
    per_update = per_episode * run.config.rollouts.rollouts_per_update
    return (
        f"At most {run.max_steps} turns of {run.sampling.max_tokens} tokens: {per_update:,} sampled tokens an update, "
        f"{per_update * run.steps:,} in all."
    )


def _model_lines(run: ResolvedRun) -> list[str]:
    model, algo = run.config.model, run.config.algo.algo
    if run.parts.model is not None:
        return [f"Model {model.model}: {_counted(run.parts.model.model)}, as it was handed in; training with {algo}."]
    device = find_device(model.device) or default_device()
    base = base_settings(model)
    which = "a" if base is model else "its"
    trained = f"{which} LoRA adapter of rank {base.lora_rank}" if base.lora_rank else "all weights"
    lines = [
        f"Model {model.model}: {_num_parameters(base)}, {str(dtype_of(base)).removeprefix('torch.')} on {device}; training "
        f"{trained} with {algo}."
    ]
    if model.fork_from is not None:
        lines.append(f"Its weights come from {forked_checkpoint(model.fork_from)}.")
    return lines


def _num_parameters(settings: ModelSettings) -> str:
    """From the model's description alone; its chat template is checked on the way."""
    if settings.model == TINY:
        return _counted(make_tiny(seed=0).model)
    if settings.model == SMOLLM2:
        return f"{_SMOLLM2_PARAMETERS:,} parameters"
    folder = checkpoint_in(Path(settings.model)) or Path(settings.model)
    if folder.suffix == ".gguf":
        return "number of parameters unknown until it is loaded"
    if folder.suffix == ".json":  # the config of random weights; the tokenizer is beside it
        folder = folder.parent
    return _counted(_empty_model(str(folder)))


def _counted(model: Any) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"


def _empty_model(source: str) -> Any:
    """The model's shapes without memory behind them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    try:
        make_template(AutoTokenizer.from_pretrained(source, trust_remote_code=False))
        description = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"Cannot find the model {source!r}: {str(error).strip().splitlines()[0]}") from error
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(description)
