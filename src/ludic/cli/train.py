"""`ludic train`: one command for every env, model and algorithm. See docs/ludic-train.md.

This file reads what was typed; the work is in run_training.py, whose imports take seconds.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
import tyro

from ludic.cli.run_config import RunConfig
from ludic.cli.run_env import find_env
from ludic.cli.settings import Switch, parse_flags, read_toml
from ludic.types import ConfigError

DESCRIPTION = (
    "Train a model on an environment. Settings come from flags, from a TOML file with the sections below, or from both: flags "
    "win. metrics, rollouts and checkpoints go to a folder under runs/."
)


@dataclass(frozen=True)
class Words:
    """What to do."""

    target: Annotated[str, tyro.conf.arg(metavar="TARGET", help_behavior_hint=""), tyro.conf.Positional]
    """Id of an env (`ludic envs`), file.py:Class of your own, a TOML file, or the folder of a run."""
    dry_run: Switch = False
    """Check everything and show the settings and the plan; train nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""


def train(context: typer.Context) -> None:
    """Train a model on an environment."""
    words, config = read_command(context.args)
    found = find_env(config.env.id)
    from ludic.cli import run_training

    if words.dry_run:
        run_training.show_plan(config, found, resume=words.resume)
        return
    code = run_training.train(config, found, resume=words.resume)
    if code:
        raise typer.Exit(code)


def read_command(args: list[str]) -> tuple[Words, RunConfig]:
    """What was typed, over what is in the file that the target names, over the defaults."""
    words, config = _parse(args, RunConfig())
    path = config_file(words.target)
    if path is None:
        return words, replace(config, env=replace(config.env, id=words.target))
    words, config = _parse(args, read_toml(RunConfig, path))
    if not config.env.id:
        raise ConfigError(f'{path} names no env; write id = "…" under [env].')
    return words, config


def config_file(target: str) -> Path | None:
    """The TOML file that a target means: itself, or that of a run folder; None for an env."""
    path = Path(target)
    if path.suffix == ".toml":
        return path
    return path / "config.toml" if path.is_dir() and (path / "config.toml").is_file() else None


def _parse(args: list[str], default: RunConfig) -> tuple[Words, RunConfig]:
    command = parse_flags(Words, default, args, prog="ludic train", description=DESCRIPTION)
    return command.words, command.config
