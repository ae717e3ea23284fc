"""The plan of a run, made without loading weights."""

from pathlib import Path
from typing import Any

import torch

from ludic.models import SMOLLM2, TINY
from ludic.models.kinds import auto_class
from ludic.models.loading import make_tiny, require_model
from ludic.run.checks import teacher_problems
from ludic.run.config.model import ModelSettings
from ludic.run.features.core import features_on
from ludic.run.folder import ResumePoint
from ludic.run.model import (
    base_settings,
    cannot,
    checkpoint_in,
    dtype_of,
    find_device,
    forked_checkpoint,
    load_tokenizer,
    make_template,
)
from ludic.run.parts.algorithm import make_algorithm
from ludic.run.parts.episodes import check_protocol
from ludic.run.parts.samples import eval_samples, first_env, train_samples, train_stream
from ludic.run.parts.source import check_source
from ludic.run.protocols.agents import outside_agent
from ludic.run.resolve import NEGATIVE_MASK, ResolvedRun, is_masked_when_old
from ludic.run.session import check_preferences
from ludic.run.settings import refuse
from ludic.run.several import SeveralPolicies

_SMOLLM2_PARAMETERS = 134_515_008


def plan_lines(run: ResolvedRun, start: ResumePoint) -> list[str]:
    """The plan in sentences; ConfigError for what cannot work."""
    total = run.config.rollouts.rollouts_per_update
    if run.config.stored is not None:
        return [*_model_lines(run), _preferences_line(run), _start_line(run, start)]
    if run.policies:
        return [*_policy_lines(run), *_task_lines(run), *_feature_lines(run), _start_line(run, start)]
    refuse(teacher_problems(run, make_algorithm(run)))
    check_source(run)
    _check_agents(run)
    if run.envs:
        whole = f"{run.shown_batches}: {run.num_batches * total:,} episodes."
        lines = [f"{env.name}, {env.share:.0%}: {' '.join(_task_lines(env.run, env.share))}" for env in run.envs]
        return [*_model_lines(run), whole, *lines, *_feature_lines(run), _start_line(run, start)]
    return [*_model_lines(run), *_task_lines(run), *_feature_lines(run), _start_line(run, start)]


def _policy_lines(run: ResolvedRun) -> list[str]:
    """The policies, and who plays which role."""
    SeveralPolicies.check(run)
    lines = []
    for policy in run.policies:
        _check_agents(policy.run)
        roles = [role for role in run.seatings[0] if any(seats[role] == policy.name for seats in run.seatings)]
        model, *more = _model_lines(policy.run)
        if policy.is_frozen:
            model, more = f"{model.partition('; training')[0]}; it is not trained.", []
        elif policy.run.trainer.lr != run.trainer.lr:
            model = f"{model[:-1]}, lr {policy.run.trainer.lr:g}."
        lines.append(" ".join([f"{policy.name} plays {' or '.join(roles)}.", model, *more]))
    if len(run.seatings) > 1:
        shown = ["; ".join(f"{role} {name}" for role, name in seats.items()) for seats in run.seatings]
        lines.append(f"Each group has one of {len(shown)} seatings: {' | '.join(shown)}.")
    return lines


def _check_agents(run: ResolvedRun) -> None:
    """Agents, parsers and tools are made as the run makes them, with the model's template."""
    given, agents = run.parts.model, [own.config.agent for own in run.each]
    tokenizer = load_tokenizer(run.config.model) if given is None else given.tokenizer
    with_tools = any(agent.may_call_tools for agent in agents) or bool(run.parts.tools)
    check_protocol(run, make_template(tokenizer, with_tools=with_tools, renderer=agents[0].renderer))


def _start_line(run: ResolvedRun, start: ResumePoint) -> str:
    if start.first_step >= run.steps:
        return f"All {run.steps} updates are done; the last evaluation, which was interrupted, is made again."
    return f"Updates {start.first_step + 1} to {run.steps}; everything is written to {run.folder}."


def _preferences_line(run: ResolvedRun) -> str:
    source, size = check_preferences(run), run.config.rollouts.rollouts_per_update
    passes = run.num_batches / source.num_batches_per_epoch
    return f"{run.num_batches} batches × {size} {source.kind}: {passes:.2f} passes over {len(source):,}; nothing is played."


def _task_lines(run: ResolvedRun, share: float = 1.0) -> list[str]:
    """The tasks and tokens of one env, which has this share of the episodes."""
    samples, batches, total = (
        train_samples(run),
        run.num_batches,
        round(run.config.rollouts.rollouts_per_update * share),
    )
    eval_samples(run)
    first_env(run)
    outside = outside_agent(run.config.agent, run.parts)
    tasks = "each group with its own seed"
    if train_stream(run) is not None:
        tasks = "each group with a new sample of the stream"
    elif samples is not None:
        tasks = f"{batches * run.num_groups * share / len(samples):.2f} passes over {len(samples):,} samples"
    per_batch = min(run.max_steps * run.sampling.max_tokens, run.trainer.max_seq_len) * total
    a_batch = "an update" if run.trainer.steps_per_batch == 1 else "a batch"
    tokens = (
        f"At most {run.max_steps} turns of {run.sampling.max_tokens} tokens: {per_batch:,} sampled tokens {a_batch}, "
        f"{per_batch * batches:,} in all."
    )
    if outside is not None:
        calls = run.config.agent.agent_max_calls or "any number of"
        tokens = f"The agent {outside.name} makes {calls} model calls an episode, of {run.sampling.max_tokens} tokens at most."
    groups = f"{total / run.group_size:g} groups of {run.group_size}"
    if share < 1:
        return [f"{groups} {a_batch} with {run.config.algo.algo}, {tasks}.", tokens]
    return [f"{run.shown_batches} ({groups}): {batches * total:,} episodes, {tasks}.", tokens]


def mask_lines(run: ResolvedRun) -> list[str]:
    """The effect of the default mask of some presets, and the way to leave it out; empty where no preset has it."""
    masked = {own.config.algo.algo: None for own in run.each if NEGATIVE_MASK in own.config.algo.correction}
    names = " and ".join(name for name in masked if is_masked_when_old(name))
    where = f"max_lag {run.max_lag}" if run.max_lag else "[replay]"
    line = (
        f"With {names}, older samples ({where}) of negative weight do not count once they have become unlikely: {NEGATIVE_MASK}, "
        "without which reward is lost there. --correction none counts them (docs/importance_sampling.md)."
    )
    return [line] if names else []


def _feature_lines(run: ResolvedRun) -> list[str]:
    """Sentences about what the settings add to a plain run."""
    said = [feature.says(run) for feature in features_on(run.config, run.parts)]
    return [*mask_lines(run), *(line for lines in said for line in lines)]


def _model_lines(run: ResolvedRun) -> list[str]:
    model, algo = run.config.model, run.config.algo.algo
    if run.parts.model is not None:
        return [f"Model {model.model}: {_counted(run.parts.model.model)}, given as an object; training with {algo}."]
    device = find_device(model.device)
    base = base_settings(model)
    which = "a" if base is model else "its"
    trained = f"{which} LoRA adapter of rank {base.lora_rank}" if base.lora_rank else "all weights"
    lines = [
        f"Model {model.model}: {num_parameters(base)}, {str(dtype_of(base)).removeprefix('torch.')} on {device}; training "
        f"{trained} with {algo}."
    ]
    if model.fork_from is not None:
        lines.append(f"Its weights come from {forked_checkpoint(model.fork_from)}.")
    return lines


def num_parameters(settings: ModelSettings) -> str:
    """Read from the model's description alone; its chat template is checked on the way."""
    if settings.model == TINY:
        return _counted(make_tiny(seed=0).model)
    if settings.model == SMOLLM2:
        return f"{_SMOLLM2_PARAMETERS:,} parameters"
    folder = checkpoint_in(Path(settings.model)) or Path(settings.model)
    if folder.suffix == ".gguf":
        return "number of parameters unknown until it is loaded"
    if folder.suffix == ".json":  # the config of random weights; the tokenizer is in the same folder
        folder = folder.parent
    require_model(str(folder))
    from transformers import AutoConfig, AutoTokenizer

    try:
        make_template(AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False))
        description = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise cannot(f"find the model {str(folder)!r}", error) from error
    chosen = auto_class(description)
    try:
        with torch.device("meta"):  # shapes without memory behind them
            return _counted(chosen.from_config(description))
    except ValueError as error:
        raise cannot(f"make a model of {str(folder)!r}", error) from error


def _counted(model: Any) -> str:
    return f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters"
