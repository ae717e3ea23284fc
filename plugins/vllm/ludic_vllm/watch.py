"""Watches a vLLM server that this process owns: one that died or hangs is killed, started again and given its weights again.

A server hangs if it accepts connections and answers nothing. vLLM answers GET /health while it generates, while it is paused and
while it loads weights, so a limit on that answer is no limit on those. Completions wait from the moment a failure is found until
the new server has the current weights (`ready`); control calls do not wait, since they bring the weights.
"""

import asyncio
import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable

from ludic.http.address import check_port
from ludic.http.client import EndpointError, get_without_loop
from ludic.types import ConfigError, PolicyGone
from ludic.util.processes import Restarts, how_it_ended
from ludic_vllm.process import VLLMServerProcess, last_words

logger = logging.getLogger(__name__)

HANGS = "hangs: it accepts connections, but /health was not answered in time"
_NUM_MISSED = 3
"""Checks in a row without an answer before a server counts as hung: a program that was itself stopped for a minute misses one."""
_ASK_EVERY_S = 5.0
_LOOK_EVERY_S = 0.1
_PORT_FREE_S = 30.0


class HealthCheck:
    """Asks one server for /health. `is_hung` after `hung_after_s` without an answer."""

    def __init__(self, url: str, hung_after_s: float) -> None:
        self._url, self._hung_after_s = f"{url}/health", hung_after_s
        self.every_s = min(_ASK_EVERY_S, hung_after_s / _NUM_MISSED)
        self.begin()

    def begin(self) -> None:
        """Count from now."""
        self._answered_at, self._num_missed = time.monotonic(), 0

    def ask(self) -> bool:
        """Ask once; whether the server is healthy. Takes at most a third of `hung_after_s`."""
        try:
            get_without_loop(self._url, self._hung_after_s / _NUM_MISSED)
        except (OSError, EndpointError):
            self._num_missed += 1
            return False
        self.begin()
        return True

    @property
    def is_hung(self) -> bool:
        return self._num_missed >= _NUM_MISSED and time.monotonic() - self._answered_at >= self._hung_after_s


class BackgroundCheck:
    """A health check in a background thread, which counts from the server's first answer on: a start may take minutes."""

    def __init__(self, url: str, hung_after_s: float) -> None:
        self.is_hung = False
        self._check, self._closing = HealthCheck(url, hung_after_s), threading.Event()
        threading.Thread(target=self._run, name="health check", daemon=True).start()

    def _run(self) -> None:
        has_answered = False
        while not self._closing.wait(self._check.every_s):
            has_answered = self._check.ask() or has_answered
            self.is_hung = has_answered and self._check.is_hung

    def close(self) -> None:
        self._closing.set()


class ServerWatch:
    """Keeps a server running, in a thread that `begin` starts and `close` ends together with the server."""

    def __init__(
        self, process: VLLMServerProcess, restarts: Restarts, *, hung_after_s: float = 60.0, start_s: float = 600.0
    ) -> None:
        """`hung_after_s`: how long /health may stay unanswered. `start_s`: how long a start may take."""
        self.process = process
        self.num_starts = 0
        """Restarts so far. An answer that was asked for before the last one may come from other weights."""
        self._restarts, self._start_s = restarts, start_s
        self._health = HealthCheck(process.url, hung_after_s)
        self._restore: Callable[[], bool] = lambda: True
        self._gone: PolicyGone | None = None
        self._ready, self._closing, self._wake = threading.Event(), threading.Event(), threading.Event()
        self._ready.set()
        self._lock = threading.Lock()
        """Held while the process is started or stopped."""
        self._thread = threading.Thread(target=self._watch, name="vLLM server watch", daemon=True)

    def begin(self, restore: Callable[[], bool]) -> None:
        """`restore` gives a restarted server its weights; False: not possible yet, ask again."""
        self._restore = restore
        atexit.register(self.close)
        self._health.begin()
        self._thread.start()

    def close(self) -> None:
        """End the watch, then the server."""
        self._closing.set()
        self._wake.set()
        with self._lock:
            self.process.stop()
        if self._thread.is_alive():
            self._thread.join()
        atexit.unregister(self.close)

    # --- for clients ---

    def require_alive(self) -> None:
        """Called when the server cannot be reached: look at it now. Raises PolicyGone once it will not be restarted."""
        if self._gone is not None:
            raise self._gone
        self._wake.set()

    async def ready(self) -> int:
        """Wait until the server has the current weights; returns `num_starts`."""
        while not self._ready.is_set():
            self.require_alive()
            await asyncio.sleep(_LOOK_EVERY_S)
        return self.num_starts

    # --- the thread ---

    def _watch(self) -> None:
        try:
            while not self._closing.is_set() and self._gone is None:
                self._wake.wait(self._health.every_s)
                self._wake.clear()
                problem = self._problem()
                if problem is not None and not self._closing.is_set():
                    self._ready.clear()
                    self._recover(problem)
        except Exception as error:  # completions that wait must learn of it
            self._gone = PolicyGone(f"The watch of the vLLM server failed: {type(error).__name__}: {error}")
            self._ready.clear()
            raise

    def _problem(self) -> str | None:
        """The server's problem; None if it runs."""
        if (code := self.process.poll()) is not None:
            return how_it_ended(code)
        if not self._health.ask() and self._health.is_hung:
            return HANGS
        return None

    def _recover(self, problem: str | None) -> None:
        while problem is not None and not self._closing.is_set():
            delay = self._restarts.died()
            self._kill()
            if delay is None:
                self._gone = PolicyGone(
                    f"The vLLM server of this run {problem}, and {self._restarts.too_many()}. All it wrote is in "
                    f"{self.process.log}. {last_words(self.process.output())}"
                )
                return
            logger.warning("the vLLM server %s; %s (log: %s)", problem, self._restarts.again(delay), self.process.log)
            problem = None if self._closing.wait(delay) else self._start()
        if not self._closing.is_set():
            self._ready.set()

    def _kill(self) -> None:
        """Kill the server and its workers; wait until they have left the port and, on a GPU, its memory."""
        with self._lock:
            pid = self.process.pid
            self.process.kill()
        deadline = time.monotonic() + _PORT_FREE_S
        while time.monotonic() < deadline and not self._closing.is_set():
            with contextlib.suppress(ConfigError):
                check_port(self.process.command.host, self.process.command.port)
                if not _is_running(pid):
                    return
            time.sleep(_LOOK_EVERY_S)

    def _start(self) -> str | None:
        """Start it and give it the weights; returns what went wrong, if anything."""
        with self._lock:
            if self._closing.is_set():
                return None
            self.num_starts += 1
            try:
                self.process.start()
            except (ConfigError, OSError) as error:
                return f"could not be started: {error}"
        deadline = time.monotonic() + self._start_s
        while not self._health.ask():
            if (code := self.process.poll()) is not None:
                return how_it_ended(code)
            if time.monotonic() > deadline:
                return f"was not ready within {self._start_s:g} s"
            if self._closing.wait(_LOOK_EVERY_S):
                return None
        return self._restore_weights()

    def _restore_weights(self) -> str | None:
        """In another thread, so that a server that dies or hangs meanwhile is noticed; its end also ends that thread."""
        outcome: list[str | None] = []

        def restore() -> None:
            try:
                while not self._closing.is_set() and not self._restore():
                    time.sleep(_LOOK_EVERY_S)
                outcome.append(None)
            except Exception as error:  # noqa: BLE001 - whatever it is, this server has no weights
                outcome.append(f"could not be given its weights: {error}")

        thread = threading.Thread(target=restore, name="vLLM server weights", daemon=True)
        thread.start()
        while thread.is_alive() and not self._closing.is_set():
            if (problem := self._problem()) is not None:
                return problem
            thread.join(self._health.every_s / 10)
        return outcome[0] if outcome else None


def _is_running(group: int) -> bool:
    """Return True if a process of this group has not ended yet; one that has ended but was not waited for has."""
    for folder in filter(str.isdigit, os.listdir("/proc") if os.path.isdir("/proc") else ()):
        with contextlib.suppress(OSError), open(f"/proc/{folder}/stat") as file:
            state, _, found = file.read().rpartition(")")[2].split()[:3]
            if int(found) == group and state not in "ZX":
                return True
    return False
