"""Values of settings that cannot work, found before anything is loaded. Pairs of features are in features/core.py."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ludic import registry
from ludic.run.config.run_config import RunConfig
from ludic.run.given import Parts


def task_problems(config: RunConfig, group_size: int) -> Iterator[str]:
    """Numbers of an update that do not fit each other."""
    rollouts = config.rollouts
    if rollouts.dynamic_sampling and group_size == 1:
        yield (
            f"dynamic_sampling = {rollouts.dynamic_sampling} replaces groups of equal returns, but group_size = 1: there are none."
        )
    per_batch, lag = config.trainer.steps_per_batch, rollouts.max_lag or 0
    if rollouts.close_batch_at < 1 and lag < per_batch:
        yield (
            f"close_batch_at = {rollouts.close_batch_at:g} trains on episodes that began a batch earlier, so max_lag = {lag} is "
            f"too little: give {per_batch} or more, or leave it out."
        )


OFFERED_TO_LOGGERS = ("folder", "name", "config")


def logger_problems(names: Sequence[str]) -> Iterator[str]:
    """Loggers that log nothing, or that could not be made."""
    for name in dict.fromkeys(names):
        if name == "none":
            continue
        made = registry.loggers.spec(name).load()
        if not callable(getattr(made, "log", None)):
            yield f"logger = {name!r} is no class with a method log(step, stats)."
        takes = inspect.signature(made)
        try:
            takes.bind(**{each: None for each in OFFERED_TO_LOGGERS if each in takes.parameters})
        except TypeError as error:
            if not is_ours(made):
                offered = ", ".join(OFFERED_TO_LOGGERS)
                yield (f"logger = {name!r}: {error}. A run gives {offered}; the others need a default.")


def is_ours(part: Callable[..., Any]) -> bool:
    return part.__module__.startswith(("ludic.", "ludic_"))


PREFERENCE_ALGORITHMS = ("dpo", "ipo", "kto")


def stored_problems(config: RunConfig, parts: Parts) -> Iterator[str]:
    """An algorithm and data that do not go together."""
    algo, preferences, stored = config.algo.algo, config.rollouts.preferences, config.stored
    if parts.algorithm is None and algo in PREFERENCE_ALGORITHMS and preferences is None:
        yield (
            f"algo = {algo!r} learns from stored preferences; give --preferences FILE.jsonl (docs/algorithms/dpo.md)."
        )
    if parts.algorithm is None and algo == "sft" and stored is None and not config.rollouts.rollouts:
        if parts.samples is not None:
            yield (
                "algo = 'sft' reads its answers from a file; write the samples of data= to one: data=\"FILE.jsonl\"."
            )
        yield (
            "algo = 'sft' imitates what is recorded, but a run plays: give --data FILE.jsonl with questions and answers, or "
            "--rollouts FILE.jsonl."
        )
    if stored is None:
        return
    if preferences and parts.algorithm is None and ":" not in algo and algo not in PREFERENCE_ALGORITHMS:
        yield (f"preferences = {preferences} is for {', '.join(PREFERENCE_ALGORITHMS)}, but algo = {algo!r}.")
    if config.is_evaluated and not config.env.id:
        yield "An evaluation plays an env: name one as TARGET, or leave eval_every and eval_at_start out."


def number_problems(config: RunConfig, group_size: int) -> Iterator[str]:
    """Numbers of the settings that do not fit each other."""
    total = config.rollouts.rollouts_per_update
    max_tokens, max_seq_len = config.agent.max_tokens or 1, config.trainer.max_seq_len
    if config.sampling.temperature == 0:
        yield (
            "temperature = 0 always takes the likeliest token: all rollouts of a task are the same, and there is nothing to learn "
            "from. Give --temperature above 0, usually 1; --eval-temperature may be 0."
        )
    if total % group_size:
        below = total // group_size * group_size
        near = f"{below} or {below + group_size}" if below else str(group_size)
        yield (
            f"rollouts_per_update = {total} is not a multiple of group_size = {group_size}: the last group would be incomplete. "
            f"Take {near}, or another group size."
        )
    if max_tokens >= max_seq_len:
        yield (
            f"max_tokens = {max_tokens} leaves no room for a prompt in max_seq_len = {max_seq_len}. Raise --max-seq-len or lower "
            "--max-tokens."
        )
    schedule = config.trainer.lr_schedule
    if schedule is not None and schedule.kind != "constant" and schedule.warmup_steps >= config.train.steps:
        yield (f"warmup_steps = {schedule.warmup_steps} leaves none of the {config.train.steps} steps after it.")
