"""`ludic launch`: prepares the run folder, starts the roles on this machine or on a Ray cluster, and supervises them."""

import asyncio
import shlex
import shutil
from collections.abc import Callable, Sequence

from ludic.cli.pipeline.command import LaunchArgs
from ludic.cli.pipeline.processes import LocalProcesses
from ludic.cli.pipeline.roles import Sizes, make_roles, reachable_socket
from ludic.cli.pipeline.supervisor import MergedOutput, Outcome, RestartLimit, Role, Running, Supervisor
from ludic.run.config import REDIS_VARIABLE, RunConfig, given_redis, given_servers
from ludic.run.dry_run import plan_lines
from ludic.run.env import EnvFactory
from ludic.run.folder import LOGS, REDIS, WEIGHTS, ResumePoint, how_to_resume, prepare_folder, resume_point
from ludic.run.generation import clear_queue, pipeline_algorithm
from ludic.run.model import with_fixed_checkpoints
from ludic.run.resolve import ResolvedRun, resolve
from ludic.run.settings import to_toml
from ludic.types import ConfigError


def run_launch(args: LaunchArgs, config: RunConfig, env: EnvFactory) -> int:
    """Start all roles and supervise them until the learner is done; returns the exit code."""
    run = resolve(with_fixed_checkpoints(config), env)
    start = resume_point(run, resume=args.resume)
    plan = plan_lines(run, start)
    pipeline_algorithm(run)
    if args.ray:
        _check_for_ray(config)
    if args.dry_run:
        _show(run, plan)
        return 0
    prepare(run, start, resume=args.resume)
    sizes = Sizes(learner_gpus=args.learner_gpus, actor_gpus=args.actor_gpus)
    with reachable_socket(run.folder) as socket:
        roles = make_roles(run, sizes, socket=socket)
        names = ", ".join(role.name for role in roles)
        print(f"{run.folder}: {names}; what each says is also in {run.folder / LOGS}. Ctrl-C stops all.")
        outcome = _on_ray(run, roles, args.ray_address) if args.ray else _here(run, roles)
    if outcome.code:
        print(f"{outcome.reason}\nTo go on: {how_to_resume(run)}")
    return outcome.code


def _check_for_ray(config: RunConfig) -> None:
    """A cluster needs a Redis and servers that all its machines reach."""
    if given_redis(config.pipeline) is None:
        raise ConfigError(
            "--ray needs a Redis that every machine of the cluster reaches: give --redis redis://HOST:6379/0, or set "
            f"${REDIS_VARIABLE} (that, and not the flag, where there is a password)."
        )
    if config.samples_on_vllm and not given_servers(config.rollouts.server):
        raise ConfigError("--ray with actor_engine = 'vllm' needs --server URL…, which every machine reaches.")


def prepare(run: ResolvedRun, start: ResumePoint, *, resume: bool) -> None:
    """Prepare the run folder for the roles; a new run removes leftovers of an earlier one with the same name."""
    prepare_folder(run, start)
    if not resume:
        for left_over in (REDIS, WEIGHTS, LOGS):
            shutil.rmtree(run.folder / left_over, ignore_errors=True)
    if given_redis(run.config.pipeline) is None:
        (run.folder / REDIS).mkdir(exist_ok=True)
    elif not resume:
        asyncio.run(clear_queue(run))


def _here(run: ResolvedRun, roles: Sequence[Role]) -> Outcome:
    processes = LocalProcesses(run.folder / LOGS)
    try:
        return _supervised(run, roles, processes.start)
    finally:
        processes.close()


def _on_ray(run: ResolvedRun, roles: Sequence[Role], address: str | None) -> Outcome:
    from ludic.cli.pipeline.ray import RayProcesses

    with RayProcesses(run.folder / LOGS, address) as processes:
        return _supervised(run, roles, processes.start)


def _supervised(run: ResolvedRun, roles: Sequence[Role], start: Callable[[Role], Running]) -> Outcome:
    show = MergedOutput(["launch", *(role.name for role in roles)])
    limit = RestartLimit(max_restarts=run.config.pipeline.max_restarts)
    return Supervisor(roles, start, show=show, limit=limit).run()


def _show(run: ResolvedRun, plan: Sequence[str]) -> None:
    print(to_toml(run.config))
    for line in plan:
        print(line)
    for role in make_roles(run):
        print(f"{role.name}: {shlex.join(role.command)}")
