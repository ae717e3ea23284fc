"""An evaluation beside training: at most one at a time, and its errors are not lost."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class BackgroundEval:
    """Holds the one evaluation that runs beside the steps of a trainer."""

    def __init__(self) -> None:
        self._task: asyncio.Task[Any] | None = None
        self._step = 0

    def start(self, step: int, evaluation: Coroutine[Any, Any, Any]) -> None:
        assert self._task is None, "the evaluation before has to be finished first"
        self._step, self._task = step, asyncio.create_task(evaluation)

    def is_evaluating(self, step: int) -> bool:
        return self._task is not None and self._step == step

    def check(self) -> None:
        """Raise what the evaluation raised, if it has ended so."""
        if self._task is not None and self._task.done():
            task, self._task = self._task, None
            task.result()

    async def finish(self) -> None:
        """Wait for it; what it raised is raised here."""
        if self._task is not None:
            task, self._task = self._task, None
            try:
                await task
            finally:
                await _ended(task)  # also when it is us who were cancelled

    async def abandon(self) -> None:
        """Training has failed: nobody waits for the evaluation any more."""
        if self._task is not None:
            task, self._task = self._task, None
            await _ended(task)


async def _ended(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()  # looked at: asyncio need not complain that nobody did
