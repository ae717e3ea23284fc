"""A long-lived child process that answers questions, one JSON line each; the kernel kills it if one takes too long.

For third-party code that grades a model's answer: it may hang inside a C call, use all memory or crash, which must not affect the
training process. Both ends of the pipe are here; the caller defines the questions. `Workers` holds several children, of which one
serves slow questions. POSIX only.
"""

import atexit
import contextlib
import gc
import json
import logging
import mmap
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ludic.util.die_with_parent import kill_with_parent
from ludic.util.errors import MissingExtra
from ludic.util.files import parse_json

_START_S = 120
"""Importing sympy takes a second; on a busy disk it may take many."""
_MAX_BYTES = 4 << 30
"""Address space of the child: a tower of exponents must not fill the memory before its time is up."""

_MAX_REMEMBERED = 4096

Question = dict[str, Any]
W = TypeVar("W", bound="Worker | Workers")


# --- the parent's end ---


class Worker:
    """One child, started when first needed, asked one question at a time; safe to share between threads."""

    def __init__(self, module: str, *, extra: str | None = None, needed_for: str = "") -> None:
        """`module` is run with `python -m` and calls `serve`. `extra` is the extra that installs its imports."""
        self._module = module
        self._extra = extra
        self._needed_for = needed_for
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Question, *, timeout_s: float, cpu_s: float | None = None) -> Any | None:
        """The child's answer; None when it takes too long (or more than `cpu_s` of CPU time) or ends the child.

        `timeout_s` does not include the child's start and other threads' questions.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = self._start()
            try:
                limits = {"timeout_s": timeout_s, "cpu_s": timeout_s if cpu_s is None else cpu_s}
                reply = _exchange(self._process, {"question": question, **limits})
            except BaseException:
                self.close()  # a reply may still be in the pipe; the next question must not receive it
                raise
            if reply is None:
                self.close()
                return None
            return reply["answer"]

    def close(self) -> None:
        """End the child. The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _start(self) -> "subprocess.Popen[str]":
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the same imports as here
            "PYTHONHASHSEED": "0",  # sympy orders terms by hash: the same question must get the same verdict
        }
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="ascii",  # json.dumps escapes everything else, lone surrogates too
            env=environment,
        )
        hello = _exchange(process, None)
        if hello is not None and hello["ready"]:
            return process
        _end(process)
        if hello is not None and self._extra is not None:
            raise MissingExtra(self._extra, f"{self._needed_for} ({hello['error']})")
        raise RuntimeError(f"A worker did not start. See why with: python -m {self._module}")


class Workers:
    """Several workers for questions of one kind; safe to share between threads.

    Every question gets `quick_s` of CPU time. One that needs more goes to a separate worker, so that slow questions delay only slow
    ones; it waits for that worker at most `max_wait_s`. A question that takes too long there is not asked again, nor is any
    question about an answer that took too long with two references.
    """

    def __init__(self, make: Callable[[], Worker], *, num: int, quick_s: float, max_wait_s: float = 60.0) -> None:
        self._quick_s = quick_s
        self._max_wait_s = max_wait_s
        self._all = [make() for _ in range(num + 1)]
        # Last in, first out: without concurrent questions only one worker is started.
        self._quick: queue.LifoQueue[Worker] = queue.LifoQueue()
        self._slow: queue.LifoQueue[Worker] = queue.LifoQueue()
        for worker in self._all[1:]:
            self._quick.put(worker)
        self._slow.put(self._all[0])
        self._endless: dict[str, set[str]] = {}

    def ask(self, question: Question, *, answer: str, reference: str, timeout_s: float) -> Any | None:
        """A worker's answer; None when it takes too long. `answer` and `reference` identify the question's subject."""
        known = self._endless.get(answer, set())
        if reference in known or len(known) > 1:
            return None
        verdict = self._asked(self._quick, None, question, timeout_s=timeout_s, cpu_s=min(self._quick_s, timeout_s))
        if verdict is None and timeout_s > self._quick_s:
            try:
                verdict = self._asked(self._slow, self._max_wait_s, question, timeout_s=timeout_s, cpu_s=timeout_s)
            except queue.Empty:
                return None  # not asked: too many slow questions wait
        if verdict is None:
            if len(self._endless) >= _MAX_REMEMBERED:
                self._endless.clear()
            self._endless.setdefault(answer, set()).add(reference)
        return verdict

    @staticmethod
    def _asked(
        workers: "queue.LifoQueue[Worker]", wait_s: float | None, question: Question, *, timeout_s: float, cpu_s: float
    ) -> Any | None:
        worker = workers.get(timeout=wait_s)
        try:
            return worker.ask(question, timeout_s=timeout_s, cpu_s=cpu_s)
        finally:
            workers.put(worker)

    def close(self) -> None:
        for worker in self._all:
            worker.close()


def worker_of_this_process(module: str, make: Callable[[], W]) -> W:
    """The worker (or `Workers`) of this process that runs `module`, made at the first call."""
    # Keyed by pid: a forked child inherits the dict with its parent's pipes and perhaps a held lock.
    key = (os.getpid(), module)
    if key not in _workers:
        _workers.setdefault(key, make())
    found: W = _workers[key]  # type: ignore[assignment]  # a module's worker is always made by the same function
    return found


_workers: dict[tuple[int, str], Worker | Workers] = {}


@atexit.register
def _close_at_exit() -> None:
    for pid, module in list(_workers):
        if pid == os.getpid():
            _workers.pop((pid, module)).close()


def _exchange(process: "subprocess.Popen[str]", message: dict[str, Any] | None) -> dict[str, Any] | None:
    """Send a message, if there is one, and return the child's next line; None when the child is gone."""
    assert process.stdin is not None and process.stdout is not None, "the worker is started with both pipes"
    try:
        if message is not None:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return None
    return parse_json(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # closing flushes unread input
                pipe.close()


# --- the child's end ---


def serve(load: Callable[[], Callable[[Question], Any]], *, when_raised: Any) -> None:
    """Answer questions until stdin ends. `load` does the imports and returns the function that answers.

    Where that function raises, the answer is `when_raised`.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # output of a library must not be read as a reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    _prepare_process()
    signal.alarm(_START_S)
    try:
        answer_to = load()
    except ImportError as error:
        reply({"ready": False, "error": str(error)})
        return
    signal.alarm(0)
    reply({"ready": True})
    gc.freeze()
    is_busy = mmap.mmap(-1, 1)  # shared with the child below
    while _child_ended(lambda: _answer_all(answer_to, reply, when_raised, is_busy)):
        if is_busy[0]:
            reply({"answer": None})
            is_busy[0] = 0


def _child_ended(run: Callable[[], None]) -> bool:
    """Run `run` in a forked child, which shares all imports; returns whether it was killed."""
    parent, pid = os.getpid(), os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] != 0
    try:
        kill_with_parent()
        if os.getppid() == parent:
            run()
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


def _answer_all(
    answer_to: Callable[[Question], Any], reply: Callable[[dict[str, Any]], None], when_raised: Any, is_busy: mmap.mmap
) -> None:
    for line in sys.stdin:
        is_busy[0] = 1
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, message["cpu_s"])
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"])
        try:
            answer = answer_to(message["question"])
        except Exception:  # noqa: BLE001 - third-party code may raise anything at odd input
            answer = when_raised
        signal.setitimer(signal.ITIMER_PROF, 0)  # before the reply: a late alarm must not hit the next question
        signal.setitimer(signal.ITIMER_REAL, 0)
        is_busy[0] = 0
        reply({"answer": answer})


def _prepare_process() -> None:
    # The alarms' default action ends the process even inside a call into C; a handler could not.
    for alarm in (signal.SIGALRM, signal.SIGPROF):
        signal.signal(alarm, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM, signal.SIGPROF})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, OSError, ValueError):  # not every platform has this limit
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
