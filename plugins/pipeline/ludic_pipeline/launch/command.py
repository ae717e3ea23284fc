"""The commands `ludic actor` and `ludic launch`; what they run loads torch and is imported on call."""

from collections.abc import Sequence
from dataclasses import replace

from ludic.cli.args import A, need_extras, parse_run
from ludic.run.config.run_config import RunConfig
from ludic.run.given import EnvFactory, env_factory
from ludic.types import ConfigError
from ludic_pipeline.launch.arguments import ACTOR, ACTOR_USUAL, LAUNCH, LAUNCH_USUAL, ActorArgs, LaunchArgs


def actor(args: list[str]) -> int:
    command, config, env = _parse(ActorArgs, args, "ludic actor", ACTOR, ACTOR_USUAL)
    from ludic_pipeline.launch.actor import run_actor

    return run_actor(config, env, index=command.actor_index)


def launch(args: list[str]) -> int:
    command, config, env = _parse(LaunchArgs, args, "ludic launch", LAUNCH, LAUNCH_USUAL)
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
