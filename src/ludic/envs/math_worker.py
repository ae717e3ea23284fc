"""math-verify in a process of its own: both ends of the pipe.

math-verify guards itself with signal.alarm, which only works on a main thread, and sympy can be sent into
computations that nothing inside its process can stop. So it runs in a long-lived child
(`python -m ludic.envs.math_worker`), one JSON line per question and one per verdict, and the kernel ends the child
when a question takes too long (POSIX only). What counts as an answer, and all that needs no algebra, is decided in
ludic.envs.math_grading.
"""

import atexit
import contextlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from ludic.types import MissingExtra

_START_S = 120
"""Importing sympy takes a second; on a crowded disk it may take many."""
_MAX_BYTES = 4 << 30
"""Address space of the child: a tower of exponents must not eat the machine before its time is up."""


# --- the parent's end ---------------------------------------------------------------------------------------


class MathWorker:
    """One child, started when first needed, asked one question at a time; safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def check(self, answer: str, gold: str, *, timeout_s: float) -> bool:
        """Is the LaTeX `answer` the same as `gold`? An answer that takes too long, or ends the child, is not.

        Waiting for the child to start, and for other threads' questions, does not count towards `timeout_s`.
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start()
            try:
                reply = _ask(self._process, {"answer": answer, "gold": gold, "timeout_s": timeout_s})
            except BaseException:
                self.close()  # a reply may still be in the pipe; the next question must not receive it
                raise
            if reply is None:
                self.close()
                return False
            return bool(reply["equivalent"])

    def close(self) -> None:
        """End the child. The next question starts another."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)


def worker_of_this_process() -> MathWorker:
    # Keyed by pid: a forked child inherits the dict, but the pipes in it (and perhaps a held lock) are its parent's.
    return _workers.setdefault(os.getpid(), MathWorker())


_workers: dict[int, MathWorker] = {}


@atexit.register
def _close_at_exit() -> None:
    if (worker := _workers.pop(os.getpid(), None)) is not None:
        worker.close()


def _start() -> "subprocess.Popen[str]":
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # the child sees what we see
        "PYTHONHASHSEED": "0",  # sympy orders terms by hash: the same question must get the same verdict
    }
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ludic.envs.math_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        encoding="ascii",  # json.dumps escapes everything else, lone surrogates too
        env=environment,
    )
    hello = _ask(process, None)
    if hello is not None and hello["ready"]:
        return process
    _end(process)
    if hello is not None:
        raise MissingExtra("math", f"Grading answers that are not plain numbers ({hello['error']})")
    raise RuntimeError("The math worker did not start. See why with: python -m ludic.envs.math_worker")


def _ask(process: "subprocess.Popen[str]", question: dict[str, Any] | None) -> dict[str, Any] | None:
    """The child's next line (after sending it a question, if there is one); None when the child is gone."""
    assert process.stdin is not None and process.stdout is not None, "the worker is started with both pipes"
    try:
        if question is not None:
            process.stdin.write(json.dumps(question) + "\n")
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


def main() -> None:
    """Answer questions until stdin ends."""
    replies, sys.stdout = sys.stdout, sys.stderr  # nothing that a library prints may pass for a reply

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    _prepare_process()
    signal.alarm(_START_S)
    try:
        is_same = _load()
    except ImportError as error:
        reply({"ready": False, "error": str(error)})
        return
    signal.alarm(0)
    reply({"ready": True})
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question["timeout_s"])
        try:
            verdict = is_same(question["answer"], question["gold"])
        except Exception:  # noqa: BLE001 - sympy raises whatever it likes at odd input; such an answer is wrong
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the reply, so that a late alarm cannot hit the next question
        reply({"equivalent": verdict})


def _prepare_process() -> None:
    # The alarm's default action ends the process, even inside one endless call into C; no handler could.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends us when it is done
    logging.disable(logging.CRITICAL)
    with contextlib.suppress(ImportError, OSError, ValueError):  # a platform without this limit does without
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))


def _load() -> Callable[[str, str], bool]:
    from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify

    # units=False: math-verify strips any trailing m, g, h, l, s, …, so that 3m would equal 3; we read units ourselves.
    normalization = LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    extraction = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normalization)]

    @lru_cache(maxsize=4096)  # parsing is the slow part, and the samples of a group share their reference
    def read(latex: str) -> Any:
        # Boxed and first_match: the whole text is the answer. Left to search, parse picks any part that it can read.
        return parse(
            rf"\boxed{{{latex}}}",
            extraction,
            fallback_mode="no_fallback",
            extraction_mode="first_match",
            parsing_timeout=None,  # the alarm of this process is the time limit
        )

    def is_same(answer: str, gold: str) -> bool:
        # x > 2 may stand for (2, ∞), but 1 < x < 2 not for (1, 2), which may be a point.
        gold_is_a_range = re.search(r"\\infty|\\in\b|\\cup|[][]", gold) is not None
        return bool(
            verify(
                read(gold),
                read(answer),
                float_rounding=10,  # decimals must agree to ten places; the default of six makes 0.333333 a third
                numeric_precision=30,
                allow_set_relation_comp=gold_is_a_range,
                timeout_seconds=None,
            )
        )

    return is_same


if __name__ == "__main__":
    main()
