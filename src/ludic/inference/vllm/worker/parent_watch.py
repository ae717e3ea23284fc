"""A server that a program started must not outlive it, however that program ended.

The program holds one end of a pipe and never writes; the server waits at the other. A program that is killed has no time to
say so, but the system closes its end. Inside vLLM this runs as a middleware, which is a place of ours in the process
that SIGTERM stops cleanly (`--middleware ludic.inference.vllm.worker.parent_watch.EndWithParent`).
"""

import os
import signal
import threading
from typing import Any

PIPE_VARIABLE = "LUDIC_PARENT_PIPE"
"""Environment variable: the number of the file descriptor to wait at."""


class EndWithParent:
    """Not a middleware at all: it starts the watch and leaves the application as it is."""

    def __new__(cls, app: Any) -> Any:
        watch_parent()
        return app


def watch_parent() -> None:
    """Stop this process by SIGTERM when the program that started it is gone; nothing where none asked for it."""
    pipe = os.environ.get(PIPE_VARIABLE)
    if pipe is not None:
        threading.Thread(target=_wait, args=(int(pipe),), name="parent watch", daemon=True).start()


def _wait(pipe: int) -> None:
    os.read(pipe, 1)  # returns only when the other end is closed
    os.kill(os.getpid(), signal.SIGTERM)
