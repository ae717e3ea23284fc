"""Keeps a few long-running roles alive: starts them, shows their output, restarts what dies, stops them in order.

Knows nothing of what the roles do, nor how they are started (processes.py, launch_ray.py). One thread looks at all of them ten
times a second. A role that dies too often ends everything: something is wrong that a restart does not mend.
"""

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import FrameType
from typing import IO, Protocol

from ludic.training.learner.stop import StopRequests

_LOOK_EVERY_S = 0.1
_LAST_LINES = 3


class WhenDone(StrEnum):
    """What it means when a role ends with exit code 0."""

    ENDS_ALL = "ends_all"
    """It was what everybody else was there for."""
    IS_FINE = "is_fine"
    """It had no more to do; the others go on."""
    IS_DEATH = "is_death"
    """It is needed as long as there is anybody: it is started again."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """Something to keep running."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to that of whoever starts it."""
    needs: tuple[str, ...] = ()
    """Roles that are stopped only after this one."""
    when_done: WhenDone = WhenDone.IS_DEATH
    hopeless: frozenset[int] = frozenset()
    """Exit codes after which another try would end the same way."""
    stop_within_s: float = 60.0
    """From the wish to stop until it is killed."""
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    """What it takes of a machine; for schedulers."""


class Running(Protocol):
    """One life of a role."""

    def poll(self) -> int | None:
        """The exit code (128 + n for signal n), or None while it runs."""
        ...

    def read(self) -> bytes:
        """What it has written since the last call."""
        ...

    def terminate(self) -> None:
        """Ask it to stop, and return at once."""
        ...

    def kill(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    """How often a role may die."""

    max_restarts: int = 5
    """Within `within_s`; one more ends everything."""
    within_s: float = 600.0
    delay_s: float = 1.0
    """Before the first restart; doubled with each further one of the window."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Why it is over."""

    code: int
    """Exit code."""
    reason: str


@dataclass
class _Managed:
    """A role and its present life."""

    role: Role
    running: Running | None = None
    deaths: deque[float] = field(default_factory=deque)
    """When, within the window."""
    start_at: float | None = 0.0
    """When it is to be started (again); None: not at all."""
    asked_at: float | None = None
    """When it was asked to stop."""
    unfinished: bytes = b""
    """The line that it has not ended yet."""
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=_LAST_LINES))


class Supervisor:
    """`run` returns when the role that ends all is done, a signal came, or something died too often."""

    def __init__(
        self,
        roles: Sequence[Role],
        start: Callable[[Role], Running],
        *,
        show: Callable[[str, str], None],
        limit: RestartLimit | None = None,
    ) -> None:
        """`show(name, line)` gets every line of every role, and ours under the name "launch"."""
        self._posts = [_Managed(role) for role in roles]
        self._start = start
        self._show = show
        self._limit = limit or RestartLimit()
        self._outcome: Outcome | None = None
        self._wishes = StopRequests()

    def run(self) -> Outcome:
        with self._listening():
            try:
                while self._outcome is None:
                    for post in self._posts:
                        self._look_at(post)
                    time.sleep(_LOOK_EVERY_S)
                self._show("launch", f"{self._outcome.reason} Stopping.")
                self._stop_in_order()
            finally:  # also when showing a line failed: nobody reads us any more
                self._kill_the_rest()
        return self._outcome

    # --- while it goes on ---

    def _look_at(self, post: _Managed) -> None:
        if post.running is None:
            if post.start_at is not None and time.monotonic() >= post.start_at and self._outcome is None:
                post.running, post.start_at = self._start(post.role), None
            return
        code = post.running.poll()  # before reading, so that its last lines are not lost
        self._show_output(post, is_last=code is not None)
        if code is not None:
            post.running = None
            if self._outcome is None:
                self._ended(post, code)

    def _ended(self, post: _Managed, code: int) -> None:
        role = post.role
        if code == 0 and role.when_done is WhenDone.ENDS_ALL:
            self._outcome = Outcome(0, f"{role.name} is done.")
        elif code == 0 and role.when_done is WhenDone.IS_FINE:
            self._show("launch", f"{role.name} has no more to do; the others go on.")
        elif code in role.hopeless:
            self._outcome = Outcome(code, f"{role.name} {how_it_ended(code)}; {_quoted(post)}")
        else:
            self._died(post, code)

    def _died(self, post: _Managed, code: int) -> None:
        now, limit = time.monotonic(), self._limit
        post.deaths.append(now)
        while post.deaths[0] < now - limit.within_s:
            post.deaths.popleft()
        num_deaths = len(post.deaths)
        if num_deaths > limit.max_restarts:
            self._outcome = Outcome(
                1,
                f"{post.role.name} {how_it_ended(code)} and has died {num_deaths} times within {limit.within_s:g} s, more than "
                f"max_restarts = {limit.max_restarts} allows; {_quoted(post)}",
            )
            return
        delay = limit.delay_s * 2 ** (num_deaths - 1)
        post.start_at = now + delay
        again = f"restart {num_deaths} of at most {limit.max_restarts}"
        self._show("launch", f"{post.role.name} {how_it_ended(code)}; {again} in {delay:g} s.")

    # --- the end ---

    def _stop_in_order(self) -> None:
        """Each is asked when nobody who needs it is left; who takes too long is killed."""
        while any(post.running is not None for post in self._posts) and self._wishes.num < 2:
            needed = {name for post in self._posts if post.running is not None for name in post.role.needs}
            for post in self._posts:
                self._look_at(post)
                if post.running is not None and post.role.name not in needed:
                    self._ask_to_stop(post, post.running)
            time.sleep(_LOOK_EVERY_S)

    def _ask_to_stop(self, post: _Managed, running: Running) -> None:
        now = time.monotonic()
        if post.asked_at is None:
            post.asked_at = now
            running.terminate()
        elif now > post.asked_at + post.role.stop_within_s:
            self._show("launch", f"{post.role.name} did not stop within {post.role.stop_within_s:g} s; killed.")
            running.kill()

    def _kill_the_rest(self) -> None:
        for post in self._posts:
            if post.running is not None:
                post.running.kill()
                post.running = None

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Ctrl-C and SIGTERM end everything in order; once more, some seconds later, at once."""
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

    def _show_output(self, post: _Managed, *, is_last: bool) -> None:
        assert post.running is not None, "only called while it runs"
        *lines, post.unfinished = (post.unfinished + post.running.read()).split(b"\n")
        if is_last and post.unfinished:
            lines.append(post.unfinished)
            post.unfinished = b""
        for line in lines:
            text = line.decode("utf-8", "replace").rstrip("\r")
            post.last_lines.append(text)
            self._show(post.role.name, text)


def how_it_ended(code: int) -> str:
    """An exit code in words."""
    names = {128 + number: number.name for number in signal.Signals}
    return f"was ended by {names[code]}" if code in names else f"ended with exit code {code}"


def _quoted(post: _Managed) -> str:
    said = [line.strip() for line in post.last_lines if line.strip()]
    return f"its last lines: {' / '.join(said)}" if said else "it said nothing."


# ----------------------------------------------------------------------------------------------------
# The output of several roles on one console: each line behind the name of who wrote it.
# ----------------------------------------------------------------------------------------------------

_COLOURS = (36, 33, 35, 32, 34, 96, 93, 95, 92, 94)
_BOLD = 1


class MergedOutput:
    """`actor-0 | …`; in colour where it is read by a person."""

    def __init__(self, names: Sequence[str], stream: IO[str] | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._width = max(map(len, names), default=0)
        self._codes = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
        self._is_coloured = self._stream.isatty() and not os.environ.get("NO_COLOR")

    def __call__(self, name: str, line: str) -> None:
        prefix = f"{name:<{self._width}} |"
        if self._is_coloured:
            prefix = f"\x1b[{self._codes.get(name, _BOLD)}m{prefix}\x1b[0m"
        self._stream.write(f"{prefix} {line}\n")
        self._stream.flush()
