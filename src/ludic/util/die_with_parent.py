"""`python die_with_parent.py --pipe FD … -- COMMAND` runs a command that does not outlive its parent, however that ended.

The parent holds one end of a pipe and never writes; this program reads at the other. When the parent is gone, the system closes
its end, and this program stops the command and its children. It only holds the other pipe ends that it was given: processes that
wait at those outlive this command. It uses only the standard library, and so starts in 20 ms.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_PR_SET_PDEATHSIG = 1


def kill_with_parent() -> None:
    """On Linux, the kernel kills this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _call_when_closed(pipe: int, action: Callable[[], None]) -> None:
    def wait() -> None:
        while os.read(pipe, 1):  # returns b"" when all other ends are closed
            pass
        action()

    threading.Thread(target=wait, name="parent watch", daemon=True).start()


def main() -> int:
    """Run the command as the leader of a new session, so that its children can be found after it ends.

    Returns its exit code (128 + n for signal n).
    """
    parser = argparse.ArgumentParser(prog="die_with_parent")
    parser.add_argument("--pipe", type=int, required=True, help="descriptor whose end signals that the parent is gone")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds from SIGTERM to SIGKILL after that")
    parser.add_argument("--pid-file", type=Path)
    split = sys.argv.index("--")
    options = parser.parse_args(sys.argv[1:split])
    child: subprocess.Popen[bytes] | None = None

    def forward(number: int, _: FrameType | None) -> None:
        if child is None:
            sys.exit(128 + number)
        child.send_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, forward)
    # preexec_fn is safe here: no other thread has been started yet.
    child = started = subprocess.Popen(
        sys.argv[split + 1 :], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=kill_with_parent
    )
    if options.pid_file is not None:
        options.pid_file.write_text(f"{child.pid}\n")
    _call_when_closed(options.pipe, lambda: _stop(started, options.grace))
    code = child.wait()
    _kill_session(child)
    return code if code >= 0 else 128 - code


def _stop(child: "subprocess.Popen[bytes]", grace: float) -> None:
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(grace)
    _kill_session(child)


def _kill_session(child: "subprocess.Popen[bytes]") -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says "not permitted" of a group of zombies
        os.killpg(child.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
