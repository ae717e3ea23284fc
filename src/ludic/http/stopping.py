"""Ctrl-C and SIGTERM for commands that serve: the first lets requests in progress end, the second ends at once."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine
from typing import Any

from ludic.util.stop import StopRequests

DRAIN_S = 25.0
"""For requests in progress, unless the command is told otherwise. Kubernetes kills after 30 s,
`preStop` included."""


async def serve_until_stopped(
    serving: Coroutine[Any, Any, None], *, hears_signals: Callable[[], bool] = lambda: False
) -> None:
    """Run a server. A request to stop cancels it, and a second one (5 s later: see StopRequests) cancels it again, while it drains.

    `hears_signals`: whether something in it, a trainer, handles the signal itself just now.
    """
    task, requests = asyncio.create_task(serving), StopRequests()

    def on_signal() -> None:
        if requests.hear() and not hears_signals():
            task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(NotImplementedError):  # Windows: Ctrl-C raises KeyboardInterrupt instead
            loop.add_signal_handler(number, on_signal)
    try:
        await task
    except asyncio.CancelledError:
        if not requests.num:
            raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(NotImplementedError):
                loop.remove_signal_handler(number)
