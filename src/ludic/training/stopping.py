"""Ctrl-C and SIGTERM as a wish: finish this step, save, and go."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Iterator
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class StopRequested(Exception):
    """Somebody asked for the end while we were waiting."""


class StopSignal:
    """Set by the first SIGINT or SIGTERM; the second one interrupts at once."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.reason: str | None = None

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def set(self, reason: str) -> None:
        self.reason = reason
        self._event.set()

    async def unless(self, work: Awaitable[T]) -> T:
        """The result of `work`, or StopRequested (and `work` cancelled) if the wish comes first."""
        task = asyncio.ensure_future(work)
        wish = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, wish}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise StopRequested(self.reason or "")
            return task.result()
        finally:
            for each in (task, wish):
                if not each.done():
                    each.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await each

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals come here meanwhile. Where handlers cannot be installed (another thread, Windows), nothing changes."""
        loop = asyncio.get_running_loop()
        installed = []
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                loop.add_signal_handler(number, self._on_signal, number)
            except (NotImplementedError, RuntimeError, ValueError):
                break
            installed.append(number)
        try:
            yield
        finally:
            for number in installed:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        logger.warning("%s: stopping after this step; once more to interrupt it.", signal.Signals(number).name)
        self.set(signal.Signals(number).name)
