"""The arguments of `ludic actor` and `ludic launch`; their bodies load torch and are imported on call."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ludic.cli.args import A, Switch, Target, need_extras, parse_run
from ludic.run.config.run_config import RunConfig
from ludic.run.given import EnvFactory, env_factory
from ludic.types import ConfigError

_ACTOR = (
    "Play episodes for the learner of a pipeline (`ludic train --engine pipeline`) and push them to its queue. Give it what the "
    "learner is given, best the folder of the run."
)
_ACTOR_USUAL = ("target", "actor_index", "redis", "actor_engine", "server", "model", "device")


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


_LAUNCH = (
    "Train with actors and a learner in separate processes: starts all of them, and a Redis and a vLLM server where they are "
    "needed and not given; restarts what dies; stops everything when the learner is done or on Ctrl-C."
)
_LAUNCH_USUAL = (
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


def actor(args: list[str]) -> int:
    command, config, env = _parse(ActorArgs, args, "ludic actor", _ACTOR, _ACTOR_USUAL)
    from ludic_pipeline.launch.actor import run_actor

    return run_actor(config, env, index=command.actor_index)


def launch(args: list[str]) -> int:
    command, config, env = _parse(LaunchArgs, args, "ludic launch", _LAUNCH, _LAUNCH_USUAL)
    from ludic_pipeline.launch.launch import run_launch

    return run_launch(command, config, env)


def _parse(
    arguments: type[A], args: list[str], prog: str, description: str, usual: Sequence[str]
) -> tuple[A, RunConfig, EnvFactory]:
    command, config = parse_run(arguments, args, prog=prog, description=description, usual=usual)
    if config.envs:
        raise ConfigError(f"[[envs]] is for runs that play their own episodes: ludic train, not {prog}.")
    env = env_factory(config.env.id, server=config.env.env_server)  # reports a wrong name before torch is loaded
    need_extras("train,pipeline", prog)
    return command, replace(config, rollouts=replace(config.rollouts, engine="pipeline")), env
