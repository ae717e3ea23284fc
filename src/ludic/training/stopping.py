"""Ctrl-C and SIGTERM as a wish: finish this step, save, and go.

GNU `timeout`, torchrun, Slurm and `uv run` deliver one wish twice, to a process and to its group, within milliseconds;
`StopWishes` tells that from a person who presses Ctrl-C again. Trainers, actors, `ludic launch` and `ludic serve` use it.
"""

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")

SAME_WISH_S = 5.0
"""Signals that come within this time of the first, of whatever kind, are the same wish."""


class StopRequested(Exception):
    """The wish to stop came while we were waiting."""


class StopWishes:
    """Counts wishes to stop: signals in quick succession are one."""

    def __init__(self) -> None:
        self.num = 0
        self._last_at = 0.0

    def hear(self) -> bool:
        """A signal has come. Whether it is a new wish, and not the last one delivered again."""
        now = time.monotonic()
        if self.num and now - self._last_at <= SAME_WISH_S:
            return False
        self.num, self._last_at = self.num + 1, now
        return True


class StopSignal:
    """Set by the first SIGINT or SIGTERM, or by `set`; a signal more than SAME_WISH_S later interrupts at once."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self.is_set = False
        self._signals = StopWishes()
        self._wishes: set[asyncio.Future[None]] = set()
        """Of those who wait, each in its own event loop."""

    def set(self, reason: str) -> None:
        """Ask for the end; from any thread."""
        self.reason, self.is_set = reason, True
        for wish in list(self._wishes):
            with contextlib.suppress(RuntimeError):  # its loop is gone, and with it whoever waited
                wish.get_loop().call_soon_threadsafe(_fulfil, wish)

    async def unless(self, work: Awaitable[T]) -> T:
        """The result of `work`, or StopRequested (and `work` cancelled) if the wish comes first."""
        task = asyncio.ensure_future(work)
        wish: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._wishes.add(wish)
        if self.is_set:
            _fulfil(wish)
        try:
            both: set[asyncio.Future[Any]] = {task, wish}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopRequested(self.reason or "")
            return task.result()
        finally:
            self._wishes.discard(wish)
            wish.cancel()
            if not task.done():
                await _cancelled(task)

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals come here meanwhile; whoever got them before gets them again afterwards.

        Where handlers cannot be installed (another thread), nothing changes.
        """
        loop = asyncio.get_running_loop()
        before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(ValueError):
                before[number] = signal.signal(number, lambda number, _: self._on_signal(number, loop))
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    def _on_signal(self, number: int, loop: asyncio.AbstractEventLoop) -> None:
        if not self._signals.hear():
            return
        if self._signals.num > 1:
            raise KeyboardInterrupt
        name = signal.Signals(number).name
        self.set(name)
        # Not from here: a signal may come in the middle of writing another line.
        message = "%s: stopping after this step, then saving; once more, %g s from now or later, to interrupt it."
        loop.call_soon_threadsafe(logger.warning, message, name, SAME_WISH_S)


def _fulfil(wish: asyncio.Future[None]) -> None:
    if not wish.done():
        wish.set_result(None)


async def _cancelled(task: asyncio.Future[T]) -> None:
    """Wait until it has ended; that it failed while being cancelled must not hide why it was."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("what was stopped failed while it ended: %s: %s", type(error).__name__, error)
