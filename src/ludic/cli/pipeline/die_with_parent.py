"""Runs one command that does not outlive its parent: `python die_with_parent.py --pipe FD … -- COMMAND`.

The parent holds the other end of the pipe and never writes. When the parent ends in any way, the system closes
that end, and this program stops the command and its children. It uses only the standard library, because it is started by
path in 20 ms. It only holds the other pipe ends that it was given: processes that wait at those outlive this command.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


def main() -> int:
    options, command = _read(sys.argv[1:])
    guard = ProcessGuard(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, guard.on_signal)
    guard.start()
    if options.pid_file is not None:
        options.pid_file.write_text(f"{guard.pid}\n")
    threading.Thread(target=guard.watch, args=(options.pipe, options.grace), daemon=True).start()
    return guard.wait()


def _read(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="die_with_parent")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor whose end signals that the parent is gone")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL after that")
    parser.add_argument("--pid-file", type=Path)
    split = arguments.index("--")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


class ProcessGuard:
    """The command as the leader of a new session, so that its children can be found after it ends."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        return self._started().pid

    def start(self) -> None:
        # preexec_fn is safe here: no other thread has been started yet.
        self._child = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_parent
        )

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Forward the signal to the command."""
        if self._child is None:
            sys.exit(128 + number)
        self._child.send_signal(number)

    def watch(self, pipe: int, grace: float) -> None:
        while os.read(pipe, 1):  # returns b"" when all other ends are closed
            pass
        child = self._started()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        self._sweep()

    def wait(self) -> int:
        """Wait for the command, kill its remaining children, and return its exit code (128 + n for signal n)."""
        code = self._started().wait()
        self._sweep()
        return code if code >= 0 else 128 - code

    def _sweep(self) -> None:
        with contextlib.suppress(
            ProcessLookupError, PermissionError
        ):  # macOS says "not permitted" of a group of zombies
            os.killpg(self._started().pid, signal.SIGKILL)

    def _started(self) -> "subprocess.Popen[bytes]":
        assert self._child is not None, "start comes first"
        return self._child


def _die_with_parent() -> None:
    """On Linux, kill the command also when this process is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
