"""Starts the worker processes of a pool or a server, restarts those that end or stand still, and ends them all.

One daemon thread does it, independent of event loops, and hands sockets to the workers. `EnvPool` and `EnvServer` use it.
"""

import contextlib
import logging
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from ludic.types import ConfigError, EnvCrashed, EnvWorkerError, LudicError
from ludic.types.errors import is_users_file, retry_wait_s
from ludic.util.processes import how_it_ended, kill_group
from ludic_envs.workers.wire import BadFrame, FrameReader, error_from_wire, pack

logger = logging.getLogger(__name__)

_STOP_S = 5.0
"""For a worker to close its envs when it is stopped."""
_SILENT_S = 5.0
"""A worker without a sign of life for this long beyond its time limit is killed: its own watchdog has not ended it."""
_START_S = 600.0
"""For a worker to import its envs; on a busy disk that may take minutes."""
_LOOK_EVERY_S = 0.5
_MAX_FAILED_STARTS = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
"""Before a restart, where workers end one after the other."""
_LONG_LIFE_S = 30.0


@dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """The set-up that a worker gets when it starts."""

    envs: Mapping[str, tuple[str, Mapping[str, Any]]]
    """Name → (id that the registry knows there, arguments of every env)."""
    timeout_s: float | None = 600.0
    """A worker whose event loop stands still for this long is ended. None: no limit."""
    memory_mb: int | None = None
    """Limit of what the envs of one worker allocate together. None: no limit."""
    in_threads: bool = False
    """Run also those envs in threads that say that they answer at once: one of them has not."""


class Worker:
    """One process, from its start to its end."""

    def __init__(self, index: int, setup: WorkerSetup) -> None:
        self.index = index
        self.death: Future[str] = Future()
        """Why the process ended, when it has."""
        self.is_retiring = False
        self.last_beat = time.monotonic()
        self.ready_at: float | None = None
        self.killed_because = ""
        self._timeout_s = setup.timeout_s
        self._lock = threading.Lock()
        self._trace: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._reader = FrameReader()
        self.control, inside = socket.socketpair()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        try:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "ludic_envs.workers.process", str(inside.fileno()), str(self._trace.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                pass_fds=[inside.fileno(), self._trace.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the trainer, and a group can be killed with its children
            )  # fmt: skip
        finally:
            inside.close()
        with contextlib.suppress(OSError):  # it has ended already
            self.control.sendall(pack(vars(setup)))

    def connect(self, sock: socket.socket) -> None:
        """Give the worker a connection; `sock` is closed here. OSError if the worker has ended."""
        try:
            with self._lock:
                socket.send_fds(self.control, [pack("connection")], [sock.fileno()])
        finally:
            sock.close()

    def receive(self) -> list[Any] | None:
        """New messages of the worker; None when it has closed its end."""
        try:
            data = self.control.recv(1 << 16)
            return self._reader.feed(data) if data else None
        except (OSError, BadFrame):
            return None

    def stop(self) -> None:
        with contextlib.suppress(OSError), self._lock:
            self.control.sendall(pack("stop"))

    def kill(self, because: str = "") -> None:
        """End the process and all that it has started."""
        self.killed_because = self.killed_because or because
        kill_group(self.process.pid)

    @property
    def is_silent(self) -> bool:
        if self.ready_at is None:
            return time.monotonic() - self.last_beat > _START_S
        return self._timeout_s is not None and time.monotonic() - self.last_beat > self._timeout_s + _SILENT_S

    def reap(self, failure: str = "") -> bool:
        """Wait for the end of the process, and for its children; returns whether it stood still."""
        code = self.process.wait()
        kill_group(self.process.pid)  # what its envs have started
        self.control.close()
        self._trace.seek(0)
        trace = self._trace.read().decode(errors="replace")
        self._trace.close()
        is_hung = trace.startswith("Timeout (")
        why = failure or self.killed_because or self._why(code, trace, is_hung=is_hung)
        self.death.set_result(f"Env worker {self.index} (process {self.process.pid}) {why}")
        return is_hung or bool(self.killed_because)

    def _why(self, code: int, trace: str, *, is_hung: bool) -> str:
        if is_hung:
            limit = f"stood still for {self._timeout_s:g} s, more than the time limit of an env's call, and was ended"
            return f"{limit}. {_place(trace)}"
        memory = " The system kills processes when memory runs out." if code == -signal.SIGKILL else ""
        return f"{how_it_ended(code if code >= 0 else 128 - code)}.{memory}"


def _place(trace: str) -> str:
    """The line of the env, or else the innermost line, in what the watchdog wrote. The main thread comes last."""
    main = trace.rpartition("Thread 0x")[2]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', main)
    found = next((frame for frame in frames if is_users_file(frame[0])), frames[0] if frames else None)
    return "" if found is None else f"It was at {Path(found[0]).name}:{found[1]} in {found[2]}."


class _Slot:
    """The place of one worker and its successors."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.ready: Future[Worker] = Future()
        self.retired: list[Worker] = []
        self.num_deaths = 0
        """In a row, without a worker that lived for a while."""
        self.start_at: float | None = None
        """When the successor of a dead worker is started."""


class Supervisor:
    """Keeps `num` workers running until it is closed."""

    def __init__(self, setup: WorkerSetup, num: int) -> None:
        self._setup = setup
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._is_closing = False
        self.num_restarts = 0
        self._slots: list[_Slot] = []
        try:
            for index in range(num):
                self._slots.append(_Slot(self._start(index)))
        except OSError as error:
            for slot in self._slots:
                slot.worker.kill()
            raise ConfigError(f"Env worker {len(self._slots)} cannot be started: {error}") from error
        # Daemon: a program that forgets to close a pool still ends, and its workers with it.
        self._thread = threading.Thread(target=self._run, name="ludic-env-workers", daemon=True)
        self._thread.start()

    # --- called from any thread ---

    def worker(self, index: int) -> "Future[Worker]":
        """The worker that takes new envs, once it is ready; an error there if workers do not start."""
        with self._lock:
            return self._slots[index].ready

    @property
    def processes(self) -> list[int]:
        """Ids of the running worker processes, those that retire included."""
        with self._lock:
            return [w.process.pid for s in self._slots for w in (s.worker, *s.retired) if not w.death.done()]

    def close(self) -> None:
        """Stop all workers and wait for their end."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        self._waker.send(b".")
        self._thread.join()
        self._waker.close()

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_closing:
            for key, _ in self._selector.select(timeout=_LOOK_EVERY_S):
                if key.fileobj is not self._wake:
                    self._hear(key.data)
            for slot in self._slots:
                for worker in (slot.worker, *slot.retired):
                    if worker.is_silent and not worker.death.done():
                        worker.kill("gave no sign of life and was killed.")
                if slot.start_at is not None and time.monotonic() >= slot.start_at:
                    self._succeed(slot)
        self._end_all()

    def _start(self, index: int) -> Worker:
        worker = Worker(index, self._setup)
        self._selector.register(worker.control, selectors.EVENT_READ, worker)
        return worker

    def _hear(self, worker: Worker) -> None:
        slot, messages = self._slots[worker.index], worker.receive()
        if messages is None:
            self._bury(worker, slot)
            return
        worker.last_beat = time.monotonic()
        for message in messages:
            if "ready" in message:
                worker.ready_at = time.monotonic()
                slot.ready.set_result(worker)
            elif "retiring" in message:
                worker.is_retiring = True
                slot.retired.append(worker)
                self._succeed(slot)
            elif "failed" in message and not slot.ready.done():
                slot.ready.set_exception(_start_failed(message["failed"]))

    def _bury(self, worker: Worker, slot: _Slot) -> None:
        """Take note of a worker's end, and plan its successor."""
        self._selector.unregister(worker.control)
        is_hung = worker.reap()
        if is_hung and not self._setup.in_threads:
            self._setup = replace(self._setup, in_threads=True)
            logger.warning("%s From now on the envs of this pool run in threads.", worker.death.result())
        elif not worker.is_retiring:
            logger.warning("%s", worker.death.result())
        if worker in slot.retired:
            slot.retired.remove(worker)
            return
        if slot.ready.done() and slot.ready.exception() is not None:
            return  # it cannot start, and has said why
        lived_s = 0.0 if worker.ready_at is None else time.monotonic() - worker.ready_at
        slot.num_deaths = 1 if lived_s > _LONG_LIFE_S else slot.num_deaths + 1
        if worker.ready_at is None and slot.num_deaths >= _MAX_FAILED_STARTS:
            slot.ready.set_exception(EnvCrashed(f"{worker.death.result()} It ends before it is ready."))
            return
        self._renew(slot)
        wait_s = 0.0 if slot.num_deaths < 3 else retry_wait_s(slot.num_deaths - 3, _FIRST_WAIT_S, _LONGEST_WAIT_S)
        slot.start_at = time.monotonic() + wait_s

    def _renew(self, slot: _Slot) -> None:
        """A caller that asks for a worker from now on waits for the successor."""
        with self._lock:
            if slot.ready.done():
                slot.ready = Future()

    def _succeed(self, slot: _Slot) -> None:
        self._renew(slot)
        slot.start_at = None
        worker = self._start(slot.worker.index)
        with self._lock:
            slot.worker = worker
        self.num_restarts += 1

    def _end_all(self) -> None:
        workers = [w for slot in self._slots for w in (slot.worker, *slot.retired) if not w.death.done()]
        for worker in workers:
            worker.stop()
        deadline = time.monotonic() + _STOP_S
        for worker in workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.process.wait(max(0.0, deadline - time.monotonic()))
            worker.kill()
            self._selector.unregister(worker.control)
            worker.reap("was stopped.")
        for slot in self._slots:
            self._renew(slot)
            slot.ready.set_exception(EnvCrashed("The pool of env workers is closed."))
        self._selector.close()
        self._wake.close()


def _start_failed(stored: list[str]) -> Exception:
    error: LudicError = error_from_wire(stored)
    return ConfigError(f"An env worker cannot start: {error}") if isinstance(error, EnvWorkerError) else error
