"""Ends a server when the program that started it is gone, however that program ended.

The program holds one end of a pipe and never writes; the server reads at the other. When the program is killed, the system
closes its end. In vLLM this runs as a middleware, which puts Ludic's code into the process that SIGTERM stops cleanly
(`--middleware ludic.inference.vllm.worker.parent_watch.EndWithParent`).
"""

import os
import signal
import threading
from typing import Any

PIPE_VARIABLE = "LUDIC_PARENT_PIPE"
"""Environment variable: the file descriptor of the pipe."""


class EndWithParent:
    """Starts the watch and returns the application unchanged, without a middleware."""

    def __new__(cls, app: Any) -> Any:
        watch_parent()
        return app


def watch_parent() -> None:
    """Send SIGTERM to this process when its parent is gone; does nothing without the variable."""
    pipe = os.environ.get(PIPE_VARIABLE)
    if pipe is not None:
        threading.Thread(target=_wait, args=(int(pipe),), name="parent watch", daemon=True).start()


def _wait(pipe: int) -> None:
    os.read(pipe, 1)  # returns only when the other end is closed
    os.kill(os.getpid(), signal.SIGTERM)
