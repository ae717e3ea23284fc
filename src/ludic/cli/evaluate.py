"""`ludic eval`: how good a model is at an env, or several models side by side. See docs/evaluation.md.

This file reads what was typed; the work is in eval_run.py, whose imports take seconds.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import typer
import tyro

from ludic.cli.eval.config import EvalConfig, of_run, resolve, trains_on
from ludic.run.env import env_factory
from ludic.run.settings import parse_flags
from ludic.types import ConfigError

DESCRIPTION = (
    "Play an environment and say how well it went: accuracy and rewards with 95 % confidence intervals, pass@k, majority@k. A "
    "reply that cannot be read is a wrong answer; so is an episode that was cut off or failed. Episodes are written to a folder "
    "under runs/eval/ as they finish; --resume goes on with it."
)


@dataclass(frozen=True)
class Words:
    """What to do."""

    target: tyro.conf.Positional[str]
    """Id of an env (`ludic envs`), file.py:Class of your own, or the folder of a training run: its env, before and after."""
    resume: tyro.conf.FlagCreatePairsOff[bool] = False
    """Go on with the evaluation in the folder --name, or else with the newest of this env and model."""


def evaluate(context: typer.Context) -> None:
    """Measure how well a model plays an environment."""
    words, config = read_command(context.args)
    run = Path(words.target)
    if is_run(run) and trains_on(run, config.env.data):
        typer.echo(
            f"These are the samples that {run} was trained on, {config.env.data}; --data FILE.jsonl takes others."
        )
    found = env_factory(config.env.id)
    config = resolve(config, found)
    from ludic.cli.eval import run as eval_run

    code = eval_run.run(config, found, resume=words.resume)
    if code:
        raise typer.Exit(code)


def read_command(args: list[str]) -> tuple[Words, EvalConfig]:
    """What was typed, over the settings of the run that the target names, over the defaults."""
    words, config = _parse(args, EvalConfig())
    folder = Path(words.target)
    if is_run(folder):
        usual = of_run(folder)
        words, config = _parse(args, replace(usual, policy=replace(usual.policy, model=())))
        model = config.policy.model or usual.policy.model
        return words, replace(config, policy=replace(config.policy, model=model))
    if folder.is_dir():
        raise ConfigError(f"{folder} is a folder without a config.toml. Name an env, and give the folder as --model.")
    return words, replace(config, env=replace(config.env, id=words.target))


def is_run(folder: Path) -> bool:
    return (folder / "config.toml").is_file()


def _parse(args: list[str], default: EvalConfig) -> tuple[Words, EvalConfig]:
    command = parse_flags(Words, default, args, prog="ludic eval", description=DESCRIPTION)
    return command.words, command.config
