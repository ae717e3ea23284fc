"""Runs one command and never lets it outlive whoever asked for it: `python tether.py --pipe FD … -- COMMAND`.

The one who asked holds the other end of the pipe and never writes. When it is gone, however it ended, the system closes
that end, and the command is stopped with all its children. A file by itself, standard library only: it is started by
path, and takes 20 ms. Other ends of pipes that it was given it only holds: what waits at those outlives this command.
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
    words, command = _read(sys.argv[1:])
    tether = ProcessGuard(command)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, tether.on_signal)
    tether.start()
    if words.pid_file is not None:
        words.pid_file.write_text(f"{tether.pid}\n")
    threading.Thread(target=tether.watch, args=(words.pipe, words.grace), daemon=True).start()
    return tether.wait()


def _read(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="tether")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor at which the end is waited for")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL when it has come")
    parser.add_argument("--pid-file", type=Path)
    split = arguments.index("--")
    return parser.parse_args(arguments[:split]), arguments[split + 1 :]


class ProcessGuard:
    """The command as a child that leads a session of its own, so that its children can be found when it is gone."""

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
        """What we are told, the command is told."""
        if self._child is None:
            sys.exit(128 + number)
        self._child.send_signal(number)

    def watch(self, pipe: int, grace: float) -> None:
        while os.read(pipe, 1):  # returns nothing when every other end is closed
            pass
        child = self._started()
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        self._sweep()

    def wait(self) -> int:
        """The command's exit code, 128 + n for signal n, when nothing of it is left."""
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
    """Where Linux can: should this very process be killed, the command goes too."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
