"""`ludic actor`: plays for the learner of a pipeline, with the same settings as its `ludic train`. See docs/pipeline.md.

This file reads what was typed; the work is in run_actor.py, whose imports take seconds.
"""

from dataclasses import dataclass

import typer

from ludic.cli.run_command import Target, as_pipeline, need_extras, read_run_command
from ludic.run.env import env_factory
from ludic.types import ConfigError

DESCRIPTION = (
    "Play episodes for the learner of a pipeline (`ludic train --engine pipeline`) and push them to its queue. Give it what the "
    "learner is given, best the folder of the run."
)


@dataclass(frozen=True)
class Words:
    """What to do."""

    target: Target
    """What the learner was given: the folder of the run, a TOML file, or an env with the same flags."""
    actor_index: int = 0
    """Number of this actor among those of the run: each has seeds of its own."""

    def __post_init__(self) -> None:
        if self.actor_index < 0:
            raise ConfigError(f"actor_index = {self.actor_index}; actors are counted from 0.")


def actor(context: typer.Context) -> None:
    """Play for the learner of a pipeline."""
    words, config = read_run_command(Words, context.args, prog="ludic actor", description=DESCRIPTION)
    found = env_factory(config.env.id)
    need_extras("train,pipeline", "ludic actor")
    from ludic.cli.pipeline import actor as run_actor

    code = run_actor.play(as_pipeline(config), found, index=words.actor_index)
    if code:
        raise typer.Exit(code)
