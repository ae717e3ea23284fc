"""Settings that do not go together, found before anything is loaded."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ludic import registry
from ludic.run.config.run_config import RunConfig
from ludic.run.given import Parts
from ludic.types import ConfigError, shown_url


def check_engine(config: RunConfig, parts: Parts) -> None:
    rollouts = config.rollouts
    if config.all_teachers and config.is_pipeline:
        raise ConfigError(
            "A teacher is not there for engine = 'pipeline'; use local or vllm, or wrap the learner's source yourself "
            "(TeacherAnnotatedBatchSource)."
        )
    if (parts.reward is not None or parts.policies) and config.is_pipeline:
        raise ConfigError(
            "reward= and policies= are objects of this process; with engine = 'pipeline' actors play the episodes. Give the "
            "reward by an env of your own (file.py:Class), whose step grades the answer."
        )
    if parts.scorers and config.is_pipeline:
        raise ConfigError(
            "scorers= are objects of this process; with engine = 'pipeline' actors play the episodes. Give reward="
            "'file.py:function'."
        )
    if parts.source is not None and config.is_pipeline:
        raise ConfigError("source= wraps rollouts that this process plays; with engine = 'pipeline' actors play them.")
    if config.pipeline.redis and not config.is_pipeline:
        raise ConfigError(f"redis is for engine = 'pipeline', but the engine is {rollouts.engine!r}.")
    if rollouts.server and not config.samples_on_vllm:
        servers = ", ".join(map(shown_url, rollouts.server))
        who = "actor_engine" if config.is_pipeline else "engine"
        what = config.pipeline.actor_engine if config.is_pipeline else rollouts.engine
        raise ConfigError(f"server = {servers} is for {who} = 'vllm', but the {who.replace('_', ' ')} is {what!r}.")
    if rollouts.push == "adapter" and rollouts.engine != "vllm":
        raise ConfigError(f"push = 'adapter' is for engine = 'vllm', but the engine is {rollouts.engine!r}.")
    if rollouts.transport != "auto" and not config.samples_on_vllm:
        raise ConfigError(
            f"transport = {rollouts.transport!r} is for engine = 'vllm', but the engine is {rollouts.engine!r}."
        )
    if rollouts.transport != "auto" and rollouts.push == "adapter":
        raise ConfigError(
            "transport is for all weights; with push = 'adapter' the server reads files of the run folder."
        )
    if rollouts.engine == "vllm" and not rollouts.server and rollouts.transport in ("file", "gloo", "nccl"):
        raise ConfigError(
            f"transport = {rollouts.transport!r} is for servers named with --server: one that is started for the run and restarted "
            "gets the last weights again, which shared_memory and cuda_ipc keep."
        )
    if config.trainer.eval_in_background and config.samples_on_vllm:
        raise ConfigError(
            "eval_in_background needs an engine that can keep a copy of the weights: local. A server has one set of weights, "
            "and they change with every update. Evaluate without it."
        )


def check_tasks(config: RunConfig, group_size: int) -> None:
    rollouts = config.rollouts
    if rollouts.dynamic_sampling and group_size == 1:
        raise ConfigError(
            f"dynamic_sampling = {rollouts.dynamic_sampling} replaces groups of equal returns, but group_size = 1: there are none."
        )
    own = {
        "dynamic_sampling": rollouts.dynamic_sampling,
        "curriculum": rollouts.curriculum,
        "close_batch_at": rollouts.close_batch_at < 1,
        "filter": config.algo.filter,
        "[[recorded]]": config.recorded,
        "league_every": config.league.league_every,
        "[replay]": config.replay.replay,
    }
    if config.replay.replay and (rollouts.max_lag or rollouts.close_batch_at < 1):
        raise ConfigError(
            "[replay] brings older samples by itself; max_lag and close_batch_at bound the lag of new ones. Give one of the two."
        )
    if config.is_pipeline and any(own.values()):
        given = ", ".join(name for name, value in own.items() if value)
        raise ConfigError(
            f"{given}: for runs that play their own episodes (engine = local or vllm); in a pipeline actors play them."
        )
    per_batch, lag = config.trainer.steps_per_batch, rollouts.max_lag or 0
    if rollouts.close_batch_at < 1 and lag < per_batch:
        raise ConfigError(
            f"close_batch_at = {rollouts.close_batch_at:g} trains on episodes that began a batch earlier, so max_lag = {lag} is "
            f"too little: give {per_batch} or more, or leave it out."
        )
    if rollouts.server_sleep and (rollouts.engine != "vllm" or rollouts.server):
        raise ConfigError(
            "server_sleep is for a vLLM server that the run starts: give --engine vllm, without --server, or leave it out."
        )
    if rollouts.server_sleep and (rollouts.max_lag or rollouts.close_batch_at < 1):
        raise ConfigError(
            "server_sleep frees the server's memory while the trainer computes, but with max_lag or close_batch_at it generates "
            "meanwhile. Give one of the two."
        )
    if config.league.league_every and rollouts.engine != "local":
        raise ConfigError(
            f"league_every needs an engine that can keep copies of the weights: local, not {rollouts.engine!r}."
        )
    if config.league.league_every and config.agent.protocol is not None:
        raise ConfigError(
            f"league_every seats the policy and its snapshots by its own protocol, so protocol = {config.agent.protocol!r} has no "
            "meaning. Leave one out."
        )
    if config.league.league_every and rollouts.curriculum is not None:
        raise ConfigError(
            "league_every draws the opponents of new tasks; with a curriculum a task comes again. Give one."
        )


OFFERED_TO_LOGGERS = ("folder", "name", "config")


def check_loggers(names: Sequence[str]) -> None:
    """ConfigError for a logger that is none, or that could not be made."""
    for name in dict.fromkeys(names):
        if name == "none":
            continue
        made = registry.loggers.spec(name).load()
        if not callable(getattr(made, "log", None)):
            raise ConfigError(f"logger = {name!r} is no class with a method log(step, stats).")
        takes = inspect.signature(made)
        try:
            takes.bind(**{each: None for each in OFFERED_TO_LOGGERS if each in takes.parameters})
        except TypeError as error:
            if not is_ours(made):
                offered = ", ".join(OFFERED_TO_LOGGERS)
                raise ConfigError(
                    f"logger = {name!r}: {error}. A run gives {offered}; the others need a default."
                ) from error


def is_ours(part: Callable[..., Any]) -> bool:
    return part.__module__.startswith(("ludic.", "ludic_"))


PREFERENCE_ALGORITHMS = ("dpo", "ipo", "kto")


def check_stored_kind(config: RunConfig, parts: Parts) -> None:
    """ConfigError for an algorithm and data that do not go together."""
    algo, preferences, stored = config.algo.algo, config.rollouts.preferences, config.stored
    if parts.algorithm is None and algo in PREFERENCE_ALGORITHMS and preferences is None:
        raise ConfigError(
            f"algo = {algo!r} learns from stored preferences; give --preferences FILE.jsonl (docs/algorithms/dpo.md)."
        )
    if parts.algorithm is None and algo == "sft" and stored is None and not config.rollouts.rollouts:
        if parts.samples is not None:
            raise ConfigError(
                "algo = 'sft' reads its answers from a file; write the samples of data= to one: data=\"FILE.jsonl\"."
            )
        raise ConfigError(
            "algo = 'sft' imitates what is recorded, but a run plays: give --data FILE.jsonl with questions and answers, or "
            "--rollouts FILE.jsonl."
        )
    if stored is None:
        return
    if preferences and parts.algorithm is None and ":" not in algo and algo not in PREFERENCE_ALGORITHMS:
        raise ConfigError(
            f"preferences = {preferences} is for {', '.join(PREFERENCE_ALGORITHMS)}, but algo = {algo!r}."
        )
    rollouts = config.rollouts
    playing = {
        "rollouts": rollouts.rollouts,
        f"engine = {rollouts.engine!r}": rollouts.engine != "local",
        "max_lag": rollouts.max_lag,
        "close_batch_at": rollouts.close_batch_at < 1,
        "dynamic_sampling": rollouts.dynamic_sampling,
        "curriculum": rollouts.curriculum,
        "filter": config.algo.filter,
        "teacher": config.algo.teacher,
        "[teachers]": config.teachers,
        "[[envs]]": config.envs,
        "[[recorded]]": config.recorded,
        "league_every": config.league.league_every,
        "[replay]": config.replay.replay,
        "data": preferences and config.env.data,
    }
    if given := [name for name, value in playing.items() if value]:
        raise ConfigError(
            f"{'preferences' if preferences else 'data'} = {stored} replaces played episodes, so {given[0]} has no meaning. Leave "
            "one out."
        )
    if config.is_evaluated and not config.env.id:
        raise ConfigError("An evaluation plays an env: name one as TARGET, or leave eval_every and eval_at_start out.")


def check_numbers(config: RunConfig, group_size: int) -> None:
    total = config.rollouts.rollouts_per_update
    max_tokens, max_seq_len = config.agent.max_tokens or 1, config.trainer.max_seq_len
    if config.sampling.temperature == 0:
        raise ConfigError(
            "temperature = 0 always takes the likeliest token: all rollouts of a task are the same, and there is nothing to learn "
            "from. Give --temperature above 0, usually 1; --eval-temperature may be 0."
        )
    if total % group_size:
        below = total // group_size * group_size
        near = f"{below} or {below + group_size}" if below else str(group_size)
        raise ConfigError(
            f"rollouts_per_update = {total} is not a multiple of group_size = {group_size}: the last group would be incomplete. "
            f"Take {near}, or another group size."
        )
    if max_tokens >= max_seq_len:
        raise ConfigError(
            f"max_tokens = {max_tokens} leaves no room for a prompt in max_seq_len = {max_seq_len}. Raise --max-seq-len or lower "
            "--max-tokens."
        )
    schedule = config.trainer.lr_schedule
    if schedule is not None and schedule.kind != "constant" and schedule.warmup_steps >= config.train.steps:
        raise ConfigError(
            f"warmup_steps = {schedule.warmup_steps} leaves none of the {config.train.steps} steps after it."
        )
