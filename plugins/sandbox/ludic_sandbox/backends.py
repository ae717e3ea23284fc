"""Choosing a backend: which ones exist, which work here, a started pool of one; and the plain subprocess backend."""

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any
from weakref import WeakKeyDictionary

from ludic.types import ConfigError, UnknownName
from ludic_sandbox.bubblewrap import BubblewrapConfig, BubblewrapSandboxPool, bubblewrap_problem, find_interpreter
from ludic_sandbox.containers import (
    ApptainerSandboxPool,
    ContainerConfig,
    DockerSandboxPool,
    PodmanSandboxPool,
    engine_problem,
)
from ludic_sandbox.interface import Bind, SandboxError, SandboxLimits
from ludic_sandbox.pool import BaseSandboxPool
from ludic_sandbox.process_sandbox import LauncherPool
from ludic_sandbox.runner.runner_process import (
    BASE_ENV,
    GroupIsolation,
    RunnerProcess,
    start_runner,
    supervisor_command,
)

logger = logging.getLogger(__name__)


class SandboxBackend(StrEnum):
    """The ways in which programs are isolated."""

    AUTO = "auto"  # the first that works of bubblewrap and the container engines
    BUBBLEWRAP = "bubblewrap"
    DOCKER = "docker"
    PODMAN = "podman"
    PODMAN_HPC = "podman-hpc"
    APPTAINER = "apptainer"  # only if requested by name: it needs an image file
    SUBPROCESS = "subprocess"  # no isolation; only if requested by name


def _order() -> list[SandboxBackend]:
    """Slurm clusters have no docker; elsewhere podman is rarer."""
    engines = [SandboxBackend.DOCKER, SandboxBackend.PODMAN, SandboxBackend.PODMAN_HPC]
    if "SLURM_JOB_ID" in os.environ:
        engines.reverse()
    return [SandboxBackend.BUBBLEWRAP, *engines]


def backend_problem(backend: SandboxBackend | str) -> str:
    """Why the backend cannot be used here; empty when it can."""
    match _named(backend):
        case SandboxBackend.BUBBLEWRAP:
            return bubblewrap_problem()
        case SandboxBackend.SUBPROCESS | SandboxBackend.AUTO:
            return ""
        case engine:
            return engine_problem(engine.value)


def is_bubblewrap_available() -> bool:
    return not bubblewrap_problem()


def is_docker_available() -> bool:
    return not engine_problem("docker")


def is_podman_available() -> bool:
    return not engine_problem("podman")


def is_podman_hpc_available() -> bool:
    return not engine_problem("podman-hpc")


def get_backend_info() -> dict[str, str]:
    """Backend → "available" or why it is not."""
    real = [backend for backend in SandboxBackend if backend is not SandboxBackend.AUTO]
    return {backend.value: backend_problem(backend) or "available" for backend in real}


def detect_available_backend() -> SandboxBackend:
    """The first backend that works here, never the plain subprocess; SandboxError (a RuntimeError) if none does."""
    problems = []
    for backend in _order():
        problem = backend_problem(backend)
        if not problem:
            return backend
        problems.append(f"  {backend.value}: {problem}")
    raise SandboxError(
        "No sandbox backend works here.\n"
        + "\n".join(problems)
        + "\nInstall bubblewrap (apt install bubblewrap), or start docker. backend='subprocess' runs programs without any "
        "isolation; choose it only if you would run them yourself."
    )


def make_pool(
    *,
    n_workers: int | None = 4,
    backend: SandboxBackend | str = SandboxBackend.AUTO,
    python_version: str = "auto",
    config: "BubblewrapConfig | ContainerConfig | SubprocessConfig | None" = None,
    **pool_settings: Any,
) -> BaseSandboxPool:
    """A pool that is not started. `config` belongs to the backend; `pool_settings` are further arguments of its pool.

    `backend` may also be the address of a `ludic sandbox-server`. `python_version`: like "3.12". "auto" is this Python's version if
    the backend has it. `n_workers`: None is one per core, or as many as the sandbox server has.
    """
    if _is_address(backend):
        if config is not None or python_version != "auto":
            raise ConfigError(f"The sandbox server at {backend} has its own config and Python: give none here.")
        return _remote_pool(backend, n_workers=n_workers, **pool_settings)
    chosen = _named(backend)
    chosen = detect_available_backend() if chosen is SandboxBackend.AUTO else chosen
    return _pool(chosen, config, python_version, {"n_workers": n_workers or os.cpu_count() or 1, **pool_settings})


async def create_sandbox_pool(
    *,
    n_workers: int | None = 4,
    backend: SandboxBackend | str = SandboxBackend.AUTO,
    python_version: str = "auto",
    cache_size: int = 10_000,
    max_concurrent_ops: int = 8,
    config: "BubblewrapConfig | ContainerConfig | SubprocessConfig | None" = None,
    **pool_settings: Any,
) -> BaseSandboxPool:
    """A started pool; `make_pool` explains the arguments."""
    pool = make_pool(
        n_workers=n_workers,
        backend=backend,
        python_version=python_version,
        config=config,
        cache_size=cache_size,
        max_concurrent_ops=max_concurrent_ops,
        **pool_settings,
    )
    await pool.start()
    return pool


def _pool(chosen: SandboxBackend, config: Any, version: str, settings: dict[str, Any]) -> BaseSandboxPool:
    if chosen in (SandboxBackend.BUBBLEWRAP, SandboxBackend.SUBPROCESS):
        given = {} if version == "auto" else {"python": version}
        if chosen is SandboxBackend.BUBBLEWRAP:
            return BubblewrapSandboxPool(_checked(config, BubblewrapConfig, given), **settings)
        return SubprocessSandboxPool(_checked(config, SubprocessConfig, given), **settings)
    in_image = {"python_version": "{}.{}".format(*sys.version_info) if version == "auto" else version}
    made = _checked(config, ContainerConfig, in_image)
    match chosen:
        case SandboxBackend.DOCKER:
            return DockerSandboxPool(made, **settings)
        case SandboxBackend.APPTAINER:
            return ApptainerSandboxPool(made, **settings)
        case SandboxBackend.PODMAN:
            return PodmanSandboxPool(made, **settings)
        case _:
            return PodmanSandboxPool(made, engine="podman-hpc", **settings)


def _is_address(backend: str) -> bool:
    return "://" in backend


def _remote_pool(url: str, **settings: Any) -> BaseSandboxPool:
    from ludic_sandbox.remote.client import RemoteSandboxPool  # here and not above: it loads the HTTP client

    return RemoteSandboxPool(url, **settings)


def _checked(config: Any, kind: type[Any], given: dict[str, str]) -> Any:
    """The given config, or one with this version; a given config has its own version."""
    if config is None:
        return kind(**given)
    if not isinstance(config, kind):
        raise ConfigError(f"This backend takes a {kind.__name__}, but config is a {type(config).__name__}.")
    return config


def _named(backend: SandboxBackend | str) -> SandboxBackend:
    try:
        return SandboxBackend(backend)
    except ValueError:
        raise UnknownName.among("sandbox backend", str(backend), [one.value for one in SandboxBackend]) from None


# --- one pool per event loop, shared by envs and tools without their own ---

_pools: "WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[BaseSandboxPool]]" = WeakKeyDictionary()


BACKEND_VARIABLE = "LUDIC_SANDBOX"
"""Names the backend of the shared pool: a SandboxBackend, or the address of a `ludic sandbox-server`."""


def check_backend(backend: str) -> None:
    """ConfigError for a text that is neither a backend nor an address."""
    if _is_address(backend):
        _remote_pool(backend)
    else:
        _named(backend)


async def require_server(backend: str) -> None:
    """ConfigError for the address of a server that cannot be used, for its token or because it does not answer. One that is
    starting is waited for."""
    if not _is_address(backend):
        return
    pool = _remote_pool(backend)
    try:
        await pool.start()
    except SandboxError as error:
        raise ConfigError(str(error)) from error
    finally:
        await pool.shutdown()


async def shared_pool() -> BaseSandboxPool:
    """The pool of the running event loop: of the backend in $LUDIC_SANDBOX, else of the first that works here.

    Made at the first call, and shut down when the loop ends (`asyncio.run` then cancels all tasks).
    """
    loop = asyncio.get_running_loop()
    if loop not in _pools or _is_unusable(_pools[loop]):
        _pools[loop] = asyncio.create_task(_start())
    return await asyncio.shield(_pools[loop])


async def _start() -> BaseSandboxPool:
    backend = os.environ.get(BACKEND_VARIABLE) or SandboxBackend.AUTO
    pool = await create_sandbox_pool(n_workers=None, backend=backend)
    _keepers[pool] = asyncio.create_task(_keep(pool))
    return pool


async def _keep(pool: BaseSandboxPool) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        _pools.pop(asyncio.get_running_loop(), None)  # its value refers to the loop, which would never be freed
        await pool.shutdown()


_keepers: "WeakKeyDictionary[BaseSandboxPool, asyncio.Task[None]]" = WeakKeyDictionary()
"""The loop has only weak references to its tasks."""


def _is_unusable(starting: "asyncio.Task[BaseSandboxPool]") -> bool:
    if not starting.done():
        return False
    return starting.cancelled() or starting.exception() is not None or starting.result().has_given_up


# --- the subprocess backend: no sandbox at all ---
# For programs that you would run yourself, on machines where no other backend works. It limits time, output and the memory of each
# process, and ends the program's process group. The program has your files, your network and your rights, and can leave
# processes behind. `auto` never chooses it.


@dataclass(frozen=True, kw_only=True, slots=True)
class SubprocessConfig:
    """Settings of the subprocess backend."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """The number of processes and the size of the workspace are not enforced."""
    python: str = "auto"


class _SubprocessLauncher:
    """Starts runners that are plain processes, each in its own folder."""

    def __init__(self, config: SubprocessConfig) -> None:
        self._interpreter = find_interpreter(config.python)

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        if binds:
            raise ConfigError("The subprocess backend cannot bind folders: its programs see the host as it is.")
        folder = tempfile.mkdtemp(prefix="ludic-subprocess-")
        isolation = GroupIsolation(folder)
        runner = await start_runner(
            [self._interpreter.path, *supervisor_command(self._interpreter.magic)],
            env=BASE_ENV,
            isolation=isolation,
            workspace=folder,
            limit_processes=False,  # RLIMIT_NPROC would count everything that this user runs
            new_session=True,
        )
        isolation.group = runner.pid
        await runner.ready()
        return runner


class SubprocessSandboxPool(LauncherPool):
    """Plain processes behind the interface of a sandbox pool."""

    def __init__(self, config: SubprocessConfig | None = None, **settings: Any) -> None:
        config = config or SubprocessConfig()
        super().__init__(_SubprocessLauncher(config), config.limits, **settings)
        logger.warning("The subprocess backend is not a sandbox: programs run with your rights, files and network.")
