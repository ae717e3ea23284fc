"""Roles as local processes: each writes to its own log file, and none outlives this process or the roles it needs.

Output goes to a file and not to a pipe, because a child could not write its last lines after its reader was killed. See
die_with_parent.py for how a child learns that this process is gone.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ludic.cli.pipeline.supervisor import Role, Running
from ludic.types import die_with_parent

_GUARD = Path(die_with_parent.__file__)


class LocalProcesses:
    """Starts roles as children of this process; their files (NAME.log, NAME.pid) are in `logs`."""

    def __init__(self, logs: Path, environment: Mapping[str, str] | None = None) -> None:
        self._logs = logs
        self._environment = dict(os.environ if environment is None else environment)
        self._pipes: dict[str, tuple[int, int]] = {}

    def start(self, role: Role) -> Running:
        """Start the role under die_with_parent.py, which holds the pipes of the roles it needs and so keeps those alive."""
        self._logs.mkdir(parents=True, exist_ok=True)
        ours, _ = self._pipe(role.name)
        held = [self._pipe(name)[1] for name in role.needs]
        log, pid = (self._logs / f"{role.name}.{ending}" for ending in ("log", "pid"))
        pid.unlink(missing_ok=True)  # the old pid may belong to another process now
        guard = [sys.executable, "-I", "-S", str(_GUARD), "--pipe", str(ours), "--grace", str(role.stop_within_s)]
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [*guard, "--pid-file", str(pid), "--", *role.command],
                env={**self._environment, **role.environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process gets Ctrl-C and stops the roles in order
                pass_fds=(ours, *held),
            )
        return LocalProcess(process, log, begin)

    def close(self) -> None:
        for ends in self._pipes.values():
            for end in ends:
                os.close(end)
        self._pipes = {}

    def _pipe(self, name: str) -> tuple[int, int]:
        if name not in self._pipes:
            self._pipes[name] = os.pipe()
        return self._pipes[name]


class LocalProcess:
    """One process of a role."""

    def __init__(self, process: "subprocess.Popen[bytes]", log: Path, begin: int) -> None:
        self._process = process
        self._log = log
        self._read_to = begin

    def poll(self) -> int | None:
        return self._process.poll()

    def read(self) -> bytes:
        with self._log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        self._read_to += len(new)
        return new

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        """Kill the guard and the command's process group."""
        with contextlib.suppress(ValueError, OSError):
            pid = int(self._log.with_suffix(".pid").read_text())
            os.killpg(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
