"""A long-lived child process that answers questions, one JSON line each, and that the kernel ends when one takes too long.

For other people's code that judges a model's answer: it may hang inside one call into C, eat all memory or crash, and
none of that may touch the process that trains. Both ends of the pipe are here; what is asked is the caller's business.
POSIX only.
"""

import atexit
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from ludic.types import MissingExtra

_START_S = 120
"""Importing sympy takes a second; on a crowded disk it may take many."""
_MAX_BYTES = 4 << 30
"""Address space of the child: a tower of exponents must not eat the machine before its time is up."""

Question = dict[str, Any]


# --- the parent's end ---------------------------------------------------------------------------------------


class Worker:
    """One child, started when first needed, asked one question at a time; safe to share between threads."""

    def __init__(self, module: str, *, extra: str, needed_for: str) -> None:
        """`module` is run with `python -m` and calls `serve`. What it cannot import is in `extra`."""
        self._module = module
        self._extra = extra
        self._needed_for = needed_for
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def ask(self, question: Question, *, timeout_s: float) -> Any | None:
        """The child's answer; None when it takes too long or ends the child.

        Waiting for the child to start, and for other threads' questions, does not count towards `timeout_s`.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = self._start()
            try:
                reply = _exchange(self._process, {"question": question, "timeout_s": timeout_s})
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
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the child sees what we see
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
        if hello is not None:
            raise MissingExtra(self._extra, f"{self._needed_for} ({hello['error']})")
        raise RuntimeError(f"A worker did not start. See why with: python -m {self._module}")


def worker_of_this_process(module: str, make: Callable[[], Worker]) -> Worker:
    """The one worker that runs `module`, made when it is first asked for."""
    # Keyed by pid: a forked child inherits the dict, but the pipes in it (and perhaps a held lock) are its parent's.
    key = (os.getpid(), module)
    if key not in _workers:
        _workers.setdefault(key, make())
    return _workers[key]


_workers: dict[tuple[int, str], Worker] = {}


@atexit.register
def _close_at_exit() -> None:
    for pid, module in list(_workers):
        if pid == os.getpid():
            _workers.pop((pid, module)).close()


def _exchange(process: "subprocess.Popen[str]", message: dict[str, Any] | None) -> dict[str, Any] | None:
    """The child's next line (after sending it a message, if there is one); None when the child is gone."""
    assert process.stdin is not None and process.stdout is not None, "the worker is started with both pipes"
    try:
        if message is not None:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return None
    return json.loads(line) if line.endswith("\n") else None


def _end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # closing flushes what the child never read
                pipe.close()


# --- the child's end ----------------------------------------------------------------------------------------


def serve(load: Callable[[], Callable[[Question], Any]], *, when_raised: Any) -> None:
    """Answer questions until stdin ends. `load` imports what is needed and gives the function that answers.

    A question at which that function raises is answered with `when_raised`.
    """
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may pass for a reply

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
    for line in sys.stdin:
        message = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, message["timeout_s"])
        try:
            answer = answer_to(message["question"])
        except Exception:  # noqa: BLE001 - other people's code raises whatever it likes at odd input
            answer = when_raised
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the reply, so that a late alarm cannot hit the next question
        reply({"answer": answer})


def _prepare_process() -> None:
    # The alarm's default action ends the process, even inside one endless call into C; no handler could.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us when it is done
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, OSError, ValueError):  # a platform without this limit does without
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
