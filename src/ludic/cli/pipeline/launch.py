"""A pipeline on this machine, or on a Ray cluster: prepare the run folder, start the roles, watch over them."""

import asyncio
import shlex
import shutil
from collections.abc import Callable, Sequence

from ludic.cli.launch import Words
from ludic.cli.pipeline.processes import LocalProcesses
from ludic.cli.pipeline.roles import Sizes, make_roles, reachable_socket
from ludic.cli.pipeline.supervisor import MergedOutput, Outcome, RestartLimit, Role, Running, Supervisor
from ludic.run import pipeline_learner as run_pipeline
from ludic.run.config import RunConfig, resolve
from ludic.run.dry_run import plan_lines
from ludic.run.env import EnvFactory
from ludic.run.folder import LOGS, REDIS, WEIGHTS, ResumePoint, how_to_resume, prepare_folder, resume_point
from ludic.run.model import with_fixed_checkpoints
from ludic.run.pipeline import REDIS_VARIABLE, given_redis, given_servers
from ludic.run.settings import to_toml
from ludic.types import ConfigError


def launch(words: Words, config: RunConfig, found: EnvFactory) -> int:
    """Everything, until the learner is done; the exit code of the command."""
    config = with_fixed_checkpoints(resolve(config, found))
    start = resume_point(config, resume=words.resume)
    plan = plan_lines(config, found, start)
    run_pipeline.pipeline_algorithm(config)
    if words.ray:
        _check_for_ray(config)
    if words.dry_run:
        _show(config, plan)
        return 0
    prepare(config, start, resume=words.resume)
    sizes = Sizes(learner_gpus=words.learner_gpus, actor_gpus=words.actor_gpus)
    with reachable_socket(config.folder) as socket:
        roles = make_roles(config, sizes, socket=socket)
        names = ", ".join(role.name for role in roles)
        print(f"{config.folder}: {names}; what each says is also in {config.folder / LOGS}. Ctrl-C stops all.")
        outcome = _on_ray(config, roles, words.ray_address) if words.ray else _here(config, roles)
    if outcome.code:
        print(f"{outcome.reason}\nTo go on: {how_to_resume(config)}")
    return outcome.code


def _check_for_ray(config: RunConfig) -> None:
    """What one machine has of its own, a cluster is told."""
    if given_redis(config.pipeline) is None:
        raise ConfigError(
            "--ray needs a Redis that every machine of the cluster reaches: give --redis redis://HOST:6379/0, or set "
            f"${REDIS_VARIABLE} (that, and not the flag, where there is a password)."
        )
    if config.samples_on_vllm and not given_servers(config.rollouts.server):
        raise ConfigError("--ray with actor_engine = 'vllm' needs --server URL…, which every machine reaches.")


def prepare(config: RunConfig, start: ResumePoint, *, resume: bool) -> None:
    """The run folder as the roles expect it; a new run finds nothing of one that was called the same before."""
    prepare_folder(config, start)
    if not resume:
        for left_over in (REDIS, WEIGHTS, LOGS):
            shutil.rmtree(config.folder / left_over, ignore_errors=True)
    if given_redis(config.pipeline) is None:
        (config.folder / REDIS).mkdir(exist_ok=True)
    elif not resume:
        asyncio.run(run_pipeline.clear_queue(config))


def _here(config: RunConfig, roles: Sequence[Role]) -> Outcome:
    processes = LocalProcesses(config.folder / LOGS)
    try:
        return _supervised(config, roles, processes.start)
    finally:
        processes.close()


def _on_ray(config: RunConfig, roles: Sequence[Role], address: str | None) -> Outcome:
    from ludic.cli.pipeline.ray import RayProcesses

    with RayProcesses(config.folder / LOGS, address) as processes:
        return _supervised(config, roles, processes.start)


def _supervised(config: RunConfig, roles: Sequence[Role], start: Callable[[Role], Running]) -> Outcome:
    show = MergedOutput(["launch", *(role.name for role in roles)])
    limit = RestartLimit(max_restarts=config.pipeline.max_restarts)
    return Supervisor(roles, start, show=show, limit=limit).run()


def _show(config: RunConfig, plan: Sequence[str]) -> None:
    print(to_toml(config))
    for line in plan:
        print(line)
    for role in make_roles(config):
        print(f"{role.name}: {shlex.join(role.command)}")
