"""The arguments of `ludic actor` and `ludic launch`."""

from dataclasses import dataclass

from ludic.cli.args import Switch, Target
from ludic.types import ConfigError

ACTOR = (
    "Play episodes for the learner of a pipeline (`ludic train --engine pipeline`) and push them to its queue. Give it what the "
    "learner is given, best the folder of the run."
)
ACTOR_USUAL = ("target", "actor_index", "redis", "actor_engine", "server", "model", "device")


@dataclass(frozen=True)
class ActorArgs:
    """Arguments of `ludic actor`."""

    target: Target
    """The same as for the learner: the folder of the run, a TOML file, or an env with the same flags."""
    actor_index: int = 0
    """Number of this actor among those of the run: each has its own seeds."""

    def __post_init__(self) -> None:
        if self.actor_index < 0:
            raise ConfigError(f"actor_index = {self.actor_index}; actors are counted from 0.")


LAUNCH = (
    "Train with actors and a learner in separate processes: starts all of them, and a Redis and a vLLM server where they are "
    "needed and not given; restarts what dies; stops everything when the learner is done or on Ctrl-C."
)
LAUNCH_USUAL = (
    "target",
    "model",
    "algo",
    "steps",
    "lr",
    "actors",
    "actor_engine",
    "redis",
    "name",
    "resume",
    "dry_run",
)


@dataclass(frozen=True)
class LaunchArgs:
    """Arguments of `ludic launch`."""

    target: Target
    """The same as for `ludic train`: an env, file.py:Class, a TOML file, or the folder of a run."""
    dry_run: Switch = False
    """Check everything and show the plan and the commands; start nothing."""
    resume: Switch = False
    """Go on with the run in the run folder, from its newest checkpoint."""
    ray: Switch = False
    """Start the roles as Ray actors on an existing cluster, wherever Ray finds room for them."""
    ray_address: str | None = None
    """With --ray: where the cluster is. Default: $RAY_ADDRESS, else the one that this machine belongs to."""
    learner_gpus: float = 0.0
    """With --ray: GPUs that the learner asks for."""
    actor_gpus: float = 0.0
    """With --ray: GPUs that each actor asks for."""
    learner_resources: str = "{}"
    """With --ray: custom resources that the learner asks for, as JSON: '{"learner": 1}' puts it on a machine that was started with
    `ray start --resources '{"learner": 1}'`."""
    actor_resources: str = "{}"
    """With --ray: custom resources that each actor asks for, as JSON."""
