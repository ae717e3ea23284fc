"""Which roles a pipeline has, as commands: what a scheduler starts by hand, `ludic launch` starts from here."""

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ludic.cli.pipeline.supervisor import Role, WhenDone
from ludic.inference.vllm.command import free_port
from ludic.run.config import REDIS_VARIABLE, SERVER_VARIABLE, given_redis, given_servers
from ludic.run.folder import REDIS
from ludic.run.resolve import ResolvedRun
from ludic.types import ConfigError

_MISTAKE = frozenset({2})
"""Exit code of our own commands for what the user has to correct."""
_LONGEST_SOCKET = 100
"""Characters of a socket's path; systems allow a little more."""
LUDIC = (sys.executable, "-P", "-m", "ludic.cli.main")
"""-P, as for the command itself: modules of the current folder do not come before those beside a user's file."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What learner and actors ask a scheduler for."""

    learner_gpus: float = 0.0
    actor_gpus: float = 0.0


def make_roles(run: ResolvedRun, sizes: Sizes | None = None, *, socket: Path | None = None) -> list[Role]:
    """In the order in which they are started; each names those that have to outlive it. `socket`: of our own Redis."""
    sizes, config = sizes or Sizes(), run.config
    helpers: list[Role] = []
    environment = _threads(run)
    if given_redis(config.pipeline) is None:
        socket = socket or own_socket(run.folder)
        helpers.append(redis_role(run.folder, socket))
        environment[REDIS_VARIABLE] = f"unix://{socket}"
    if config.samples_on_vllm and not given_servers(config.rollouts.server):
        port = free_port()
        environment[SERVER_VARIABLE] = f"http://127.0.0.1:{port}"
        helpers.append(server_role(run, port))
    needs = tuple(role.name for role in helpers)
    folder = str(run.folder)
    actors = [
        Role(
            name=f"actor-{index}",
            command=(*LUDIC, "actor", folder, "--actor-index", str(index)),
            environment=environment,
            needs=needs,
            when_done=WhenDone.IS_FINE,
            hopeless=_MISTAKE,
            stop_within_s=30.0,
            num_gpus=sizes.actor_gpus,
        )
        for index in range(config.pipeline.actors)
    ]
    learner = Role(
        name="learner",
        command=(*LUDIC, "train", folder, "--resume"),  # from nothing too: launch has written the folder's config
        environment=environment,
        needs=needs,
        when_done=WhenDone.ENDS_ALL,
        hopeless=_MISTAKE,
        stop_within_s=600.0,  # it finishes its update and saves
        num_gpus=sizes.learner_gpus,
    )
    return [*helpers, learner, *actors]


def redis_role(folder: Path, socket: Path) -> Role:
    """On a socket that only this user can open. It answers when a write is on disk: with `everysec` a kill -9 loses some."""
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


def server_role(run: ResolvedRun, port: int) -> Role:
    return Role(
        name="server",
        command=(sys.executable, "-m", "ludic.cli.pipeline.server", str(run.folder), str(port)),
        hopeless=_MISTAKE,
        stop_within_s=20.0,
        num_gpus=run.config.rollouts.server_memory,
    )


def own_socket(folder: Path) -> Path:
    return (folder / REDIS / "redis.sock").absolute()


@contextlib.contextmanager
def reachable_socket(folder: Path) -> Iterator[Path]:
    """In the run folder; or, if that lies too deep for a socket, in a temporary one, which is removed in the end."""
    if len(str(own_socket(folder))) <= _LONGEST_SOCKET:
        yield own_socket(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ludic-redis-") as place:
        yield Path(place) / "redis.sock"


def _threads(run: ResolvedRun) -> dict[str, str]:
    """Processes that each took all cores would spend their time on waiting for each other."""
    if "OMP_NUM_THREADS" in os.environ or run.config.model.threads is not None:
        return {}
    share = (os.cpu_count() or 1) // (run.config.pipeline.actors + 1)
    return {"OMP_NUM_THREADS": str(max(1, share))}
