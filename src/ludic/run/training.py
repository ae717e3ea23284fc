"""A training run from its first line to its last: set up, train, say what came of it."""

import asyncio
import contextlib
import signal
import time
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.markup import escape

from ludic.batch_gen import AsyncRolloutBatchSource, TooManyFailures
from ludic.batch_gen.pipeline.connection import RedisGone
from ludic.batch_gen.pipeline.lease import LeaseLost
from ludic.batch_gen.pipeline.source import PipelineBatchSource
from ludic.distributed import WeightPushError
from ludic.models.loading import LoadedModel
from ludic.run import pipeline_learner as run_pipeline
from ludic.run.build import (
    Status,
    TrainingParts,
    evaluator_of,
    first_env,
    make_algorithm,
    make_episode_setup,
    make_loggers,
    make_source,
    make_trainer,
)
from ludic.run.config import RunConfig, resolve
from ludic.run.dry_run import plan_lines
from ludic.run.env import EnvFactory
from ludic.run.folder import (
    ResumePoint,
    how_to_resume,
    latest_checkpoint,
    metrics_with,
    prepare_folder,
    resume_point,
    rollouts_file,
)
from ludic.run.model import load_policy, make_template, serve_policy, use_threads, with_fixed_checkpoints
from ludic.run.pipeline import TRY_AGAIN
from ludic.run.settings import to_toml
from ludic.run.teacher import check_teacher, make_teaching
from ludic.training import TeeLogger, Trainer
from ludic.training.checkpoint.manager import CheckpointError
from ludic.training.critic.critic import CriticKind
from ludic.training.guards import why_nothing_was_learned
from ludic.types import LudicError, PolicyGone

console = Console(highlight=False, soft_wrap=True)


class RunFailed(LudicError):
    """The run cannot go on; the message says from where it can be resumed."""


def say(text: str) -> None:
    console.print(escape(text))


def show_plan(config: RunConfig, found: EnvFactory, *, resume: bool) -> None:
    """Everything that can be known without loading weights."""
    resolved = with_fixed_checkpoints(resolve(config, found))
    start = resume_point(resolved, resume=resume)
    plan = plan_lines(resolved, found, start)
    say(to_toml(resolved))
    for line in plan:
        say(line)


def train(config: RunConfig, found: EnvFactory, *, resume: bool) -> int:
    """Train to the end, or until stopped; the exit code of the command."""
    config = with_fixed_checkpoints(resolve(config, found))
    start = resume_point(config, resume=resume)
    check_teacher(config, make_algorithm(config))  # what is wrong is named before a large model is loaded for nothing
    if config.is_pipeline:
        run_pipeline.check(config)
    else:
        first_env(config.env, found)
    for line in _opening(config, start):
        say(line)
    use_threads(config.model)
    with contextlib.ExitStack() as stack:
        loaded = _load(config, start)
        make_parts = run_pipeline.learner_parts if config.is_pipeline else _own_parts
        parts = make_parts(config, found, loaded, start, stack)
        prepare_folder(config, start)
        if config.is_pipeline:
            run_pipeline.begin(config, parts, loaded, start, resume=resume)
        began = time.perf_counter()
        try:
            trainer = _train(config, loaded, parts, start)
        except (LeaseLost, RedisGone) as error:
            say(f"{error} To go on: {how_to_resume(config)}")
            return TRY_AGAIN
        except FloatingPointError as error:
            if not config.is_pipeline:
                raise RunFailed(f"{error} {_how_to_learn_slower(config)}") from error
            # Perhaps of the batch, which is set aside when it has ended a few learners; if not, the launcher gives up.
            say(f"{error} If another try ends the same way: {_how_to_learn_slower(config)}")
            return TRY_AGAIN
    for line in _closing(config, trainer, time.perf_counter() - began, parts.status):
        say(line)
    reason = trainer.stop.reason
    return 128 + signal.Signals[reason] if reason in signal.Signals.__members__ else 0


def _load(config: RunConfig, start: ResumePoint) -> LoadedModel:
    settings = config.model
    if start.first_step and not settings.lora_rank:
        settings = replace(settings, fork_from=None)  # the checkpoint holds all weights; the fork may be gone by now
    return load_policy(settings, seed=config.train.seed)


def _own_parts(
    config: RunConfig, found: EnvFactory, loaded: LoadedModel, start: ResumePoint, stack: contextlib.ExitStack
) -> TrainingParts:
    """For a run that plays its own episodes."""
    served = serve_policy(config.rollouts, loaded, max_length=config.train.max_seq_len, folder=config.folder)
    stack.callback(served.close)
    template = make_template(loaded.tokenizer, with_tools=config.agent.may_call_tools)
    play = make_episode_setup(config.env, config.agent, found, served.client, template, served.model)
    algorithm = make_algorithm(config)
    teaching = make_teaching(config, algorithm, loaded, stack)
    jsonl_path = rollouts_file(config.folder, start) if config.rollouts.save_rollouts else None
    return TrainingParts(
        algorithm=algorithm,
        source=make_source(config, play, algorithm, jsonl_path=jsonl_path, annotate=teaching.annotate),
        teacher=teaching.frozen,
        publisher=served.publisher,
        evaluator=evaluator_of(config, served, play, stack),
        activity=play.activity,
    )


def _train(config: RunConfig, loaded: LoadedModel, parts: TrainingParts, start: ResumePoint) -> Trainer:
    folder = config.folder
    logger = make_loggers(config, folder, parts.status)
    try:
        trainer = make_trainer(
            config,
            loaded,
            parts,
            folder=folder,
            logger=logger,
            critic=_load(config, start) if parts.algorithm.critic is CriticKind.SEPARATE else None,
            resume_from=start.checkpoint,
        )
        asyncio.run(_until_done(trainer, config.train.steps, logger, parts.activity))
    except (RedisGone, FloatingPointError):  # an OSError and a PolicyGone, too, but they end in another way
        raise
    except (CheckpointError, OSError, PolicyGone, TooManyFailures, WeightPushError) as error:
        raise RunFailed(f"{error} To go on: {how_to_resume(config)}") from error
    finally:
        logger.close()
    return trainer


def _how_to_learn_slower(config: RunConfig) -> str:
    """A run keeps its lr, so resuming would end in the same place."""
    saved = latest_checkpoint(config.folder)
    fork = "" if saved is None else f" --fork-from {saved} (or one before it)"
    return f"A run keeps its lr: give the command again with --name OTHER --lr SMALLER{fork}."


async def _until_done(trainer: Trainer, num_steps: int, logger: TeeLogger, activity: Status | None) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if activity is not None:
            stack.push_async_callback(_ended, asyncio.create_task(_show(activity, logger)))
        if isinstance(trainer.batch_source, (AsyncRolloutBatchSource, PipelineBatchSource)):
            await stack.enter_async_context(trainer.batch_source)
        await trainer.train(num_steps - trainer.step)


async def _ended(showing: asyncio.Task[None]) -> None:
    showing.cancel()
    await asyncio.gather(showing, return_exceptions=True)


async def _show(activity: Status, logger: TeeLogger) -> None:
    """What is being played, every second: the first update can take minutes. What remains of a step is the trainer's."""
    while True:
        await asyncio.sleep(1.0)
        logger.show_activity(activity() or "updating or saving the weights")


# --- what is said ----------------------------------------------------------------------------------------------


def _opening(config: RunConfig, start: ResumePoint) -> list[str]:
    run = (
        f"{config.folder}: {config.model.model} learns {config.env.id} with {config.algo.algo}, {config.train.steps} updates of "
        f"{config.rollouts.rollouts_per_update} rollouts{_taught(config)}."
    )
    lines = [run]
    if start.first_step:
        lines.append(f"Going on after update {start.first_step}.")
    if start.restarts:
        lines.append("There is no checkpoint yet: it starts over.")
    lines += [f"Changed: {difference}." for difference in start.changed]
    return lines


def _taught(config: RunConfig) -> str:
    return "" if config.algo.teacher is None else f", taught by {config.algo.teacher}"


def _closing(config: RunConfig, trainer: Trainer, seconds: float, status: Status | None) -> list[str]:
    """A plain statement: what came of it, where it is, what to type next."""
    folder = config.folder
    is_stopped = trainer.stop.is_set
    lines = [
        "",
        f"{'Stopped' if is_stopped else 'Done'} after update {trainer.step} of {config.train.steps} ({seconds:.0f} s).",
    ]
    rewards = [row["train/avg_total_reward"] for row in metrics_with(folder, "train/avg_total_reward")]
    if rewards:
        lines.append(f"Reward: {rewards[0]:.3f} in the first update, {rewards[-1]:.3f} in the last.")
    clipped = [row["train/grad_clipped"] for row in metrics_with(folder, "train/grad_clipped")]
    if any(clipped):
        lines.append(f"Gradients above max_grad_norm: in {sum(clipped):.0f} of {len(clipped)} updates.")
    lines += _eval_lines(list(metrics_with(folder, "eval/mean_reward")))
    lines += [] if status is None else [f"Samples: {status()}."]
    saved = latest_checkpoint(folder)
    lines.append(f"Run folder: {folder}")
    if is_stopped or trainer.step < config.train.steps:
        how = how_to_resume(config)
        lines.append(f"To go on: {how}" if saved else f"Nothing is saved yet; {how} starts over.")
    elif saved is not None:
        lines.append(f"Next: ludic eval {folder}")
        lines.append(f"      {how_to_resume(config)} --steps {2 * config.train.steps}")
    verdict = why_nothing_was_learned(list(metrics_with(folder, "train/grad_norm")))
    return lines if verdict is None else [*lines, "", verdict]


def _eval_lines(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    first, last = rows[0], rows[-1]
    if first is last:
        return [f"Evaluation after update {last['step']}: {_evaluated(last)}."]
    return [
        f"Evaluation: {_evaluated(first)} after update {first['step']}, {_evaluated(last)} after update {last['step']}."
    ]


def _evaluated(row: dict[str, Any]) -> str:
    """A mean with its interval, where there is one."""
    name = "accuracy" if row.get("eval/accuracy") is not None else "mean_reward"
    mean, low, high = (row.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{name.replace('_', ' ')} {mean:.3f}{interval}"
