"""`ludic train`: parses, calls `ludic.run`, prints. One command for every env, model and algorithm: docs/ludic-train.md."""

import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ludic.cli.args import TRY_AGAIN, Switch, Target, need_extras, parse_run

if TYPE_CHECKING:
    from ludic.run import Run, TrainResult

DESCRIPTION = (
    "Train a model on an environment. Settings come from flags, from a TOML file with the sections below, or from both: flags "
    "win. metrics, rollouts and checkpoints go to a folder under runs/."
)


@dataclass(frozen=True)
class TrainArgs:
    """What to do."""

    target: Target
    """Id of an env (`ludic envs`), file.py:Class of your own, a TOML file, or the folder of a run."""
    dry_run: Switch = False
    """Check everything and show the settings and the plan; train nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""


def train(args: list[str]) -> int:
    """Train a model on an environment."""
    command, config = parse_run(TrainArgs, args, prog="ludic train", description=DESCRIPTION)
    from ludic.run.env import env_factory

    env = env_factory(config.env.id)  # reports a wrong name before torch is loaded
    need_extras("train", "ludic train")
    from ludic.run import build

    run = build(config, env=env)  # type: ignore[arg-type]
    return train_run(run, dry_run=command.dry_run, resume=command.resume)


def train_run(run: "Run", *, dry_run: bool = False, resume: bool = False) -> int:
    """Train, and say how it begins and ends; the exit code."""
    from ludic.batch_gen.pipeline.connection import RedisGone
    from ludic.batch_gen.pipeline.lease import LeaseLost
    from ludic.run import RunFailed
    from ludic.run.folder import how_to_resume
    from ludic.run.settings import to_toml

    if dry_run:
        _say(to_toml(run.config), *run.plan(resume=resume))
        return 0
    _say(*_opening(run, resume=resume))
    with run:
        try:
            result = run.resume() if resume else run.train()
            status = run.generation.status() if run.generation is not None else ""
        except (LeaseLost, RedisGone) as error:
            _say(f"{error} To go on: {how_to_resume(run.resolved)}")
            return TRY_AGAIN
        except FloatingPointError as error:
            if not run.config.is_pipeline:
                raise RunFailed(f"{error} {_how_to_learn_slower(run)}") from error
            # Perhaps because of the batch, which is set aside when it has ended a few learners; if not, the launcher gives up.
            _say(f"{error} If another try ends the same way: {_how_to_learn_slower(run)}")
            return TRY_AGAIN
    _say(*_closing(run, result, status))
    reason = result.stopped_by or ""
    return 128 + signal.Signals[reason] if reason in signal.Signals.__members__ else 0


def _say(*lines: str) -> None:
    from rich.console import Console
    from rich.markup import escape

    for line in lines:
        Console(highlight=False, soft_wrap=True).print(escape(line))


def _how_to_learn_slower(run: "Run") -> str:
    """A resumed run keeps its lr, so it would diverge again: advise a new run."""
    from ludic.run.folder import latest_checkpoint

    saved = latest_checkpoint(run.folder)
    fork = "" if saved is None else f" --fork-from {saved} (or one before it)"
    return f"A run keeps its lr: give the command again with --name OTHER --lr SMALLER{fork}."


def _opening(run: "Run", *, resume: bool) -> list[str]:
    config, start = run.config, run.start(resume=resume)
    teacher = "" if config.algo.teacher is None else f", taught by {config.algo.teacher}"
    lines = [
        f"{run.folder}: {config.model.model} learns {config.env.id} with {config.algo.algo}, {config.train.steps} updates of "
        f"{config.rollouts.rollouts_per_update} rollouts{teacher}."
    ]
    if start.first_step:
        lines.append(f"Going on after update {start.first_step}.")
    if start.restarts:
        lines.append("There is no checkpoint yet: it starts over.")
    return lines + [f"Changed: {difference}." for difference in start.changed]


def _closing(run: "Run", result: "TrainResult", status: str) -> list[str]:
    """The result, its folder and the next commands."""
    from ludic.run.folder import how_to_resume, latest_checkpoint, metrics_with
    from ludic.training.guards import why_nothing_was_learned

    folder, steps, is_stopped = run.folder, run.config.train.steps, result.stopped_by is not None
    lines = [
        "",
        f"{'Stopped' if is_stopped else 'Done'} after update {result.step} of {steps} ({result.seconds:.0f} s).",
    ]
    rewards = [row["train/avg_total_reward"] for row in metrics_with(folder, "train/avg_total_reward")]
    if rewards:
        lines.append(f"Reward: {rewards[0]:.3f} in the first update, {rewards[-1]:.3f} in the last.")
    clipped = [row["train/grad_clipped"] for row in metrics_with(folder, "train/grad_clipped")]
    if any(clipped):
        lines.append(f"Gradients above max_grad_norm: in {sum(clipped):.0f} of {len(clipped)} updates.")
    lines += _eval_lines(list(metrics_with(folder, "eval/mean_reward")))
    lines += [f"Samples: {status}."] if status else []
    saved, how = latest_checkpoint(folder), how_to_resume(run.resolved)
    lines.append(f"Run folder: {folder}")
    if is_stopped or result.step < steps:
        lines.append(f"To go on: {how}" if saved else f"Nothing is saved yet; {how} starts over.")
    elif saved is not None:
        is_script = bool(run.resolved.parts.command)  # `ludic eval` may not find its parts
        lines += [] if is_script else [f"Next: ludic eval {folder}", f"      {how} --steps {2 * steps}"]
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
    """A mean with its interval, if there is one."""
    name = "accuracy" if row.get("eval/accuracy") is not None else "mean_reward"
    mean, low, high = (row.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{name.replace('_', ' ')} {mean:.3f}{interval}"
