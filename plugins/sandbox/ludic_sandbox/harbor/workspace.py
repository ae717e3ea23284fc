"""`Workspace`: folders in which many commands run one after the other, with the files of one task.

Two kinds are made here; containers.py has the third. `bubblewrap` is a sandbox whose writable folders are in memory: no network,
nothing of the host but its programs. `unsafe-local` is a temporary folder of the host and no sandbox. Either keeps one
supervisor (runner/supervisor.py) that runs command after command and kills every process that a command leaves, so nothing
runs between two commands.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import signal
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias
from weakref import WeakKeyDictionary

from ludic.types import ConfigError
from ludic_sandbox import BubblewrapConfig, SandboxError, SandboxLimits
from ludic_sandbox.bubblewrap import BubblewrapLauncher, find_interpreter
from ludic_sandbox.process_sandbox import run_verdict, termination
from ludic_sandbox.runner.runner_process import (
    BASE_ENV,
    Isolation,
    Job,
    RunnerProcess,
    start_runner,
    supervisor_command,
)

logger = logging.getLogger(__name__)

WorkspaceKind: TypeAlias = Literal["bubblewrap", "podman", "docker", "unsafe-local"]
HOME: Final = "/root"
FOLDERS: Final = ("/app", "/logs", "/root", "/solution", "/tests", "/tmp")
"""Writable in every workspace, in addition to the folders of the task."""
_LOCAL_UID = 64_999
"""The user of local workspaces if Ludic runs as root, as in ludic_sandbox.bubblewrap."""
_MAX_COMMAND = 100_000
"""Characters of one command; the kernel refuses arguments above 128 kB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandOutput:
    """The result of one command."""

    text: str
    """Its stdout and stderr, in order."""
    exit_code: int | None
    """None if a signal or a limit ended it."""
    detail: str = ""
    """Why it was ended, if not by itself."""
    timed_out: bool = False
    is_lost: bool = False
    """The workspace ended with it; later commands do not run."""
    outputs: Mapping[str, bytes] = field(default_factory=dict)
    """The requested files that are regular files."""
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkspaceCommand:
    """One bash command and what belongs to it; see `Workspace.run`."""

    text: str
    cwd: str
    timeout_s: float
    env: Mapping[str, str]
    files: Mapping[str, bytes]
    outputs: Sequence[str]
    is_trusted: bool


LOST: Final = CommandOutput(text="", exit_code=None, detail="The workspace has ended.", is_lost=True)


class Workspace(ABC):
    """Made by `open_workspace`. One command runs at a time; further ones wait."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._running: set[asyncio.Task[CommandOutput]] = set()

    async def run(
        self,
        command: str,
        *,
        cwd: str = "/",
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        files: Mapping[str, bytes] | None = None,
        outputs: Sequence[str] = (),
        is_trusted: bool = False,
    ) -> CommandOutput:
        """Run a bash command. `files` (absolute path → content) are written before, `outputs` are read after every process of the
        command has ended. `is_trusted` says that the files are the task's own scripts.

        A caller that is cancelled leaves the command running to its limit; the next one waits for it.
        """
        if "\0" in command or len(command) > _MAX_COMMAND:
            return CommandOutput(text="", exit_code=None, detail=f"A command has at most {_MAX_COMMAND:,} characters.")
        asked = WorkspaceCommand(
            text=command, cwd=cwd, timeout_s=timeout_s, env=env or {}, files=files or {}, outputs=outputs,
            is_trusted=is_trusted,
        )  # fmt: skip
        task = asyncio.create_task(self._in_turn(asked))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return await asyncio.shield(task)

    async def _in_turn(self, asked: WorkspaceCommand) -> CommandOutput:
        async with self._lock:
            return await self._run(asked)

    @abstractmethod
    async def _run(self, asked: WorkspaceCommand) -> CommandOutput: ...

    async def close(self) -> None:
        """End every process and remove every file. Calling it again does nothing."""
        for task in [*self._running]:
            task.cancel()
        if self._running:
            await asyncio.wait([*self._running])
        await self._close()

    @abstractmethod
    async def _close(self) -> None: ...


# --- one supervisor, many commands ---

IN_FOLDER: Final = 'cd -- "$1" 2>/dev/null; exec /bin/bash -c "$2" 2>&1'


class _RunnerWorkspace(Workspace):
    """A workspace behind a supervisor."""

    def __init__(self, runner: RunnerProcess, limits: SandboxLimits, paths: "Paths") -> None:
        super().__init__()
        self._runner = runner
        self._limits = limits
        self._paths = paths
        self._is_lost = False

    @property
    def pid(self) -> int:
        """Number of the outer process."""
        return self._runner.pid

    async def _run(self, asked: WorkspaceCommand) -> CommandOutput:
        if self._is_lost:
            return LOST
        inside, as_told = self._paths.inside, self._paths.script if asked.is_trusted else bytes
        job = Job(
            argv=["/bin/bash", "-c", IN_FOLDER, "bash", inside(asked.cwd), inside(asked.text)],
            files={path.lstrip("/"): as_told(data) for path, data in asked.files.items()},
            outputs=[path.lstrip("/") for path in asked.outputs],
            env={"HOME": inside(HOME), **{name: inside(value) for name, value in asked.env.items()}},
            limits=self._limits,
            timeout_s=asked.timeout_s,
            folder=self._paths.root or "/",
            keep=True,
        )
        self._is_lost = True  # also if this is cancelled: the runner is closed then
        raw = await self._runner.run(job)
        self._is_lost = raw.ending is None
        _, detail = run_verdict(raw)
        exit_code, _ = termination(raw)
        return CommandOutput(
            text=self._paths.outside((raw.stdout + raw.stderr).decode("utf-8", "replace")),
            exit_code=exit_code,
            detail="The command ended the whole workspace." if self._is_lost else detail,
            timed_out=raw.timed_out,
            is_lost=self._is_lost,
            outputs={f"/{path}": data for path, data in raw.outputs.items()},
            seconds=raw.ending.run_ms / 1000 if raw.ending else asked.timeout_s,
        )

    async def _close(self) -> None:
        self._is_lost = True
        await self._runner.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Locations of a workspace's folders. In a sandbox they are where the task says; a local workspace has them below `root`, and
    rewrites their names in commands and in the task's scripts, and back in what commands write."""

    root: str = ""
    folders: tuple[str, ...] = ()

    def inside(self, text: str) -> str:
        if not self.root:
            return text
        names = "|".join(re.escape(name) for name in self.folders)
        return re.sub(rf"(?<![\w.~/-])(?:{names})(?![\w.-])", lambda found: self.root + found[0], text)

    def script(self, data: bytes) -> bytes:
        try:
            return self.inside(data.decode()).encode() if self.root else data
        except UnicodeDecodeError:
            return data

    def outside(self, text: str) -> str:
        return text.replace(self.root, "") if self.root else text


# --- bubblewrap ---


class _Shared:
    """The launcher of one event loop, and how many workspaces use it; the last one frees its memory groups."""

    def __init__(self) -> None:
        self.launcher = BubblewrapLauncher(BubblewrapConfig(loopback=True))
        self.num_users = 0


_shared: "WeakKeyDictionary[asyncio.AbstractEventLoop, _Shared]" = WeakKeyDictionary()


class BubblewrapWorkspace(_RunnerWorkspace):
    """Folders in memory, in a sandbox. It ends with this process."""

    @classmethod
    async def open(cls, limits: SandboxLimits, folders: Sequence[str]) -> "BubblewrapWorkspace":
        loop = asyncio.get_running_loop()
        try:
            if loop not in _shared:
                _shared[loop] = _Shared()
        except SandboxError as error:
            raise ConfigError(
                f"{error} Without it there are workspace='podman', and workspace='unsafe-local', which runs the agent's commands "
                "as plain processes of this machine."
            ) from error
        shared = _shared[loop]
        shared.num_users += 1
        try:
            runner = await shared.launcher.start(limits, folders=[name for name in folders if name != "/tmp"])
        except BaseException:
            await _leave(shared)
            raise
        made = cls(runner, limits, Paths())
        made._used = shared
        return made

    _used: _Shared | None = None

    async def _close(self) -> None:
        used, self._used = self._used, None
        try:
            await super()._close()
        finally:
            if used is not None:
                await _leave(used)


async def _leave(shared: _Shared) -> None:
    shared.num_users -= 1
    if shared.num_users == 0:
        await shared.launcher.close()


# --- no sandbox ---


class LocalWorkspace(_RunnerWorkspace):
    """A temporary folder, and plain processes: no sandbox."""

    _warned = False

    @classmethod
    async def open(cls, limits: SandboxLimits, folders: Sequence[str]) -> "LocalWorkspace":
        if not LocalWorkspace._warned:
            LocalWorkspace._warned = True
            logger.warning(
                "workspace='unsafe-local' is no sandbox: the agent's commands are processes of this machine, with its network and "
                "every file that %s may read. Use it only on a machine that you can lose.",
                f"user {_LOCAL_UID}" if os.geteuid() == 0 else "you",
            )
        interpreter = find_interpreter()
        root = os.path.realpath(tempfile.mkdtemp(prefix="ludic-workspace-"))
        for name in folders:
            os.makedirs(root + name, exist_ok=True)
        isolation = _TreeIsolation(root)
        try:
            runner = await start_runner(
                [*_other_user(root, interpreter.path), interpreter.path, *supervisor_command(interpreter.magic)],
                env=BASE_ENV,
                isolation=isolation,
                workspace=root,
                limit_processes=False,
                new_session=True,
            )
        except BaseException:
            shutil.rmtree(root, ignore_errors=True)
            raise
        isolation.pid = runner.pid
        await runner.ready()
        return cls(runner, limits, Paths(root=root, folders=tuple(folders)))


def _other_user(root: str, interpreter: str) -> list[str]:
    """The command that becomes the user of local workspaces, who then owns `root`; empty if Ludic is not root."""
    if os.geteuid() != 0:
        return []
    setpriv = shutil.which("setpriv")
    parents = [Path(interpreter), *Path(interpreter).resolve().parents]
    if setpriv is None or not all(path.stat().st_mode & stat.S_IXOTH for path in parents):
        logger.warning(
            "The agent's commands run as root: there is no setpriv, or other users cannot run %s.", interpreter
        )
        return []
    for folder, names, _ in os.walk(root):
        for path in (folder, *(os.path.join(folder, name) for name in names)):
            os.chown(path, _LOCAL_UID, _LOCAL_UID)
    return [setpriv, "--reuid", str(_LOCAL_UID), "--regid", str(_LOCAL_UID), "--clear-groups", "--"]


class _TreeIsolation(Isolation):
    """The supervisor and its descendants, which cannot leave it while it lives: it is their subreaper."""

    def __init__(self, folder: str) -> None:
        self.pid: int | None = None
        self._folder = folder

    async def end(self) -> None:
        pid, self.pid = self.pid, None
        if pid is not None:
            while found := _descendants(pid):
                for one in found:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(one, signal.SIGKILL)
                await asyncio.sleep(0.01)  # the supervisor reaps them
                if not os.path.exists(f"/proc/{pid}/task"):
                    break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # also what a supervisor has left that was killed
        await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)


def _descendants(pid: int) -> list[int]:
    """Living processes below `pid`, from the process table."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with contextlib.suppress(OSError):
            state, parent = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[int(entry)] = int(parent)
    found, wave = [], [pid]
    while wave:
        wave = [child for child, parent in parents.items() if parent in wave]
        found += wave
    return found
