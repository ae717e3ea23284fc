"""Long-running child processes that end with this one, and how often a supervisor may restart them.

Each runs under die_with_parent.py, which stops it and its children when this process is gone, even by SIGKILL. It writes to a log
file and not to a pipe: an unread pipe fills up and blocks it, and it could not write its last lines after its reader was killed.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ludic.util import die_with_parent

_GUARD = Path(die_with_parent.__file__)
_END_S = 5.0
"""From SIGKILL to the end of a process."""


class ChildProcess:
    """One process that `ChildProcesses` has started."""

    def __init__(self, guard: "subprocess.Popen[bytes]", log: Path, begin: int) -> None:
        """`begin`: size of the log file before the start."""
        self.log = log
        self._guard, self._begin, self._read_to = guard, begin, begin

    @property
    def pid(self) -> int:
        """The process's id, which is also that of its session."""
        file = self.log.with_suffix(".pid")
        while not (text := _text_of(file)) and self.poll() is None:
            time.sleep(0.01)  # the guard writes it within milliseconds
        return int(text or self._guard.pid)

    def poll(self) -> int | None:
        """The exit code (128 + n for signal n), or None while it runs."""
        code = self._guard.poll()
        return code if code is None or code >= 0 else 128 - code

    def wait(self, timeout_s: float | None = None) -> int:
        code = self._guard.wait(timeout_s)
        return code if code >= 0 else 128 - code

    def read(self) -> bytes:
        """Output since the last call."""
        with self.log.open("rb") as file:
            file.seek(self._read_to)
            new = file.read()
        self._read_to += len(new)
        return new

    def output(self) -> str:
        """All of its output."""
        with self.log.open("rb") as file:
            file.seek(self._begin)
            return file.read().decode("utf-8", "replace")

    def terminate(self) -> None:
        """Send SIGTERM without waiting."""
        self._guard.terminate()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM; after `timeout_s`, SIGKILL."""
        self.terminate()
        try:
            self.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the process and its children."""
        code, text = self._guard.poll(), _text_of(self.log.with_suffix(".pid"))
        if text and (
            code is None or code < 0
        ):  # else the guard has done it, and the id may belong to another process now
            kill_group(int(text))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._guard.wait(_END_S)  # the guard ends after the process
        self._guard.kill()
        self._guard.wait()


class ChildProcesses:
    """Starts processes as children of this one; their files (NAME.log, NAME.pid) are in `logs`."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._pipes: dict[str, tuple[int, int]] = {}

    def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        grace_s: float,
        needs: Sequence[str] = (),
    ) -> ChildProcess:
        """Start a command; it outlives this process by at most `grace_s`, and `needs` outlive it."""
        self._logs.mkdir(parents=True, exist_ok=True)
        ours, _ = self._pipe(name)
        held = [self._pipe(other)[1] for other in needs]  # the guard holds their pipes and so keeps them alive
        log, pid = (self._logs / f"{name}.{ending}" for ending in ("log", "pid"))
        pid.unlink(missing_ok=True)  # the old pid may belong to another process now
        guard = [sys.executable, "-I", "-S", str(_GUARD), "--pipe", str(ours), "--grace", str(grace_s)]
        with log.open("ab") as file:
            begin = file.tell()
            process = subprocess.Popen(
                [*guard, "--pid-file", str(pid), "--", *command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # this process gets Ctrl-C and stops its children in order
                pass_fds=(ours, *held),
            )
        return ChildProcess(process, log, begin)

    def close(self) -> None:
        """End those that still run; `start` may be called again."""
        for ends in self._pipes.values():
            for end in ends:
                os.close(end)
        self._pipes = {}

    def _pipe(self, name: str) -> tuple[int, int]:
        if name not in self._pipes:
            self._pipes[name] = os.pipe()
        return self._pipes[name]


def kill_group(leader: int) -> None:
    """Send SIGKILL to the processes of a group, if there are any."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says "not permitted" of a group of zombies
        os.killpg(leader, signal.SIGKILL)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    names = {128 + number: number.name for number in signal.Signals}
    return f"was ended by {names[code]}" if code in names else f"ended with exit code {code}"


def _text_of(file: Path) -> str:
    with contextlib.suppress(OSError):
        return file.read_text().strip()
    return ""


# --- restarts ---


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    """How often a process may be restarted."""

    max_restarts: int = 5
    """Deaths within `within_s`; one more is too many."""
    within_s: float = 600.0
    delay_s: float = 1.0
    """Pause before the first restart; doubled with each further one in the window."""


class Restarts:
    """Counts the deaths of one process against a limit."""

    def __init__(self, limit: RestartLimit) -> None:
        self.limit = limit
        self._deaths: deque[float] = deque()

    @property
    def num_deaths(self) -> int:
        """Those within the window, at the last death."""
        return len(self._deaths)

    def died(self) -> float | None:
        """Count a death now; returns the pause before the restart, or None if the process has died too often."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self.limit.within_s:
            self._deaths.popleft()
        is_over = self.num_deaths > self.limit.max_restarts
        return None if is_over else self.limit.delay_s * 2 ** (self.num_deaths - 1)

    def again(self, delay_s: float) -> str:
        """The next restart, for a message."""
        return f"restart {self.num_deaths} of at most {self.limit.max_restarts} in {delay_s:g} s"

    def too_many(self) -> str:
        """How often it has died, for a message."""
        return (
            f"has died {self.num_deaths} times within {self.limit.within_s:g} s, more than max_restarts = "
            f"{self.limit.max_restarts} allows"
        )
