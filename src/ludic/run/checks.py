"""Values of settings that cannot work, found before anything is loaded. Pairs of features are in features/core.py."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ludic import registry
from ludic.run.config.model import is_served
from ludic.run.config.run_config import RunConfig
from ludic.run.given import Parts

if TYPE_CHECKING:
    from ludic.run.resolve import ResolvedRun
    from ludic.training import RLAlgorithm


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
                yield f"logger = {name!r}: {error}. A run gives {offered}; the others need a default."


def is_ours(part: Callable[..., Any]) -> bool:
    return part.__module__.startswith(("ludic.", "ludic_"))


PREFERENCE_ALGORITHMS = ("dpo", "ipo", "kto")


def stored_problems(config: RunConfig, parts: Parts) -> Iterator[str]:
    """An algorithm and data that do not go together."""
    algo, preferences, stored = config.algo.algo, config.rollouts.preferences, config.stored
    if parts.algorithm is None and algo in PREFERENCE_ALGORITHMS and preferences is None:
        yield f"algo = {algo!r} learns from stored preferences; give --preferences FILE.jsonl (docs/algorithms/dpo.md)."
    if parts.algorithm is None and algo == "sft" and stored is None and not config.rollouts.rollouts:
        if parts.samples is not None:
            yield "algo = 'sft' reads its answers from a file; write the samples of data= to one: data=\"FILE.jsonl\"."
        yield (
            "algo = 'sft' imitates what is recorded, but a run plays: give --data FILE.jsonl with questions and answers, or "
            "--rollouts FILE.jsonl."
        )
    if stored is None:
        return
    if preferences and parts.algorithm is None and ":" not in algo and algo not in PREFERENCE_ALGORITHMS:
        yield f"preferences = {preferences} is for {', '.join(PREFERENCE_ALGORITHMS)}, but algo = {algo!r}."
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
        yield f"warmup_steps = {schedule.warmup_steps} leaves none of the {config.train.steps} steps after it."


def teacher_problems(run: "ResolvedRun", algorithm: "RLAlgorithm") -> Iterator[str]:
    """A teacher that the algorithm does not need, or lacks, or that cannot answer what the loss needs."""
    settings, asks = run.config.algo, algorithm.needs_teacher_logps or algorithm.loss.needs.teacher_kl is not None
    teachers, served = run.config.all_teachers, [each for each in run.config.all_teachers if is_served(each)]
    if asks and not teachers:
        yield (
            f"algo = {settings.algo!r} learns from a teacher: give --teacher, a model as for --model or the URL of a vLLM server."
        )
    if teachers and not asks:
        yield (
            f"teacher = {' and '.join(map(repr, teachers))}, but algo = {settings.algo!r} learns from rewards alone. Take opd, "
            "grpo_opd or mopd."
        )
    if run.config.teachers and algorithm.loss.needs.teacher_kl is not None:
        yield (
            "[teachers] score tokens, but algo_set kl compares whole distributions with one teacher. Give --teacher, or kl=sampled."
        )
    if served and algorithm.loss.needs.teacher_kl is not None:
        yield (
            f"{served[0]} scores tokens, but algo_set kl compares whole distributions, which takes a teacher in this "
            "process. Give a model instead of a URL, or kl=sampled."
        )
    if served and run.sampling.temperature != 1:
        yield (
            f"{served[0]} is a vLLM server, which scores tokens at temperature 1, but temperature = "
            f"{run.sampling.temperature:g}. Give --temperature 1, or a model instead of a URL."
        )
    yield from _domain_problems(run)


def _domain_problems(run: "ResolvedRun") -> Iterator[str]:
    """Envs of several without a teacher; stored rollouts say their domains themselves."""
    teachers, domains, config = run.config.teachers, [env.name for env in run.envs], run.config
    if not teachers or config.rollouts.rollouts:
        return
    if not domains:
        yield "[teachers] has a teacher for each entry of [[envs]], by its name; for one env give --teacher."
    if missing := [name for name in domains if name not in teachers]:
        yield f"[teachers] has none for {', '.join(missing)}, an entry of [[envs]]. Give each one a teacher."
    if unused := [name for name in teachers if name not in domains and not config.recorded]:
        yield (
            f"[teachers] has one for {', '.join(unused)}, but the entries of [[envs]] are {', '.join(domains)}. Take their names."
        )
