"""Supervises long-running roles: starts them, shows their output, restarts dead ones, stops them in order.

A role is a process of the pipeline: Redis, a server, the learner, an actor. launch.py says what they run, processes.py starts them.
One thread polls all of them ten times a second. A role that dies too often ends the whole pipeline.
"""

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import IO, Protocol

from ludic.cli.terminal.colour import is_coloured
from ludic.util.processes import RestartLimit, Restarts, how_it_ended
from ludic.util.stop import StopRequests
from ludic_vllm.watch import HANGS, BackgroundCheck

_LOOK_EVERY_S = 0.1
_LAST_LINES = 3
MACHINE_LOST = 69
"""Exit code of a role that was lost with its machine, or with the process there that watched it (EX_UNAVAILABLE)."""


class WhenDone(StrEnum):
    """Reaction to exit code 0 of a role."""

    ENDS_ALL = "ends_all"
    """All other roles stop: they only served this one."""
    IS_FINE = "is_fine"
    """The role has finished; the others continue."""
    IS_DEATH = "is_death"
    """Other roles need it, so it is restarted."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """A process of the run to keep running."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Extra environment variables."""
    needs: tuple[str, ...] = ()
    """Roles that are stopped only after this one."""
    when_done: WhenDone = WhenDone.IS_DEATH
    hopeless: frozenset[int] = frozenset()
    """Exit codes after which a restart is useless."""
    stop_within_s: float = 60.0
    """Seconds from SIGTERM to SIGKILL."""
    url: str = ""
    """URL of a server; it is restarted if it answers GET /health once and then leaves it unanswered for `hung_after_s`."""
    hung_after_s: float = 60.0
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Reserved by schedulers; `resources` are those that the cluster's owner has named."""


class Running(Protocol):
    """One process of a role."""

    def poll(self) -> int | None:
        """The exit code (128 + n for signal n), or None while it runs."""

    def read(self) -> bytes:
        """Output since the last call."""

    def terminate(self) -> None:
        """Request a stop without waiting."""

    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why the run ended."""

    code: int
    """Exit code."""
    reason: str


@dataclass
class _Managed:
    """A role and its current process."""

    role: Role
    restarts: Restarts
    running: Running | None = None
    check: BackgroundCheck | None = None
    """Health check of the current process, for a role with a URL."""
    start_at: float | None = 0.0
    """Time of the next start; None: no start is planned."""
    asked_at: float | None = None
    """Time of the stop request."""
    unfinished: bytes = b""
    """Its unfinished line of output."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))


class Supervisor:
    """`run` returns when the ENDS_ALL role is done, after a signal, or when a role died too often."""

    def __init__(
        self,
        roles: Sequence[Role],
        start: Callable[[Role], Running],
        *,
        show: Callable[[str, str], None],
        limit: RestartLimit | None = None,
    ) -> None:
        """`show(name, line)` gets every line of every role, and the supervisor's under the name "launch"."""
        self._managed = [_Managed(role, Restarts(limit or RestartLimit())) for role in roles]
        self._start = start
        self._show = show
        self._outcome: Outcome | None = None
        self._wishes = StopRequests()

    def run(self) -> Outcome:
        with self._listening():
            try:
                while self._outcome is None:
                    for managed in self._managed:
                        self._look_at(managed)
                    time.sleep(_LOOK_EVERY_S)
                self._show("launch", f"{self._outcome.reason} Stopping.")
                self._stop_in_order()
            finally:  # also if printing a line failed (a closed terminal)
                for managed in self._managed:
                    if managed.running is not None:
                        managed.running.kill()
                        managed.running = None
        return self._outcome

    # --- running ---

    def _look_at(self, managed: _Managed) -> None:
        if managed.running is None:
            if managed.start_at is not None and time.monotonic() >= managed.start_at and self._outcome is None:
                managed.running, managed.start_at = self._start(managed.role), None
                if managed.role.url:
                    managed.check = BackgroundCheck(managed.role.url, managed.role.hung_after_s)
            return
        is_hung = managed.check is not None and managed.check.is_hung
        if is_hung:
            managed.running.kill()
        code = managed.running.poll()  # before reading, so that its last lines are not lost
        self._show_output(managed, is_last=code is not None or is_hung)
        if code is not None or is_hung:
            managed.running = None
            if managed.check is not None:
                managed.check.close()
                managed.check = None
            if self._outcome is None:
                self._died(managed, HANGS) if is_hung or code is None else self._ended(managed, code)

    def _ended(self, managed: _Managed, code: int) -> None:
        role = managed.role
        if code == 0 and role.when_done is WhenDone.ENDS_ALL:
            self._outcome = Outcome(0, f"{role.name} is done.")
        elif code == 0 and role.when_done is WhenDone.IS_FINE:
            self._show("launch", f"{role.name} has no more to do; the others go on.")
        elif code in role.hopeless:
            self._outcome = Outcome(code, f"{role.name} {_ending(code)}; {_quoted(managed)}")
        else:
            self._died(managed, _ending(code))

    def _died(self, managed: _Managed, how: str) -> None:
        name, restarts = managed.role.name, managed.restarts
        delay = restarts.died()
        if delay is None:
            self._outcome = Outcome(1, f"{name} {how} and {restarts.too_many()}; {_quoted(managed)}")
            return
        managed.start_at = time.monotonic() + delay
        self._show("launch", f"{name} {how}; {restarts.again(delay)}.")

    # --- the end ---

    def _stop_in_order(self) -> None:
        """Stop each role after the roles that need it; kill those that take too long."""
        while any(managed.running is not None for managed in self._managed) and self._wishes.num < 2:
            needed = {name for managed in self._managed if managed.running is not None for name in managed.role.needs}
            for managed in self._managed:
                self._look_at(managed)
                if managed.running is not None and managed.role.name not in needed:
                    self._ask_to_stop(managed, managed.running)
            time.sleep(_LOOK_EVERY_S)

    def _ask_to_stop(self, managed: _Managed, running: Running) -> None:
        now = time.monotonic()
        if managed.asked_at is None:
            managed.asked_at = now
            running.terminate()
        elif now > managed.asked_at + managed.role.stop_within_s:
            self._show("launch", f"{managed.role.name} did not stop within {managed.role.stop_within_s:g} s; killed.")
            running.kill()

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM stop all roles in order; a second signal some seconds later kills them."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self._wishes.hear()
        if self._outcome is None:
            self._outcome = Outcome(128 + number, f"{signal.Signals(number).name}.")

    # --- output ---

    def _show_output(self, managed: _Managed, *, is_last: bool) -> None:
        assert managed.running is not None, "only called while it runs"
        *lines, managed.unfinished = (managed.unfinished + managed.running.read()).split(b"\n")
        if is_last and managed.unfinished:
            lines.append(managed.unfinished)
            managed.unfinished = b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            managed.last_lines.append(text)
            self._show(managed.role.name, text)


def _ending(code: int) -> str:
    return "was lost with its machine" if code == MACHINE_LOST else how_it_ended(code)


def _quoted(managed: _Managed) -> str:
    said = [line.strip() for line in managed.last_lines if line.strip()]
    return f"its last lines: {' / '.join(said)}" if said else "it said nothing."


# --- the output of several roles on one console ---

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_BOLD = 1


class MergedOutput:
    """Prefixes each line with its role, `actor-0 | …`, in colour on a terminal."""

    def __init__(self, names: Sequence[str], stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._width = max(map(len, names), default=0)
        self._codes = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._is_coloured = is_coloured(self._stream)

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if self._is_coloured:
            prefix = f"\x1b[{self._codes.get(name, _BOLD)}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix} {line}\n")
        self._stream.flush()
