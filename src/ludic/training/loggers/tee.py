"""Several loggers as one; a run does not die of a logger."""

import logging
from collections.abc import Callable, Mapping
from functools import partial

from ludic.training.loggers.interface import Closable, Resumable, ShowsActivity
from ludic.types import TrainingLogger

logger = logging.getLogger(__name__)


class TeeLogger:
    """Passes everything on to each child. One that fails is reported once, and asked again the next time."""

    def __init__(self, *loggers: TrainingLogger) -> None:
        self._children = loggers
        self._reported: set[int] = set()

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        for index, child in enumerate(self._children):
            # Each child gets a copy: one that changes it must not change what the others see.
            self._survive(index, "log", partial(child.log, step, dict(stats)))

    def show_activity(self, text: str) -> None:
        for index, child in enumerate(self._children):
            if isinstance(child, ShowsActivity):
                self._survive(index, "show_activity", partial(child.show_activity, text))

    def resume(self, step: int) -> None:
        """Not guarded: a record that cannot be resumed would hold every step twice."""
        for child in self._children:
            if isinstance(child, Resumable):
                child.resume(step)

    def close(self) -> None:
        for index, child in enumerate(self._children):
            if isinstance(child, Closable):
                self._survive(index, "close", child.close)

    def _survive(self, index: int, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            if index not in self._reported:
                self._reported.add(index)
                name = type(self._children[index]).__name__
                logger.exception(
                    "%s failed in %s; training goes on, and further failures are not reported.", name, what
                )
