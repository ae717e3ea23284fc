"""Docker, Podman and Apptainer: a container per program, through their command lines.

Slower than bubblewrap (a container takes about a second to start, so the pool's warm containers matter more), but with the Python
of any image, and on hosts where bubblewrap is not allowed. The container has no network, a read-only root, no capabilities, an
unprivileged user, and limits on memory and processes; the supervisor inside is its process 1.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from ludic.types import ConfigError
from ludic_sandbox.interface import MB, Bind, SandboxError, SandboxLimits
from ludic_sandbox.process_sandbox import LauncherPool
from ludic_sandbox.runner.runner_process import (
    BASE_ENV,
    GroupIsolation,
    Isolation,
    RunnerProcess,
    start_runner,
    supervisor_command,
)

logger = logging.getLogger(__name__)
Engine = Literal["docker", "podman", "podman-hpc"]
_USER = "65534:65534"
_APPTAINER_WORKSPACE = "/tmp"


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerConfig:
    """Settings of the docker, podman and apptainer backends, and of podman-hpc on Slurm clusters."""

    python_version: str = "3.11"
    base_image: str | None = None
    """None: python:<python_version>-slim. The image must exist locally: nothing is pulled. Apptainer: a .sif file or a folder."""
    memory_limit: str = "256m"
    """The container's memory; a run that asks for more gets another container."""
    cpu_quota: int | None = None
    """CPU time per 100,000 of one core; 0 sets no limit. None: 50,000 with docker, no limit with podman."""
    network_disabled: bool = True
    working_dir: str = "/workspace"
    """The only writable folder. If the image has it, all users must have write permission."""
    gpu: bool = False
    """podman-hpc's --gpu, apptainer's --nv; docker has no such flag."""
    extra_args: tuple[str, ...] = ()
    """More arguments for `docker run` or `podman run`."""
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """memory_limit replaces its memory_mb."""


DockerSandboxConfig = PodmanConfig = ContainerConfig


class ContainerLauncher:
    """Starts runner processes inside containers."""

    def __init__(self, engine: Engine, config: ContainerConfig) -> None:
        if problem := engine_problem(engine):
            raise SandboxError(f"The {engine} backend cannot be used: {problem}")
        if config.gpu and engine == "docker":
            raise ConfigError(
                "ContainerConfig(gpu=True) is podman-hpc's --gpu. For docker give extra_args=('--gpus', 'all')."
            )
        self._engine = engine
        if engine != "docker":
            facts = PodmanFacts.read(engine)
            config = replace(config, extra_args=(*facts.run_args, *config.extra_args))
            if not facts.has_limits:
                logger.warning(
                    "%s without root and with cgroups v1 limits the memory of each process, but neither their number nor their "
                    "memory together. Use bubblewrap, or a host with cgroups v2.", engine,
                )  # fmt: skip
        self._config = config

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        name = f"{_own_names()}{uuid.uuid4().hex}"
        runner = await start_runner(
            container_command(self._engine, self._config, name, limits, binds),
            env=os.environ,  # of the client, to find the engine; the program has the container's
            isolation=ContainerIsolation(self._engine, name),
            workspace=self._config.working_dir,
            limit_processes=False,  # RLIMIT_NPROC would count all containers; --pids-limit counts this one
            cwd=tempfile.gettempdir(),  # conmon leaves an empty file `oom` in its folder when memory runs out
        )
        try:
            await runner.ready()
        except SandboxError as error:
            if "unable to setup user" not in str(error):
                raise
            raise SandboxError(f"{error}{_NO_SUBORDINATE_IDS}") from error
        return runner

    async def remove_leftovers(self) -> None:
        """Remove the containers of harnesses that were killed: their clients are gone, but the engine keeps the containers."""
        listed = await _output(self._engine, "ps", "--all", "--filter", "name=ludic-", "--format", "{{.Names}}")
        left = [name for name in listed.split() if _owner_is_gone(name)]
        if left:
            await _output(self._engine, "rm", "--force", *left)


_NO_SUBORDINATE_IDS = (
    " A container of an ordinary user needs subordinate ids: apt install uidmap, then as root "
    "usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER."
)


class _ContainerState(NamedTuple):
    """A container as the engine describes it."""

    id: str
    status: str
    was_killed_for_memory: bool
    monitor: int
    """Process number of podman's conmon, which holds the container's streams; 0 if it has ended, and for docker."""

    @classmethod
    def read(cls, text: str) -> Self | None:
        """None if there is no such container."""
        parts = text.split()
        return cls(parts[0], parts[1], parts[2] == "true", int(parts[3])) if len(parts) == 4 else None


class ContainerIsolation(Isolation):
    """One container, by name. It starts with its memory limit; RLIMIT_AS sets lower ones."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name: str | None = name
        self._left: str | None = None
        """Its name, if it did not exist at the end, because the client was about to make it, or could not be removed, because the
        client was about to remove it."""
        self._was_killed_for_memory = False
        self._was_running = False
        self._has_lost_monitor = False

    async def end(self) -> None:
        name, self._name = self._name, None
        if name is None:
            return
        state = None
        monitor = "0" if self._engine == "docker" else "{{.State.ConmonPid}}"
        shown = "{{.Id}} {{.State.Status}} {{.State.OOMKilled}} " + monitor
        try:
            state = _ContainerState.read(await _output(self._engine, "inspect", "--format", shown, name))
            if state is not None:
                self._was_killed_for_memory = state.was_killed_for_memory
                self._was_running = state.status == "running"
                self._has_lost_monitor = self._was_running and state.monitor > 0 and not _lives(state.monitor)
        finally:
            self._left = name
            removed = await _uninterrupted(_output(self._engine, "rm", "--force", name))
        if state is not None and removed:
            self._left = None
        if state is not None and self._has_lost_monitor:
            _remove_groups(state.id)

    async def finish(self) -> None:
        left, self._left = self._left, None
        if left is not None:
            await _uninterrupted(_output(self._engine, "rm", "--force", left))

    def memory(self) -> tuple[int | None, bool]:
        return None, self._was_killed_for_memory

    def failure(self, *, timed_out: bool, was_killed: bool) -> str:
        if self._has_lost_monitor:
            return "The container's monitor process (conmon) was killed."
        if self._was_running and not timed_out:
            return f"The client `{self._engine} run` ended before its container."
        return ""


class _ContainerSandboxPool(LauncherPool):
    """Sandboxes that are containers of one engine."""

    _launcher: ContainerLauncher

    def __init__(self, engine: Engine, config: ContainerConfig | None, **settings: Any) -> None:
        config = config or ContainerConfig()
        super().__init__(ContainerLauncher(engine, config), effective_limits(config), **settings)

    async def start(self) -> None:
        await self._launcher.remove_leftovers()
        await super().start()


class DockerSandboxPool(_ContainerSandboxPool):
    """Sandboxes that are Docker containers."""

    def __init__(self, config: ContainerConfig | None = None, **settings: Any) -> None:
        super().__init__("docker", config, **settings)


class PodmanSandboxPool(_ContainerSandboxPool):
    """Sandboxes that are Podman containers; `engine` may be podman-hpc."""

    def __init__(
        self,
        config: ContainerConfig | None = None,
        *,
        engine: Literal["podman", "podman-hpc"] = "podman",
        **settings: Any,
    ) -> None:
        super().__init__(engine, config, **settings)


class _ApptainerLauncher:
    """Starts runner processes under `apptainer exec`, which has no daemon: a container is a process tree."""

    def __init__(self, config: ContainerConfig) -> None:
        if problem := engine_problem("apptainer"):
            raise SandboxError(f"The apptainer backend cannot be used: {problem}")
        self._config = config
        self._has_groups = os.geteuid() == 0 or Path("/sys/fs/cgroup/cgroup.controllers").exists()
        """True if Apptainer can limit memory and processes; with cgroups v1 it needs root."""

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        isolation = GroupIsolation()
        runner = await start_runner(
            apptainer_command(self._config, limits, binds, with_groups=self._has_groups),
            env=os.environ,  # of the client; --cleanenv keeps it from the program
            isolation=isolation,
            workspace=_APPTAINER_WORKSPACE,
            limit_processes=False,
            new_session=True,
        )
        isolation.group = runner.pid
        await runner.ready()
        return runner


class ApptainerSandboxPool(LauncherPool):
    """Sandboxes that are Apptainer containers. The command line is tested; it has not been run by Ludic's tests."""

    def __init__(self, config: ContainerConfig | None = None, **settings: Any) -> None:
        config = config or ContainerConfig()
        super().__init__(_ApptainerLauncher(config), effective_limits(config), **settings)


# --- commands ---


def apptainer_command(
    config: ContainerConfig, limits: SandboxLimits, binds: Sequence[Bind] = (), *, with_groups: bool
) -> list[str]:
    """The whole `exec` command, supervisor included. The workspace is /tmp, whose size the host's apptainer.conf sets."""
    if config.base_image is None:
        raise ConfigError(
            "The apptainer backend needs ContainerConfig(base_image=…): a .sif file or an unpacked folder (apptainer build "
            "python.sif docker://python:3.11-slim makes one)."
        )
    # --no-init: the supervisor is process 1.
    command = ["apptainer", "exec", "--containall", "--no-init", "--cleanenv", "--no-home", "--no-privs"]
    command += ["--net", "--network", "none"] if config.network_disabled else []
    command += ["--nv"] if config.gpu else []
    if with_groups:
        memory = str(limits.memory_mb * MB)
        command += ["--memory", memory, "--memory-swap", memory, "--pids-limit", str(limits.max_processes)]
        command += ["--cpus", f"{config.cpu_quota / 100_000:g}"] if config.cpu_quota else []
    command += ["--pwd", _APPTAINER_WORKSPACE]
    for variable, setting in BASE_ENV.items():
        command += ["--env", f"{variable}={setting}"]
    for bind in binds:
        command += ["--bind", f"{bind.source}:{bind.target}:{'rw' if bind.writable else 'ro'}"]
    return [*command, *config.extra_args, config.base_image, "python3", *supervisor_command()]


def container_command(
    engine: Engine, config: ContainerConfig, name: str, limits: SandboxLimits, binds: Sequence[Bind] = ()
) -> list[str]:
    """The whole `run` command, supervisor included."""
    memory = limits.memory_mb * MB
    folder = config.working_dir
    command = [engine, "run", "--interactive", "--name", name, "--pull", "never", "--stop-timeout", "0"]
    command += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", _USER]
    command += ["--memory", str(memory), "--memory-swap", str(memory), "--pids-limit", str(limits.max_processes)]
    # nproc counts all containers of the user, so it is high here; without it podman requests more than it may.
    for limit, value in (("nofile", limits.max_open_files), ("core", 0), ("nproc", 4096)):
        command += ["--ulimit", f"{limit}={value}:{value}"]
    command += ["--tmpfs", f"{folder}:rw,exec,nosuid,nodev,size={limits.workspace_mb}m,mode=1777", "--workdir", folder]
    command += [] if engine == "docker" else ["--read-only-tmpfs=false"]  # podman would add writable /tmp, /run …
    command += ["--network", "none"] if config.network_disabled else []
    default_quota = 50_000 if engine == "docker" else 0
    quota = default_quota if config.cpu_quota is None else config.cpu_quota
    command += ["--cpu-quota", str(quota)] if quota else []
    command += ["--gpu"] if config.gpu else []
    for variable, setting in BASE_ENV.items():
        command += ["--env", f"{variable}={setting}"]
    for bind in binds:
        command += ["--volume", f"{bind.source}:{bind.target}:{'rw' if bind.writable else 'ro'}"]
    image = config.base_image or f"python:{config.python_version}-slim"
    return [*command, *config.extra_args, image, "python3", *supervisor_command()]


def effective_limits(config: ContainerConfig) -> SandboxLimits:
    """The config's limits with its memory_limit."""
    return replace(config.limits, memory_mb=memory_bytes(config.memory_limit) // MB)


def memory_bytes(text: str) -> int:
    """Bytes of 256m, 2g, or a plain number, as the engines read them."""
    units = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    number, unit = (text[:-1], text[-1].lower()) if text and text[-1].lower() in units else (text, "b")
    if not number.isdecimal() or int(number) == 0:
        raise ConfigError(f"memory_limit={text!r} is no amount of memory. Write it like '256m' or '2g'.")
    return int(number) * units[unit]


async def _uninterrupted(work: Coroutine[Any, Any, str]) -> str:
    """Wait for the work, also when the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


async def _output(*command: str) -> str:
    """The command's output; empty if it fails, as for a container that never started."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        stdout, _ = await process.communicate()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        raise
    return stdout.decode(errors="replace") if process.returncode == 0 else ""


def _own_names() -> str:
    """The beginning of the names of this process's containers; numbers of processes are valid in their namespace."""
    return f"ludic-{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}-"


def _owner_is_gone(name: str) -> bool:
    """True if a container's harness ran in this process namespace and has ended."""
    prefix, pid, namespace, *_ = (*name.split("-"), "", "")
    if prefix != "ludic" or not pid.isdecimal() or namespace != str(os.stat("/proc/self/ns/pid").st_ino):
        return False
    return not _lives(int(pid))


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _remove_groups(container: str) -> None:
    """Remove the cgroups of a container without a monitor, which the engine leaves behind where it manages them itself."""
    root, name = Path("/sys/fs/cgroup"), f"libpod_parent/libpod-{container}"
    for group in (root / name, *root.glob(f"*/{name}")):
        with contextlib.suppress(OSError):  # another user's, or the kernel has not noticed its end
            group.rmdir()


# --- is it there? ---


def engine_problem(engine: str) -> str:
    """Why the engine cannot be used here; empty when it can."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed."
    question = "version" if engine == "apptainer" else "info"
    try:
        done = subprocess.run([engine, question], capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return f"`{engine} {question}` did not answer within 30 s. Is its daemon running?"
    if done.returncode != 0:
        return f"`{engine} {question}` fails: {done.stderr.strip()[-500:]}"
    return ""


def engine_args(engine: str) -> tuple[str, ...]:
    """Arguments that `run` needs on this host."""
    return () if engine == "docker" else PodmanFacts.read(engine).run_args


class PodmanFacts(NamedTuple):
    """Facts that decide how podman is used on this host."""

    cgroups: str
    """v1 or v2."""
    is_rootless: bool

    @classmethod
    def read(cls, engine: str) -> Self:
        shown = "{{.Host.CgroupsVersion}} {{.Host.Security.Rootless}}"
        done = subprocess.run([engine, "info", "--format", shown], capture_output=True, text=True, timeout=30)
        cgroups, _, rootless = done.stdout.strip().partition(" ")
        return cls(cgroups, rootless == "true")

    @property
    def run_args(self) -> tuple[str, ...]:
        """crun, podman's default runtime, refuses hosts with both versions of cgroups; runc does not."""
        return ("--runtime", "runc") if self.cgroups == "v1" and shutil.which("runc") else ()

    @property
    def has_limits(self) -> bool:
        """True if --memory and --pids-limit have an effect."""
        return not (self.is_rootless and self.cgroups == "v1")
