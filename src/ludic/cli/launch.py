"""`ludic launch`: Redis, server, actors and learner of a pipeline with one command. See docs/pipeline.md.

This file reads what was typed; the work is in run_launch.py, whose imports take seconds.
"""

from dataclasses import dataclass

import typer

from ludic.cli.run_command import Target, as_pipeline, need_extras, read_run_command
from ludic.run.env import env_factory
from ludic.run.settings import MaybeText, Switch

DESCRIPTION = (
    "Train with actors and a learner in processes of their own: starts all of them, and a Redis and a vLLM server where they are "
    "needed and not given; restarts what dies; stops everything when the learner is done or on Ctrl-C."
)


@dataclass(frozen=True)
class Words:
    """What to do."""

    target: Target
    """As for `ludic train`: an env, file.py:Class, a TOML file, or the folder of a run."""
    dry_run: Switch = False
    """Check everything and show the plan and the commands; start nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""
    ray: Switch = False
    """Start the roles as Ray actors on an existing cluster, wherever Ray finds room for them."""
    ray_address: MaybeText = None
    """With --ray: where the cluster is. Default: $RAY_ADDRESS, else the one that this machine belongs to."""
    learner_gpus: float = 0.0
    """With --ray: GPUs that the learner asks for."""
    actor_gpus: float = 0.0
    """With --ray: GPUs that each actor asks for."""


def launch(context: typer.Context) -> None:
    """Train with actors and a learner in processes of their own."""
    words, config = read_run_command(Words, context.args, prog="ludic launch", description=DESCRIPTION)
    found = env_factory(config.env.id)
    need_extras("train,pipeline", "ludic launch")
    from ludic.cli.pipeline import launch as run_launch

    code = run_launch.launch(words, as_pipeline(config), found)
    if code:
        raise typer.Exit(code)
