"""Ctrl-C and SIGTERM as a request: finish this step, save, and end.

GNU `timeout`, torchrun, Slurm and `uv run` deliver one request twice, to a process and to its group, within milliseconds;
`StopRequests` tells that from a person who presses Ctrl-C again. Trainers, actors, `ludic launch` and `ludic serve` use it.
"""

import asyncio
import contextlib
import contextvars
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 0.2
SAME_REQUEST_S = 5.0
"""Signals within this time of the first, SIGINT or SIGTERM, are the same request."""
DRAIN_S = 25.0
"""Seconds for requests in progress, unless the command is told otherwise. Kubernetes kills after 30 s, `preStop` included."""


class StopRequested(Exception):
    """A request to stop came during a wait."""


class StopRequests:
    """Counts requests to stop: signals in quick succession are one."""

    def __init__(self) -> None:
        self.num = 0
        self._last_at = 0.0

    def hear(self) -> bool:
        """Note a signal; returns whether it is a new request, and not the last one delivered again."""
        now = time.monotonic()
        if self.num and now - self._last_at <= SAME_REQUEST_S:
            return False
        self.num, self._last_at = self.num + 1, now
        return True


class StopSignal:
    """Set by the first SIGINT or SIGTERM, or by `set`; a signal more than SAME_REQUEST_S later interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_set = False
        self._signals = StopRequests()
        self._waits: set[asyncio.Future[None]] = set()
        """One for each wait that a request ends, in the event loop of that wait."""

    def set(self, reason: str) -> None:
        """Request the end; from any thread."""
        self.reason, self.is_set = reason, True
        for stopped in list(self._waits):
            with contextlib.suppress(RuntimeError):  # its loop has been closed, and the wait with it
                stopped.get_loop().call_soon_threadsafe(_end_wait, stopped)

    async def unless(self, work: Awaitable[T]) -> T:
        """The result of `work`, or StopRequested (and `work` cancelled) if the request comes first."""
        task = asyncio.ensure_future(work)
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.add(stopped)
        if self.is_set:
            _end_wait(stopped)
        try:
            both: set[asyncio.Future[Any]] = {task, stopped}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopRequested(self.reason or "")
            return task.result()
        finally:
            self._waits.discard(stopped)
            stopped.cancel()
            if not task.done():
                await _cancel(task)

    @contextlib.contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Handle signals in the block, and restore the earlier handlers afterwards. In another thread than the main one, which
        cannot install handlers, nothing changes."""
        loop = asyncio.get_running_loop()
        with _handle_signals(lambda number: self.on_signal(number, loop)):
            yield

    def on_signal(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        """KeyboardInterrupt if this is the second request."""
        if not self._signals.hear():
            return
        if self._signals.num > 1:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self.set(name)
        # Not from here: a signal may come in the middle of writing another line.
        message = "%s: stopping after this step, then saving; send it again after %g s to interrupt at once."
        loop.call_soon_threadsafe(logger.warning, message, name, SAME_REQUEST_S)


def run_sync(work: Coroutine[Any, Any, T], stop: Callable[[], StopSignal] | None = None) -> T:
    """The result of `work`, for callers without asyncio: `asyncio.run`.

    If an event loop is running already, as in a notebook, the work runs in a new thread with a new loop. Signals, which only
    reach the main thread, are passed on to `stop`.
    """
    try:
        loop_here = asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    tasks: list[asyncio.Task[T]] = []

    async def run_noted() -> T:
        tasks.append(asyncio.ensure_future(work))
        return await tasks[0]

    def on_signal(number: int) -> None:
        assert stop is not None, "else nothing is handled"
        stop().on_signal(number, loop_here)

    with (
        ThreadPoolExecutor(1, "ludic-run-sync") as pool,
        _handle_signals(on_signal) if stop else contextlib.nullcontext(),
    ):
        done = pool.submit(contextvars.copy_context().run, asyncio.run, run_noted())
        try:
            while not done.done():  # a signal that reaches another thread does not end a wait without a timeout
                wait([done], timeout=_LOOK_EVERY_S)
            return done.result()
        except KeyboardInterrupt:
            for task in tasks:
                with contextlib.suppress(RuntimeError):  # it has just ended
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise


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


@contextlib.contextmanager
def _handle_signals(on_signal: Callable[[int], None]) -> Iterator[None]:
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        with contextlib.suppress(ValueError):  # not the main thread
            before[number] = signal.signal(number, lambda number, _: on_signal(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _end_wait(stopped: asyncio.Future[None]) -> None:
    if not stopped.done():
        stopped.set_result(None)


async def _cancel(task: asyncio.Future[T]) -> None:
    """Wait until it has ended; an error while it is cancelled is logged, and must not hide the reason for cancelling."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("the cancelled work failed while it ended: %s: %s", type(error).__name__, error)
