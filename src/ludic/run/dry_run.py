"""What a run is going to do, found out without loading weights."""

from pathlib import Path
from typing import Any

import torch

from ludic.batch_gen.requests.samples import read_samples
from ludic.models import SMOLLM2, TINY
from ludic.models.tiny import make_tiny
from ludic.run.build import first_env, make_algorithm, trainer_config
from ludic.run.config import ModelSettings, RunConfig
from ludic.run.env import EnvFactory
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
from ludic.run.teacher import check_teacher
from ludic.types import ConfigError

_SMOLLM2_PARAMETERS = 134_515_008


def plan_lines(config: RunConfig, found: EnvFactory, start: ResumePoint) -> list[str]:
    """The plan in sentences; whatever cannot work is an error here already."""
    samples = None if config.env.data is None else read_samples(config.env.data)
    if config.eval.eval_data is not None:
        read_samples(config.eval.eval_data, "--eval-data")
    first_env(config.env, found)
    check_teacher(config, make_algorithm(config))
    trainer_config(config)
    return [
        *_model_lines(config),
        _update_line(config, None if samples is None else len(samples)),
        _token_line(config),
        f"Updates {start.first_step + 1} to {config.train.steps}; everything is written to {config.folder}.",
    ]


def _update_line(config: RunConfig, num_samples: int | None) -> str:
    total = config.rollouts.rollouts_per_update
    line = f"{config.train.steps} updates × {total} rollouts ({config.num_groups} groups of {config.group_size})"
    if num_samples is None:
        return f"{line}: {config.train.steps * total:,} episodes, each group with a seed of its own."
    passes = config.train.steps * config.num_groups / num_samples
    return f"{line}: {config.train.steps * total:,} episodes, {passes:.2f} passes over {num_samples:,} samples."


def _token_line(config: RunConfig) -> str:
    assert config.env.max_steps is not None and config.agent.max_tokens is not None, "resolved"
    per_episode = min(config.env.max_steps * config.agent.max_tokens, config.train.max_seq_len)
    per_update = per_episode * config.rollouts.rollouts_per_update
    return (
        f"At most {config.env.max_steps} turns of {config.agent.max_tokens} tokens: {per_update:,} sampled tokens an update, "
        f"{per_update * config.train.steps:,} in all."
    )


def _model_lines(config: RunConfig) -> list[str]:
    model = config.model
    device = find_device(model.device) or default_device()
    base = base_settings(model)
    which = "a" if base is model else "its"
    trained = f"{which} LoRA adapter of rank {base.lora_rank}" if base.lora_rank else "all weights"
    lines = [
        f"Model {model.model}: {_num_parameters(base)}, {str(dtype_of(base)).removeprefix('torch.')} on {device}; training "
        f"{trained} with {config.algo.algo}."
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
