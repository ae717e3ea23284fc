"""`ludic train`: one command for every env, model and algorithm. See docs/ludic-train.md.

This file reads what was typed; the work is in run_training.py, whose imports take seconds.
"""

from dataclasses import dataclass

import typer

from ludic.cli.run_command import Target, need_extras, read_run_command
from ludic.run.env import env_factory
from ludic.run.settings import Switch

DESCRIPTION = (
    "Train a model on an environment. Settings come from flags, from a TOML file with the sections below, or from both: flags "
    "win. metrics, rollouts and checkpoints go to a folder under runs/."
)


@dataclass(frozen=True)
class Words:
    """What to do."""

    target: Target
    """Id of an env (`ludic envs`), file.py:Class of your own, a TOML file, or the folder of a run."""
    dry_run: Switch = False
    """Check everything and show the settings and the plan; train nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""


def train(context: typer.Context) -> None:
    """Train a model on an environment."""
    words, config = read_run_command(Words, context.args, prog="ludic train", description=DESCRIPTION)
    found = env_factory(config.env.id)
    need_extras("train", "ludic train")
    from ludic.run import training as run_training

    if words.dry_run:
        run_training.show_plan(config, found, resume=words.resume)
        return
    code = run_training.train(config, found, resume=words.resume)
    if code:
        raise typer.Exit(code)
