"""Interfaces that a logger may offer besides `log`, and several loggers as one (`TeeLogger`)."""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol, runtime_checkable

from ludic.types import LudicError, TrainingLogger

logger = logging.getLogger(__name__)


@runtime_checkable
class Closable(Protocol):
    """Has something to finish when the run ends."""

    def close(self) -> None: ...


@runtime_checkable
class Resumable(Protocol):
    """Keeps a record, and can remove the steps that a resumed run logs again."""

    def resume(self, step: int) -> None:
        """Remove what came after `step`; called once, before the first `log`."""
        ...


@runtime_checkable
class KeepsRecord(Protocol):
    """Can say what was logged, also by an earlier process."""

    def newest_step_of(self, name: str) -> int | None:
        """The newest step with this number, alone or under a policy's name; -1 if none has it, None if there is no record."""
        ...


@runtime_checkable
class ShowsActivity(Protocol):
    """Can show what happens between two calls of `log`, such as a batch that is being generated."""

    def show_activity(self, text: str) -> None:
        """Called every second or so; the text is empty when there is nothing to show."""
        ...


class TeeLogger:
    """Passes everything on to each child. A child that fails is reported once, and called again the next time."""

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

    def newest_step_of(self, name: str) -> int | None:
        found = [child.newest_step_of(name) for child in self._children if isinstance(child, KeepsRecord)]
        return max((step for step in found if step is not None), default=None)

    def close(self) -> None:
        for index, child in enumerate(self._children):
            if isinstance(child, Closable):
                self._survive(index, "close", child.close)

    def _survive(self, index: int, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            if index not in self._reported:
                self._reported.add(index)
                name, is_ours = type(self._children[index]).__name__, isinstance(error, LudicError)
                why = f": {error}" if is_ours else "."
                goes_on = "Training continues, later failures are not reported."
                logger.error("%s failed in %s%s %s", name, what, why, goes_on, exc_info=not is_ours)
