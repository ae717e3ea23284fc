"""Turns of training requests: fair shares of computed tokens, and the worker thread that carries out training requests.

Requests of one run are carried out in the order of their numbers, whatever order they arrive in. A round of the worker first
reads the passes whose turn is near, carries out the other requests (optimizer steps, saving, loading), at most once per run, and
then computes one batch of rows, taken row by row from the tenant that has had the fewest tokens: rows of several tenants share
the batch, and a tenant with a million tokens waiting delays the others by one batch at most.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ludic.types import LudicError
from ludic_tinker.server.futures import Failure, Result
from ludic_tinker.server.runs import PassJob, PassOutput, Row, TrainingRun

logger = logging.getLogger(__name__)

_STEP_COST = 64
"""Tokens that a request other than a pass counts as."""


class FairShares:
    """Tokens computed for each tenant. The next turn is that of the tenant with the fewest; one that was idle has no credit
    from that time."""

    def __init__(self) -> None:
        self._given: dict[str, float] = {}
        self._now = 0.0
        """Tokens that the tenant of the last turn had been given before it."""

    def choose(self, tenants: Iterable[str]) -> str:
        """The tenant whose turn it is."""
        return min(tenants, key=self._start)

    def charge(self, tenant: str, num_tokens: float) -> None:
        """The tenant had its turn."""
        self._now = max(self._now, start := self._start(tenant))
        self._given[tenant] = start + num_tokens

    def _start(self, tenant: str) -> float:
        return max(self._given.get(tenant, 0.0), self._now)


@dataclass(slots=True, eq=False, kw_only=True)
class Task:
    """One training request of a run, other than a pass."""

    run: str
    tenant: str
    number: int
    work: Callable[[], Result] = lambda: {}
    """Called in the worker thread. A LudicError says what was wrong with the request."""
    done: Callable[[Result], None]
    """Takes the result, in the worker thread."""


@dataclass(slots=True, eq=False, kw_only=True)
class UnreadPass(Task):
    """A pass as its bytes. As rows they may take a hundred times their size, so at most a batch of each run is read."""

    read: Callable[[], Task]
    """The pass, or a task whose result says why it cannot be read."""


@dataclass(slots=True, eq=False, kw_only=True)
class PassTask(Task):
    """A forward or forward-backward pass over rows, which may be spread over several batches."""

    training: Callable[[], TrainingRun]
    """The run, which earlier requests may have to make."""
    rows: Sequence[Row]
    loss: str
    config: dict[str, float]
    forward_only: bool
    finish: Callable[[list[PassOutput]], Result]
    """The result from the outputs of the parts, in order."""
    broken: Callable[[], None] = lambda: None
    """Called if it fails after some rows were added to the gradient."""
    num_taken: int = 0
    outputs: list[PassOutput] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(len(row.tokens) for row in self.rows)


_Compute: TypeAlias = Callable[[Sequence[PassJob]], list[PassOutput | Exception]]
"""`TrainingBase.compute`."""


@dataclass(slots=True, eq=False)
class _Line:
    """The requests of one run."""

    tenant: str
    next_number: int
    make: Callable[[], None] | None
    """Makes the run, before the first request."""
    waiting: dict[int, Task] = field(default_factory=dict)

    @property
    def head(self) -> Task | None:
        """The request whose turn it is; none before the run is made."""
        return None if self.make is not None else self.waiting.get(self.next_number)


class Scheduler:
    """The worker thread and what waits for it."""

    def __init__(self, compute: _Compute, *, token_budget: int) -> None:
        """`token_budget`: tokens of one batch; a longer row is a batch of one."""
        self._compute, self._budget = compute, token_budget
        self._changed = threading.Condition()
        self._lines: dict[str, _Line] = {}
        self._shares = FairShares()
        self._is_closed = False
        self._worker = threading.Thread(target=self._work, name="ludic-tinker-training", daemon=True)
        self._worker.start()

    def open(self, run: str, tenant: str, *, next_number: int, make: Callable[[], None] | None = None) -> None:
        """Take requests of a run from this number on. The worker calls `make` before the first."""
        with self._changed:
            self._lines[run] = _Line(tenant, next_number, make)
            self._changed.notify_all()

    def close_run(self, run: str) -> None:
        """Drop what waits; each request fails."""
        with self._changed:
            line = self._lines.pop(run, None)
        for task in line.waiting.values() if line is not None else ():
            task.done(Failure("The training run has ended."))

    def submit(self, task: Task) -> None:
        """Carry out a request when its turn comes. Its run must be open and its number new."""
        with self._changed:
            line = self._lines[task.run]
            assert task.number >= line.next_number and task.number not in line.waiting, f"{task.number} came twice"
            line.waiting[task.number] = task
            self._changed.notify_all()

    def missing(self, run: str) -> int | None:
        """The number of the request that a run waits for, if later ones have arrived."""
        with self._changed:
            line = self._lines.get(run)
            return None if line is None or line.next_number in line.waiting or not line.waiting else line.next_number

    def is_over(self, run: str, number: int) -> bool:
        """True if this request was carried out, or is older than the first of the run."""
        with self._changed:
            line = self._lines.get(run)
            return line is not None and number < line.next_number

    def is_next(self, run: str, number: int) -> bool:
        """True if the run can do nothing before this request."""
        with self._changed:
            line = self._lines.get(run)
            return line is not None and line.next_number == number

    def close(self) -> None:
        """End the worker after what it computes now."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._worker.join()

    # --- the worker ---

    def _work(self) -> None:
        while self._wait():
            self._make_runs()
            self._read_passes()
            for task in self._steps():
                self._carry_out(task)
            if batch := self._take_batch():
                self._compute_batch(batch)

    def _wait(self) -> bool:
        """Sleep until a request can be carried out; False at the end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or any(line.make is not None or line.head is not None for line in self._lines.values())
                )
            )
            return not self._is_closed

    def _make_runs(self) -> None:
        with self._changed:
            new = [line for line in self._lines.values() if line.make is not None]
        for line in new:
            assert line.make is not None, "only the worker resets it"
            try:
                line.make()
            except Exception:  # the requests of the run find out
                logger.exception("a run could not be made")
            line.make = None

    def _read_passes(self) -> None:
        """Read the next passes of each run, as many as fill a batch."""
        with self._changed:
            lines = list(self._lines.values())
        for line in lines:
            number, room = line.next_number, self._budget
            while room > 0 and isinstance(task := line.waiting.get(number), (UnreadPass, PassTask)):
                if isinstance(task, UnreadPass):
                    task = task.read()
                    with self._changed:
                        line.waiting[number] = task
                room -= task.num_tokens if isinstance(task, PassTask) else 0
                number += 1

    def _steps(self) -> list[Task]:
        """The next request of each run, where it is not a pass, in the order of turns."""
        with self._changed:
            ready: dict[str, list[Task]] = {}
            for line in self._lines.values():
                if line.head is not None and not isinstance(line.head, (UnreadPass, PassTask)):
                    ready.setdefault(line.tenant, []).append(line.head)
            taken = []
            while ready:
                tenant = self._shares.choose(ready)
                self._shares.charge(tenant, _STEP_COST)
                taken.append(ready[tenant].pop(0))
                if not ready[tenant]:
                    del ready[tenant]
            return taken

    def _take_batch(self) -> dict[PassTask, list[Row]]:
        """Rows up to the budget, by task; tasks of one run are in order."""
        batch: dict[PassTask, list[Row]] = {}
        room = self._budget
        with self._changed:
            open_passes = self._open_passes()
            while open_passes:
                tenant = self._shares.choose(open_passes)
                lines = open_passes[tenant]
                task = lines[0][0]
                row = task.rows[task.num_taken]
                if batch and len(row.tokens) > room:
                    break
                room -= len(row.tokens)
                self._shares.charge(tenant, len(row.tokens))
                batch.setdefault(task, []).append(row)
                task.num_taken += 1
                lines.append(lines.pop(0))  # the runs of a tenant take turns
                if task.num_taken == len(task.rows):
                    lines[-1].pop(0)
                    if not lines[-1]:
                        lines.pop()
                if not lines:
                    del open_passes[tenant]
        return batch

    def _open_passes(self) -> dict[str, list[list[PassTask]]]:
        """The passes that can be computed now, by tenant and then by run."""
        found: dict[str, list[list[PassTask]]] = {}
        for line in self._lines.values():
            if line.head is None:
                continue
            passes, number = [], line.next_number
            while isinstance(task := line.waiting.get(number), PassTask):
                passes.append(task)
                number += 1
            if passes:
                found.setdefault(line.tenant, []).append(passes)
        return found

    def _compute_batch(self, batch: dict[PassTask, list[Row]]) -> None:
        jobs: list[PassJob] = []
        for task, rows in list(batch.items()):
            try:
                run = task.training()
            except LudicError as error:  # this run could not be made; the others can be computed
                del batch[task]
                self._finish(task, as_failure(error))
            else:
                jobs.append(PassJob(run, rows, task.loss, task.config, task.forward_only))
        outputs: list[PassOutput | Exception]
        try:
            outputs = self._compute(jobs)
        except Exception as error:
            logger.exception("a batch failed")
            outputs = [error] * len(batch)
        for task, output in zip(batch, outputs, strict=True):
            if isinstance(output, Exception):
                if task.outputs and not task.forward_only:
                    task.broken()
                self._finish(task, as_failure(output))
                continue
            task.outputs.append(output)
            if task.num_taken == len(task.rows):
                self._finish(task, _attempt(functools.partial(task.finish, task.outputs)))

    def _carry_out(self, task: Task) -> None:
        self._finish(task, _attempt(task.work))

    def _finish(self, task: Task, result: Result) -> None:
        with self._changed:
            line = self._lines.get(task.run)
            if line is not None and line.waiting.pop(task.number, None) is not None:
                line.next_number = task.number + 1
        task.done(result)


def _attempt(work: Callable[[], Result]) -> Result:
    try:
        return work()
    except Exception as error:  # noqa: BLE001 - the worker must live; the request hears of it
        return as_failure(error)


def as_failure(error: Exception) -> Failure:
    """The client's view of an error: the text of our own, and no details of others, which are logged."""
    if isinstance(error, LudicError):
        return Failure(str(error))
    logger.error("a request failed", exc_info=error)
    return Failure("Internal error; the server's log says more.", is_users=False)
