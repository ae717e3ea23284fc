"""`ludic train`: parses, calls `ludic.run`, prints. One command for every env, model and algorithm: docs/ludic-train.md."""

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ludic.cli.args import TRY_AGAIN, Switch, Target, need_extras, parse_run
from ludic.cli.terminal.colour import make_console
from ludic.run.config.entries import with_policies
from ludic.types.errors import RunComplete, TryAgain

if TYPE_CHECKING:
    from ludic.run import Run, TrainResult

DESCRIPTION = (
    "Train a model on an environment. Settings come from flags, from a TOML file with the sections below, or from both: flags "
    "win. metrics, rollouts and checkpoints go to a folder under runs/."
)
LOW_LORA_LR = 5e-5
"""The rate at which a LoRA was seen to learn GSM8K slowly; all weights learned it at 3e-6."""


@dataclass(frozen=True, kw_only=True)
class ScriptFlags:
    """Flags of a script that trains. A script with more flags inherits from it."""

    dry_run: Switch = False
    """Check everything and show the settings and the plan; train nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrainArgs(ScriptFlags):
    """The command."""

    target: Target = ""
    """Id of an env (`ludic envs`), file.py:Class of your own, a TOML file, or the folder of a run. With --preferences, and with
    --algo sft --data FILE, it may be left out."""
    policy: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=ROLES")] = ()
    """A separate policy for these roles of the env, such as ann=X, or ann=X,O where policies change places; NAME.SETTING=VALUE,
    such as ann.lr=1e-4, is for it alone. Give one for each (docs/multi_policy.md)."""


def train(args: list[str]) -> int:
    command, config = parse_run(TrainArgs, args, prog="ludic train", description=DESCRIPTION)
    config = replace(config, policies=with_policies(config.policies, command.policy))
    from ludic.run.given import env_factory

    server = config.env.env_server
    envs = [env_factory(id, server=server) for id in config.env_ids]  # reports a wrong name before torch is loaded
    need_extras("train", "ludic train")
    from ludic.run import build

    run = build(config, env=envs[0] if config.env.id else None)  # type: ignore[arg-type]
    if command.dry_run:
        return show_plan(run, resume=command.resume)
    with reported(run, resume=command.resume) as report:
        run.prepare(resume=command.resume)
        report.result = asyncio.run(run.train_async())
    return report.code


def show_plan(run: "Run", *, resume: bool) -> int:
    """`--dry-run`: the settings and what the run is going to do."""
    from ludic.run.settings import to_toml

    _say(to_toml(run.config), *run.plan(resume=resume))
    return 0


@dataclass
class Report:
    """The end of a training."""

    result: "TrainResult | None" = None
    code: int = 0
    """Exit code of the command."""


@contextlib.contextmanager
def reported(run: "Run", *, resume: bool) -> Iterator[Report]:
    """Prints how the run begins and ends around its training, and closes it; errors become advice and an exit code."""
    from ludic.run import RunFailed
    from ludic.run.features.base import engine_of
    from ludic.run.folder import how_to_resume, saved_step
    from ludic.run.run import session_class

    try:
        _say(*_opening(run, resume=resume))
    except RunComplete:
        if not engine_of(run.config).plays_here:  # the learner may have died before it told the actors
            asyncio.run(session_class(run.resolved).finished(run.resolved, saved_step(run.folder)))
        raise
    report = Report()
    with run:
        try:
            yield report
            status = run.session.status() if run.session is not None else ""
        except TryAgain as error:
            _say(f"{error} To go on: {how_to_resume(run.resolved)}")
            report.code = TRY_AGAIN
            return
        except FloatingPointError as error:
            if not engine_of(run.config).retries_a_divergence:
                raise RunFailed(f"{error} {_how_to_learn_slower(run)}") from error
            # The batch may be the cause: after it has ended a few learners it is set aside. If it is not, the launcher gives up.
            _say(f"{error} If another try ends the same way: {_how_to_learn_slower(run)}")
            report.code = TRY_AGAIN
            return
    assert report.result is not None, "the block sets it"
    _say(*_closing(run, report.result, status))
    reason = report.result.stopped_by or ""
    report.code = 128 + signal.Signals[reason] if reason in signal.Signals.__members__ else 0


def _say(*lines: str) -> None:
    for line in lines:
        make_console().print(line, markup=False)


def _how_to_learn_slower(run: "Run") -> str:
    """A resumed run keeps its lr, so it would diverge again: advise a new run."""
    from ludic.run.folder import latest_checkpoint

    saved = latest_checkpoint(run.folder)
    fork = "" if saved is None else f" --fork-from {saved} (or one before it)"
    return f"A run keeps its lr: give the command again with --name OTHER --lr SMALLER{fork}."


def _opening(run: "Run", *, resume: bool) -> list[str]:
    from ludic.run.dry_run import mask_lines

    config, start = run.config, run.starting_point(resume=resume)
    teacher = f", taught by {' and '.join(config.all_teachers)}" if config.all_teachers else ""
    several = "" if config.trainer.steps_per_batch == 1 else f", {config.trainer.steps_per_batch} on each batch"
    what = " and ".join(config.env_ids) if config.stored is None else f"from {config.stored}"
    samples = "rollouts" if config.stored is None else "preferences" if config.rollouts.preferences else "answers"
    who = f"{config.model.model} learns {what} with {config.algo.algo}"
    if run.resolved.policies:
        who = f"{' and '.join(run.resolved.trained_names)} learn {what}"
    lines = [
        f"{run.folder}: {who}, {config.train.steps} updates{several} of "
        f"{config.rollouts.rollouts_per_update} {samples}{teacher}."
    ]
    rank, lr = config.model.lora_rank, config.trainer.lr
    if rank and lr <= LOW_LORA_LR and config.stored is None and not start.first_step:
        lines.append(
            f"lr {lr:g} is low for a LoRA: on GSM8K 2e-4 learned well, and 5e-5 slowly (research/results/gsm8k_qwen.md)."
        )
    if not start.first_step:
        lines += mask_lines(run.resolved)
    if start.first_step >= config.train.steps:
        lines.append("All updates are done; the last evaluation was interrupted and is made again.")
    elif start.first_step:
        lines.append(f"Going on after update {start.first_step}.")
    if start.restarts:
        lines.append("There is no checkpoint yet: it starts over.")
    return lines + [f"Changed: {difference}." for difference in start.changed]


def _closing(run: "Run", result: "TrainResult", status: str) -> list[str]:
    """The result, its folder and the next commands."""
    from ludic.run.folder import how_to_resume, latest_checkpoint, metrics_with
    from ludic.training.causes import why_nothing_was_learned

    folder, steps, is_stopped = run.folder, run.config.train.steps, result.stopped_by is not None
    ended = "Stopped" if is_stopped else "Done"
    lines = ["", f"{ended} after update {result.step} of {steps} ({result.seconds:.0f} s)."]
    for name in run.resolved.trained_names or ("",):
        whose = f" of {name}" if name else ""
        rewards = [row["train/avg_total_reward"] for row in metrics_with(folder, "train/avg_total_reward", name)]
        if rewards:
            lines.append(f"Reward{whose}: {rewards[0]:.3f} in the first update, {rewards[-1]:.3f} in the last.")
        clipped = [row["train/grad_clipped"] for row in metrics_with(folder, "train/grad_clipped", name)]
        if any(clipped):
            lines.append(f"Gradients{whose} above max_grad_norm: in {sum(clipped):.0f} of {len(clipped)} updates.")
    for name in run.resolved.trained_names or ("",):
        whose, rows = f" of {name}" if name else "", list(metrics_with(folder, "eval/mean_reward", name))
        if len(rows) == 1:
            lines.append(f"Evaluation{whose} after update {rows[0]['step']}: {_evaluated(rows[0])}.")
        elif rows:
            first, last = (f"{_evaluated(row)} after update {row['step']}" for row in (rows[0], rows[-1]))
            lines.append(f"Evaluation{whose}: {first}, {last}.")
    lines += [*([f"Samples: {status}."] if status else []), f"Run folder: {folder}"]
    saved, how = latest_checkpoint(folder), how_to_resume(run.resolved)
    if is_stopped or result.step < steps:
        lines.append(f"To go on: {how}" if saved else f"Nothing is saved yet; {how} starts over.")
    elif saved is not None:
        is_script = bool(run.resolved.parts.command)  # `ludic eval` may not find its parts
        evaluate = f"ludic eval {folder}" if run.config.env_ids else f"ludic eval ENV --model {folder}"
        if run.resolved.policies:
            evaluate = f"ludic eval {saved.parents[1]}"
        further = [f"      {how} --steps {2 * steps}"] if run.config.checkpoint.save_optimizer else []
        lines += [] if is_script else [f"Next: {evaluate}", *further]
    for name in run.resolved.trained_names or ("",):
        verdict = why_nothing_was_learned(list(metrics_with(folder, "train/grad_norm", name)))
        lines += [] if verdict is None else ["", f"{name}: {verdict}" if name else verdict]
    return lines


def _evaluated(row: dict[str, Any]) -> str:
    """A mean with its interval, if there is one."""
    name = "accuracy" if row.get("eval/accuracy") is not None else "mean_reward"
    mean, low, high = (row.get(f"eval/{name}{end}") for end in ("", "_low", "_high"))
    interval = "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"
    return f"{name.replace('_', ' ')} {mean:.3f}{interval}"
