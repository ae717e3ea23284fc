"""A plain subprocess: NOT a sandbox. For programs you would run yourself, on machines where nothing else can be had.

It limits time, output, and the memory of each process, and it ends the program's process group. It hides nothing: the
program has your files, your network and your rights, and can leave processes behind. It is never chosen by itself.
"""

import contextlib
import logging
import os
import shutil
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.sandbox.bubblewrap import find_interpreter
from ludic.sandbox.interface import Bind, SandboxLimits
from ludic.sandbox.pool import BaseSandboxPool
from ludic.sandbox.process_sandbox import BASE_ENV, ProcessSandbox
from ludic.sandbox.runner_process import RunnerProcess, start_runner, supervisor_command
from ludic.types import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class SubprocessConfig:
    """Settings of the subprocess backend."""

    limits: SandboxLimits = field(default_factory=SandboxLimits)
    """Of these, processes in total and the size of the workspace are not enforced."""
    python: str = "auto"


class SubprocessLauncher:
    """Starts runners that are plain processes, each in its own folder."""

    def __init__(self, config: SubprocessConfig) -> None:
        self._interpreter = find_interpreter(config.python)

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        if binds:
            raise ConfigError("The subprocess backend cannot bind folders: its programs see the host as it is.")
        folder = tempfile.mkdtemp(prefix="ludic-subprocess-")
        enclosure = GroupIsolation(folder)
        cell = await start_runner(
            [self._interpreter.path, *supervisor_command(self._interpreter.magic)],
            env=BASE_ENV,
            enclosure=enclosure,
            workspace=folder,
            limit_processes=False,  # RLIMIT_NPROC would count everything that this user runs
            new_session=True,
        )
        enclosure.group = cell.pid
        await cell.ready()
        return cell


class GroupIsolation:
    """A process group and its folder. A program that leaves the group leaves us."""

    def __init__(self, folder: str) -> None:
        self.group: int | None = None
        self._folder = folder

    async def identify(self) -> None:
        """Its group is known from the start."""

    def begin(self, limit_bytes: int) -> None:
        """There is nothing that could count the group's memory."""

    async def end(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        shutil.rmtree(self._folder, ignore_errors=True)

    def memory(self) -> tuple[int | None, bool]:
        return None, False


class SubprocessSandboxPool(BaseSandboxPool):
    """Plain processes behind the interface of a sandbox pool."""

    def __init__(self, config: SubprocessConfig | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._config = config or SubprocessConfig()
        self._launcher = SubprocessLauncher(self._config)
        logger.warning("The subprocess backend is not a sandbox: programs run with your rights, files and network.")

    async def _make_sandbox(self) -> ProcessSandbox:
        return ProcessSandbox(self._launcher, self._config.limits)
