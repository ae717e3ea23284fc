"""`ludic launch`: prepares the run folder, starts the roles on this machine or on a Ray cluster, and supervises them.

A role is a process of the pipeline: Redis, a vLLM server, the learner, an actor. `make_roles` has their commands.
"""

import asyncio
import contextlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ludic.cli.terminal.colour import harmless
from ludic.http.address import free_port
from ludic.run.config.run_config import RunConfig
from ludic.run.dry_run import plan_lines
from ludic.run.folder import ResumePoint, how_to_resume, prepare_folder, resume_point
from ludic.run.given import EnvFactory
from ludic.run.model import with_pinned_checkpoints
from ludic.run.names import LOGS, REDIS, WEIGHTS
from ludic.run.policies import resolve_run
from ludic.run.resolve import ResolvedRun
from ludic.run.settings import to_toml
from ludic.types import ConfigError
from ludic.util.files import parse_json
from ludic.util.processes import RestartLimit
from ludic_pipeline.feature import REDIS_VARIABLE, SERVER_VARIABLE, given_redis, given_servers, pipeline_of
from ludic_pipeline.generation import clear_queue, pipeline_algorithm
from ludic_pipeline.launch.arguments import LaunchArgs
from ludic_pipeline.launch.processes import LocalProcesses, RayProcesses
from ludic_pipeline.launch.supervisor import MergedOutput, Role, Supervisor, WhenDone

_MISTAKE = frozenset({2})
"""Exit code of `ludic` commands for a user's mistake."""
_LONGEST_SOCKET = 100
"""Maximum characters of a socket's path; systems allow a little more."""


def ludic_command(*arguments: str) -> tuple[str, ...]:
    """`ludic …` as a process. -P, as for the command itself: modules of the current folder must not shadow those next to a user's
    file."""
    return (sys.executable, "-P", "-m", "ludic.cli.main", *arguments)


def run_launch(args: LaunchArgs, config: RunConfig, env: EnvFactory) -> int:
    """Start all roles and supervise them until the learner is done; returns the exit code."""
    run = resolve_run(with_pinned_checkpoints(config), env)
    start = resume_point(run, resume=args.resume)
    plan = plan_lines(run, start)
    pipeline_algorithm(run)
    learner_resources = ray_resources("learner_resources", args.learner_resources, is_for_ray=args.ray)
    actor_resources = ray_resources("actor_resources", args.actor_resources, is_for_ray=args.ray)
    if args.ray:
        _check_for_ray(config)
    if args.dry_run:
        print(to_toml(run.config), *plan, *(f"{r.name}: {shlex.join(r.command)}" for r in make_roles(run)), sep="\n")
        return 0
    prepare(run, start, resume=args.resume)
    with reachable_socket(run.folder) as socket:
        asked = {"learner": learner_resources, "actor": actor_resources}
        gpus = {"learner_gpus": args.learner_gpus, "actor_gpus": args.actor_gpus}
        roles = make_roles(run, socket=socket, resources=asked, **gpus)
        names, logs = [role.name for role in roles], run.folder / LOGS
        print(f"{run.folder}: {', '.join(names)}; what each says is also in {logs}. Ctrl-C stops all.")
        show, limit = MergedOutput(["launch", *names]), RestartLimit(max_restarts=pipeline_of(config).max_restarts)
        processes: LocalProcesses | RayProcesses
        processes = RayProcesses(logs, args.ray_address) if args.ray else LocalProcesses(logs)
        with contextlib.closing(processes):
            outcome = Supervisor(roles, processes.start_role, show=show, limit=limit).run()
    if outcome.code:
        print(f"{harmless(outcome.reason)}\nTo go on: {how_to_resume(run)}")
    return outcome.code


def _check_for_ray(config: RunConfig) -> None:
    """A cluster needs a Redis and servers that all its machines reach."""
    if given_redis(pipeline_of(config)) is None:
        raise ConfigError(
            "--ray needs a Redis that every machine of the cluster reaches: give --redis redis://HOST:6379/0, or set "
            f"${REDIS_VARIABLE} (that, and not the flag, where there is a password)."
        )
    if pipeline_of(config).actor_engine == "vllm" and not given_servers(config.rollouts.server):
        raise ConfigError("--ray with actor_engine = 'vllm' needs --server URL…, which every machine reaches.")


def ray_resources(name: str, text: str, *, is_for_ray: bool) -> dict[str, float]:
    """Custom resources from the JSON of a flag, which is that of `ray start --resources`."""
    try:
        found = parse_json(text)
    except ValueError:
        found = None
    if not isinstance(found, dict) or not all(type(each) in (int, float) and each > 0 for each in found.values()):
        raise ConfigError(
            f"{name} = {text!r}; it is a JSON object of names and positive amounts, such as '{{\"learner\": 1}}'."
        )
    if reserved := sorted({"CPU", "GPU", "memory"} & found.keys()):
        raise ConfigError(
            f"{name} names {reserved[0]}, which is not a custom resource of Ray. GPUs are --{name.split('_')[0]}-gpus."
        )
    if found and not is_for_ray:
        raise ConfigError(f"{name} is for --ray: on one machine there is nothing to place.")
    return found


def prepare(run: ResolvedRun, start: ResumePoint, *, resume: bool) -> None:
    """Prepare the run folder for the roles; a new run removes leftovers of an earlier one with the same name."""
    prepare_folder(run, start)
    if not resume:
        for left_over in (REDIS, WEIGHTS, LOGS):
            shutil.rmtree(run.folder / left_over, ignore_errors=True)
    if given_redis(pipeline_of(run.config)) is None:
        (run.folder / REDIS).mkdir(exist_ok=True)
    elif not resume:
        asyncio.run(clear_queue(run))


# --- roles ---


def make_roles(
    run: ResolvedRun,
    *,
    socket: Path | None = None,
    learner_gpus: float = 0.0,
    actor_gpus: float = 0.0,
    resources: Mapping[str, Mapping[str, float]] | None = None,
) -> list[Role]:
    """The roles in start order; each names the roles that must outlive it. `socket`: of the Redis that is started; `resources`:
    of "learner" and "actor"."""
    asked = resources or {}
    config, folder = run.config, str(run.folder)
    helpers: list[Role] = []
    environment = _threads(run)
    if given_redis(pipeline_of(config)) is None:
        socket = socket or _own_socket(run.folder)
        helpers.append(_redis_role(run.folder, socket))
        environment[REDIS_VARIABLE] = f"unix://{socket}"
    if pipeline_of(config).actor_engine == "vllm" and not given_servers(config.rollouts.server):
        port = free_port()
        environment[SERVER_VARIABLE] = f"http://127.0.0.1:{port}"
        helpers.append(
            Role(
                name="server",
                command=(sys.executable, "-m", "ludic_vllm.run_server", folder, str(port)),
                hopeless=_MISTAKE,
                stop_within_s=20.0,
                url=environment[SERVER_VARIABLE],
                hung_after_s=config.rollouts.server_hung_after,
                num_gpus=config.rollouts.server_memory,
            )
        )
    needs = tuple(role.name for role in helpers)
    shared: dict[str, Any] = {"environment": environment, "needs": needs, "hopeless": _MISTAKE}
    actors = [
        Role(
            name=f"actor-{index}",
            command=ludic_command("actor", folder, "--actor-index", str(index)),
            when_done=WhenDone.IS_FINE,
            stop_within_s=30.0,
            num_gpus=actor_gpus,
            resources=asked.get("actor", {}),
            **shared,
        )
        for index in range(pipeline_of(config).actors)
    ]
    learner = Role(
        name="learner",
        command=ludic_command(
            "train", folder, "--resume"
        ),  # also for a new run: launch has written the folder's config
        when_done=WhenDone.ENDS_ALL,
        stop_within_s=600.0,  # it finishes its update and saves
        num_gpus=learner_gpus,
        resources=asked.get("learner", {}),
        **shared,
    )
    return [*helpers, learner, *actors]


def _redis_role(folder: Path, socket: Path) -> Role:
    """Redis on a socket of this user only. appendfsync=always: with `everysec`, kill -9 loses acknowledged writes."""
    program = shutil.which("redis-server")
    if program is None:
        raise ConfigError(
            "There is no redis-server on the PATH to start. Install it (apt-get install redis-server, brew install redis), or give "
            f"one that runs: --redis redis://HOST:6379/0, or ${REDIS_VARIABLE}."
        )
    data = (folder / REDIS).absolute()
    flags = {
        "--port": "0", "--unixsocket": str(socket), "--unixsocketperm": "700", "--dir": str(data), "--save": "",
        "--appendonly": "yes", "--appendfsync": "always", "--loglevel": "warning",
    }  # fmt: skip
    return Role(name="redis", command=(program, *(part for flag in flags.items() for part in flag)), stop_within_s=30.0)


def _own_socket(folder: Path) -> Path:
    return (folder / REDIS / "redis.sock").absolute()


@contextlib.contextmanager
def reachable_socket(folder: Path) -> Iterator[Path]:
    """A socket path in the run folder or, if that is too long, in a temporary folder."""
    if len(str(_own_socket(folder))) <= _LONGEST_SOCKET:
        yield _own_socket(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ludic-redis-") as place:
        yield Path(place) / "redis.sock"


def _threads(run: ResolvedRun) -> dict[str, str]:
    """Divide the cores among the processes, which would otherwise compete for all of them."""
    if "OMP_NUM_THREADS" in os.environ or run.config.model.threads is not None:
        return {}
    share = (os.cpu_count() or 1) // (pipeline_of(run.config).actors + 1)
    return {"OMP_NUM_THREADS": str(max(1, share))}
