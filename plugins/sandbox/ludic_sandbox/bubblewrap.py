"""Bubblewrap: Linux namespaces without a daemon, the default backend. What it isolates: docs/sandbox.md.

A runner is a process tree with its own user, process, network, IPC and host name spaces, a read-only view of /usr, and one writable
folder in memory. Started by root, the tree first changes to an unused user, so that the program has no rights on the host; where
the kernel permits, its memory is limited as a whole (ludic_sandbox.runner.cgroup).
"""

import asyncio
import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from ludic.types import ConfigError
from ludic_sandbox.interface import MB, Bind, SandboxError, SandboxLimits
from ludic_sandbox.process import readable
from ludic_sandbox.process_sandbox import LauncherPool
from ludic_sandbox.runner import seccomp
from ludic_sandbox.runner.cgroup import MemoryGroups, memory_groups
from ludic_sandbox.runner.runner_process import BASE_ENV, Isolation, RunnerProcess, start_runner, supervisor_command

# --- the Python of the host that runs inside ---

_FACTS = """
import sys
assert sys.version_info >= (3, 9)
from importlib.util import MAGIC_NUMBER
print(sys.base_prefix, '%d.%d' % sys.version_info[:2], MAGIC_NUMBER.hex(), sep='\\n')
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Interpreter:
    """A Python that can be started inside."""

    path: str
    prefix: str
    """The folder with its library."""
    version: str
    """Like "3.11"."""
    magic: str
    """Version of its bytecode."""

    @property
    def is_part_of_the_system(self) -> bool:
        """Below /usr, which every sandbox sees."""
        return Path(self.path).is_relative_to("/usr") and Path(self.prefix).is_relative_to("/usr")


def find_interpreter(wanted: str = "auto") -> _Interpreter:
    """`wanted`: a version like "3.11" (3.9 or newer), the path of an interpreter, or "auto": this version if the system has it.

    The system's Pythons come first: every user may read them, unlike one in a home folder.
    """
    if "/" in wanted:
        found = _ask(Path(wanted))
        if found is None:
            raise ConfigError(f"{wanted} cannot be run as a Python 3.9 or newer. Give another path, or a version.")
        return found
    this = f"{sys.version_info.major}.{sys.version_info.minor}"
    names = (f"python{this}", "python3") if wanted == "auto" else (f"python{wanted}",)
    candidates = [Path(folder, name) for name in names for folder in ("/usr/bin", "/usr/local/bin")]
    candidates.append(Path(sys.base_prefix) / "bin" / f"python{this}")
    known = []
    for candidate in candidates:
        found = _ask(candidate)
        if found is None:
            continue
        if wanted in ("auto", found.version):
            return found
        known.append(found.path)
    have = f"There is {', '.join(known)}" if known else "There is none"
    raise ConfigError(
        f"No Python {wanted} for the sandbox. {have}. Install it below /usr, or give the path of an interpreter, or 'auto'."
    )


def _ask(path: Path) -> _Interpreter | None:
    if not path.exists():
        return None
    try:
        done = subprocess.run([path, "-I", "-S", "-c", _FACTS], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    prefix, version, magic = done.stdout.splitlines()
    base = Path(prefix, "bin", f"python{version}")  # a virtual environment's own Python is a link to this one
    return _Interpreter(path=str(base if base.exists() else path), prefix=prefix, version=version, magic=magic)


_INSIDE_ID = "65534"
_WORKSPACE = "/tmp"
_IDENTIFY_S = 10.0
"""bwrap reports its child's process number at once, or never."""
_OLDEST = (0, 8)
"""The first version with --disable-userns and --size."""
_STAGE = Path("/run/ludic-sandbox")
"""Root only: binds are first mounted below this folder, in a mount namespace of the runner, where its user can reach them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BubblewrapConfig:
    """Settings of the bubblewrap backend."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    python: str = "auto"
    """A version, the path of an interpreter, or "auto"; see `find_interpreter`."""
    binds: tuple[Bind, ...] = ()
    """Files and folders of the host that every program sees in addition to /usr, such as packages (name them in PYTHONPATH)."""
    uid: int = 64_999
    """The user that programs run as if Ludic runs as root. No other program should use it."""
    loopback: bool = False
    """Programs may use IP sockets. There is no network either way: they reach only processes of the same sandbox."""


class BubblewrapLauncher:
    """Starts runners under bwrap."""

    def __init__(self, config: BubblewrapConfig) -> None:
        if problem := bubblewrap_problem():
            raise SandboxError(f"The bubblewrap backend cannot be used: {problem}")
        self._config = config
        self._interpreter = find_interpreter(config.python)
        self._groups: MemoryGroups | None = memory_groups()

    async def start(
        self, limits: SandboxLimits, binds: Sequence[Bind] = (), folders: Sequence[str] = ()
    ) -> RunnerProcess:
        """`folders` are further writable folders in memory, of `workspace_mb` each."""
        binds = [*self._interpreter_binds(), *self._config.binds, *binds]
        _check_binds(binds)
        isolation = _NamespaceIsolation(self._groups)
        passed: list[int] = []
        try:
            passed.append(isolation.open_status())
            if seccomp.is_supported():
                passed.append(_filled_pipe(seccomp.program(loopback=self._config.loopback)))
            runner = await start_runner(
                [
                    *_as_other_user(self._uid, isolation.procs, binds),
                    *_bubblewrap_command(limits, _reachable(binds, self._uid), *passed, folders=folders),
                    self._interpreter.path,
                    *supervisor_command(self._interpreter.magic),
                ],
                env={},  # process 1 inside would show it
                isolation=isolation,
                workspace=_WORKSPACE,
                stdin_owner=self._uid,
                pass_fds=passed,
            )
        except BaseException:
            isolation.abandon()
            raise
        finally:
            for fd in passed:
                os.close(fd)
        await runner.ready()
        return runner

    async def close(self) -> None:
        if self._groups:
            await self._groups.remove_all()

    @property
    def has_groups(self) -> bool:
        """True if memory is limited for all processes of a runner together."""
        return self._groups is not None

    @property
    def _uid(self) -> int | None:
        return self._config.uid if os.geteuid() == 0 else None

    def _interpreter_binds(self) -> list[Bind]:
        if self._interpreter.is_part_of_the_system:
            return []
        return [Bind(source=self._interpreter.prefix, target=self._interpreter.prefix)]


class _NamespaceIsolation(Isolation):
    """A process namespace, ended through its process 1, and a memory group where there is one."""

    def __init__(self, groups: MemoryGroups | None) -> None:
        self._status_fd: int | None = None
        self._leader: int | None = None
        """A pidfd of process 1 inside."""
        self._groups = groups
        self._group = groups.lend() if groups else None
        self._memory: tuple[int | None, bool] = (None, False)

    def open_status(self) -> int:
        """The descriptor that bwrap writes its status to; the caller closes it once bwrap has it."""
        self._status_fd, write_end = os.pipe()
        return write_end

    @property
    def procs(self) -> Path | None:
        return self._group.procs if self._group else None

    def begin(self, limit_bytes: int) -> None:
        if self._group:
            self._group.begin(limit_bytes)

    async def identify(self) -> None:
        # While process 1 certainly lives: its number may be reused afterwards.
        status_fd, self._status_fd = self._status_fd, None
        if status_fd is None:
            return
        os.set_blocking(status_fd, False)
        try:
            async with asyncio.timeout(_IDENTIFY_S):
                await readable(status_fd)
        except TimeoutError:
            pass  # bwrap hangs
        except asyncio.CancelledError:
            _wait_for(status_fd)  # a moment; a child without a number could never be ended
            raise
        finally:
            with contextlib.suppress(
                BlockingIOError, ProcessLookupError
            ):  # without a child, only bwrap has to be ended
                self._leader = _leader(os.read(status_fd, 4096))
            os.close(status_fd)

    async def end(self) -> None:
        # Also during the start: if bwrap were killed before it lets its child continue, that child would wait without end. So this
        # waits for the child's number, and the child is killed first.
        try:
            await self.identify()
        finally:
            await self._end_leader()

    async def _end_leader(self) -> None:
        leader, self._leader = self._leader, None
        try:
            if leader is not None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(leader, signal.SIGKILL)
                await readable(leader)
        finally:
            if leader is not None:
                os.close(leader)
            self._give_group_back()

    def abandon(self) -> None:
        """Nothing was started."""
        if self._status_fd is not None:
            os.close(self._status_fd)
        self._status_fd = None
        self._give_group_back()

    def memory(self) -> tuple[int | None, bool]:
        return self._memory

    def failure(self, *, timed_out: bool, was_killed: bool) -> str:
        return "bwrap was killed from outside." if was_killed else ""

    def _give_group_back(self) -> None:
        group, self._group = self._group, None
        if group and self._groups:
            self._memory = group.read()
            self._groups.give_back(group)


class BubblewrapSandboxPool(LauncherPool):
    """Sandboxes under bubblewrap."""

    _launcher: BubblewrapLauncher

    def __init__(self, config: BubblewrapConfig | None = None, **settings: Any) -> None:
        config = config or BubblewrapConfig()
        super().__init__(BubblewrapLauncher(config), config.limits, **settings)

    async def shutdown(self) -> None:
        await super().shutdown()
        await self._launcher.close()


# --- commands ---


def _bubblewrap_command(
    limits: SandboxLimits,
    binds: Sequence[Bind],
    status_fd: int,
    filter_fd: int | None = None,
    *,
    folders: Sequence[str] = (),
) -> list[str]:
    """bwrap and its arguments, up to the program."""
    command = f"""
        {_tool("bwrap")} --unshare-all --unshare-user --disable-userns --assert-userns-disabled
        --die-with-parent --new-session --as-pid-1 --cap-drop ALL --uid {_INSIDE_ID} --gid {_INSIDE_ID} --hostname sandbox
        --ro-bind /usr /usr --ro-bind-try /etc/alternatives /etc/alternatives
        --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache
        --proc /proc --dev /dev --remount-ro /dev
        --size {limits.workspace_mb * MB} --perms 1777 --tmpfs {_WORKSPACE}
    """.split()
    for folder in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = Path("/", folder)
        if path.is_symlink():
            command += ["--symlink", os.readlink(path), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    for name in folders:
        command += ["--size", str(limits.workspace_mb * MB), "--perms", "1777", "--tmpfs", name]
    for bind in binds:
        command += ["--bind" if bind.writable else "--ro-bind", bind.source, bind.target]
    command += ["--remount-ro", "/", "--chdir", _WORKSPACE, "--clearenv"]
    for name, value in BASE_ENV.items():
        command += ["--setenv", name, value]
    command += ["--json-status-fd", str(status_fd)]
    if filter_fd is not None:
        command += ["--seccomp", str(filter_fd)]
    return [*command, "--"]


def _as_other_user(uid: int | None, procs: Path | None, binds: Sequence[Bind]) -> list[str]:
    """The command before bwrap if Ludic is root: join the memory group, mount the binds, become the user."""
    if uid is None:
        return []
    steps = [f"echo 0 > {procs}"] if procs else []
    if binds:
        _STAGE.mkdir(exist_ok=True)
        steps.append(f"mount -t tmpfs -o mode=755,size=1m none {_STAGE}")
    for bind, staged in zip(binds, _reachable(binds, uid), strict=True):
        make = "mkdir" if Path(bind.source).is_dir() else "touch"
        steps.append(f"{make} {staged.source} && mount --bind {shlex.quote(bind.source)} {staged.source}")
    steps.append('exec "$@"')
    become = [_tool("setpriv"), "--reuid", str(uid), "--regid", str(uid), "--clear-groups", "--"]
    private = [_tool("unshare"), "--mount", "--propagation", "private", "--"] if binds else []
    return [*private, "/bin/sh", "-ec", "\n".join(steps), "sh", *become]


def _reachable(binds: Sequence[Bind], uid: int | None) -> list[Bind]:
    """The binds as given, or, for another user, where root has mounted them."""
    if uid is None:
        return list(binds)
    return [replace(bind, source=str(_STAGE / str(number))) for number, bind in enumerate(binds)]


def _check_binds(binds: Sequence[Bind]) -> None:
    for bind in binds:
        if not Path(bind.source).exists():
            raise ConfigError(f"Cannot show {bind.source} to a sandboxed program: there is no such file or folder.")
        if not Path(bind.target).is_absolute():
            raise ConfigError(f"Bind.target={bind.target!r}, but it must be an absolute path inside the sandbox.")


@cache
def _tool(name: str) -> str:
    """Its path; the processes started here have no PATH."""
    found = shutil.which(name)
    if found is None:
        raise SandboxError(f"{name} is not installed. The bubblewrap backend needs bwrap, and as root util-linux.")
    return found


def _wait_for(fd: int) -> None:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    poll.poll(_IDENTIFY_S * 1000)


def _leader(status: bytes) -> int | None:
    """A pidfd of process 1 inside. bwrap writes its JSON in pieces, this number first; None if it failed before."""
    found = re.search(rb'"child-pid": (\d+)', status)
    return os.pidfd_open(int(found[1])) if found else None


def _filled_pipe(content: bytes) -> int:
    """A descriptor to read `content` from; it fits a pipe's buffer."""
    read_end, write_end = os.pipe()
    os.write(write_end, content)
    os.close(write_end)
    return read_end


# --- is it there? ---


@cache
def bubblewrap_problem() -> str:
    """Why bubblewrap cannot be used here; empty if it can. It is tried once."""
    if shutil.which("bwrap") is None:
        return "bwrap is not installed (Debian and Ubuntu: apt install bubblewrap)."
    version = subprocess.run(["bwrap", "--version"], capture_output=True, text=True).stdout
    numbers = tuple(int(part) for part in version.split()[-1].split(".")[:2])
    if numbers < _OLDEST:
        return f"bwrap is version {version.split()[-1]}, but 0.8 or newer is needed."
    read_end, write_end = os.pipe()
    try:
        command = _bubblewrap_command(SandboxLimits(), [], write_end)
        uid = BubblewrapConfig().uid if os.geteuid() == 0 else None
        done = subprocess.run(
            [*_as_other_user(uid, None, []), *command, "/usr/bin/true"],
            capture_output=True,
            text=True,
            env={},
            pass_fds=[write_end],
        )
    finally:
        os.close(read_end)
        os.close(write_end)
    if done.returncode == 0:
        return ""
    return (
        f"bwrap cannot make a sandbox here: {done.stderr.strip()} (Does the kernel let users make namespaces? See the sysctls "
        "kernel.unprivileged_userns_clone and kernel.apparmor_restrict_unprivileged_userns; a container needs that right.)"
    )
