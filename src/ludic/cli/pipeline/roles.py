"""The roles of a pipeline as commands, for `ludic launch` and for schedulers."""

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
"""Exit code of `ludic` commands for a user's mistake."""
_LONGEST_SOCKET = 100
"""Maximum characters of a socket's path; systems allow a little more."""
LUDIC = (sys.executable, "-P", "-m", "ludic.cli.main")
"""-P, as for the command itself: modules of the current folder must not shadow those beside a user's file."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """GPUs that learner and actors request from a scheduler."""

    learner_gpus: float = 0.0
    actor_gpus: float = 0.0


def make_roles(run: ResolvedRun, sizes: Sizes | None = None, *, socket: Path | None = None) -> list[Role]:
    """The roles in start order; each names the roles that must outlive it. `socket`: of the Redis that is started."""
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
        command=(*LUDIC, "train", folder, "--resume"),  # also for a new run: launch has written the folder's config
        environment=environment,
        needs=needs,
        when_done=WhenDone.ENDS_ALL,
        hopeless=_MISTAKE,
        stop_within_s=600.0,  # it finishes its update and saves
        num_gpus=sizes.learner_gpus,
    )
    return [*helpers, learner, *actors]


def redis_role(folder: Path, socket: Path) -> Role:
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
    """A socket path in the run folder or, if that is too long, in a temporary folder."""
    if len(str(own_socket(folder))) <= _LONGEST_SOCKET:
        yield own_socket(folder)
        return
    with tempfile.TemporaryDirectory(prefix="ludic-redis-") as place:
        yield Path(place) / "redis.sock"


def _threads(run: ResolvedRun) -> dict[str, str]:
    """Divide the cores among the processes, which would otherwise compete for all of them."""
    if "OMP_NUM_THREADS" in os.environ or run.config.model.threads is not None:
        return {}
    share = (os.cpu_count() or 1) // (run.config.pipeline.actors + 1)
    return {"OMP_NUM_THREADS": str(max(1, share))}
