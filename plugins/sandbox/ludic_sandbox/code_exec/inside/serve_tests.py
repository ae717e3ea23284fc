"""Inside the sandbox: runs a candidate program on its tests, and reports its output or answers.

The job comes on stdin as a literal, a JSON report per line goes to stdout. This process never runs a line of the candidate: it
compiles it, and forks children that run it, each within the time and memory of its test. It knows the tests' inputs and not the
expected outputs, so a candidate that breaks out into it finds no answers. It is closed to the children (not dumpable: no
/proc/<pid>/fd, no /proc/<pid>/mem, no ptrace); one that ends it voids the whole run.

Two kinds of tests. `stdin`: the candidate is a program, run once per test. `calls`: it defines functions; one child calls them test
after test, and a new child goes on after one that died.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import sys
import time

# `batch` puts the text of that file before this one.
from ludic_sandbox.code_exec.plain_data import decode, encode, from_literal, to_json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

    Json = dict[str, Any]

SIGKILL, SIGXCPU = 9, 24  # the module `signal` would take a while to import
PR_SET_DUMPABLE = 4
ANSWERS, GO_ON = 100, 101  # descriptors of a child that is called
_CHUNK = 65536
_TICK_S = 0.05  # between two looks whether a child has ended whose own children hold its pipes open
_MAX_STDERR = 20_000


class _Child:
    """A forked candidate, its pipes and its output."""

    def __init__(self, run: Callable[[], None], stdin: bytes | None, memory_mb: int, max_output: int) -> None:
        """Without `stdin`, a byte in that pipe tells the child to continue."""
        self.max_output = max_output
        self.out, self.err, self.answers = bytearray(), bytearray(), bytearray()
        self._stdin = memoryview(stdin or b"")
        pipes = [os.pipe() for _ in range(4)]
        (in_r, in_w), (out_r, out_w), (err_r, err_w), (ans_r, ans_w) = pipes
        self.started = time.monotonic()
        self.pid = os.fork()
        if self.pid == 0:
            _become_candidate(run, in_r, out_w, err_w, ans_w, memory_mb, waits_for_go=stdin is None)
        for fd in (in_r, out_w, err_w, ans_w):
            os.close(fd)
        for fd in (in_w, out_r, err_r, ans_r):
            os.set_blocking(fd, False)
        self._poll = select.poll()
        self._readers = {out_r: self.out, err_r: self.err, ans_r: self.answers}
        self._in_w = in_w
        for fd in self._readers:
            self._poll.register(fd, select.POLLIN)
        if self._stdin:
            self._poll.register(in_w, select.POLLOUT)
        elif stdin is not None:
            self._close_stdin()
        self.status: int | None = None  # of waitpid, once it has ended
        self.usage: resource.struct_rusage | None = None

    def wait(self, deadline: float, is_done: Callable[[], bool]) -> str:
        """Serve the pipes until `is_done()`, the child's end or a limit; returns "done", "ended", "timeout" or "output"."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:  # first: a child might suspend this process, take its time, and resume it
                return "timeout"
            if is_done():
                return "done"
            if len(self.out) > self.max_output or len(self.answers) > self.max_output:
                return "output"
            served = self._serve(min(left, _TICK_S))
            if not self._readers or (not served and self._has_ended()):
                self._reap(deadline)
                self.drain()  # it may have written between the poll and its end
                return "done" if is_done() else "ended" if self.status is not None else "timeout"

    def go_on(self) -> None:
        try:
            os.write(self._in_w, b".")
        except OSError:
            return  # it has ended, which `wait` notices

    def _serve(self, timeout_s: float) -> bool:
        events = self._poll.poll(timeout_s * 1000)
        for fd, _ in events:
            if fd == self._in_w:
                self._feed()
            else:
                self._read(fd)
        return bool(events)

    def _feed(self) -> None:
        try:
            self._stdin = self._stdin[os.write(self._in_w, self._stdin[:_CHUNK]) :]
        except BlockingIOError:
            return
        except OSError:  # the candidate does not read its input
            self._stdin = self._stdin[:0]
        if not self._stdin:
            self._poll.unregister(self._in_w)
            self._close_stdin()

    def _close_stdin(self) -> None:
        os.close(self._in_w)
        self._in_w = -1

    def _read(self, fd: int) -> None:
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return
        buffer = self._readers[fd]
        if not data:
            self._poll.unregister(fd)
            os.close(fd)
            del self._readers[fd]
        else:
            buffer += data
            if buffer is self.err and len(buffer) > 2 * _MAX_STDERR:
                del buffer[:-_MAX_STDERR]  # the end of a traceback explains most

    def _has_ended(self) -> bool:
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status, self.usage = status, usage
        return self.status is not None

    def _reap(self, deadline: float) -> None:
        """Wait for its end; it may close its pipes and keep running."""
        while not self._has_ended() and time.monotonic() < deadline:
            time.sleep(0.001)

    def drain(self) -> None:
        """Read what the pipes hold."""
        for _ in range(32):  # a pipe holds 1 MiB at most; its own children may keep writing
            if not self._readers or not self._serve(0) or max(len(self.out), len(self.answers)) > self.max_output:
                return

    def end(self) -> None:
        """Kill its process group, and close everything."""
        for kill in (os.killpg, os.kill):  # it may not have a group yet
            try:
                if kill is os.killpg or self.status is None:
                    kill(self.pid, SIGKILL)
            except ProcessLookupError:
                continue
        if self.status is None:
            _, self.status, self.usage = os.wait4(self.pid, 0)
        for fd in list(self._readers):
            os.close(fd)
        self._readers.clear()
        if self._in_w >= 0:
            self._close_stdin()


def main() -> None:
    _set_dumpable(False)
    job = from_literal(sys.stdin.read())
    code = compiled(job["code"])
    if code is None:
        return
    serve = _serve_stdin if job["mode"] == "stdin" else serve_calls
    serve(code, job["tests"], job)
    report({"done": True})


def _set_dumpable(flag: bool) -> None:
    """Allow or forbid other processes of the user to inspect this one."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, int(flag), 0, 0, 0)


def compiled(source: str) -> CodeType | None:
    started = time.perf_counter()
    problem = code = None
    try:
        code = compile(source, "solution.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        problem = {"status": "syntax_error", "message": error.msg, "line": error.lineno, "column": error.offset}
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:
        # ValueError: a null byte or a lone surrogate
        kind = "syntax_error" if isinstance(error, ValueError) else "unknown_error"
        problem = {"status": kind, "message": type(error).__name__ + ": " + str(error), "line": None, "column": None}
    report({"compile": problem, "ms": (time.perf_counter() - started) * 1000})
    return code


_num_reported = 0  # bytes


def report(line: Json) -> None:
    global _num_reported
    _num_reported += write_line(1, line)


def write_line(fd: int, content: Any) -> int:
    data = (to_json(content) + "\n").encode("ascii")
    size = len(data)
    while data:
        data = data[os.write(fd, data) :]
    return size


# --- programs that read stdin ---


def _serve_stdin(code: CodeType, tests: list[Json], job: Json) -> None:
    for number, test in enumerate(tests):
        child = _Child(
            lambda: _run_as("__main__", code),
            test["stdin"].encode("utf-8", "surrogateescape"),
            test["memory_mb"],
            job["max_output"],
        )
        why = child.wait(child.started + test["timeout_s"], lambda: False)
        child.end()
        facts = _report_of(child, why)
        report({"test": number, **facts})
        if _num_reported > job["max_reports"] or (job["stop_on_failure"] and facts["status"] != "success"):
            return


def _run_as(name: str, code: CodeType) -> Any:
    """Run the program as a new module of this name, and return the module."""
    module = sys.modules[name] = type(sys)(name)
    module.__dict__["__builtins__"] = __builtins__
    exec(code, module.__dict__)
    return module


# --- functions that are called ---


def serve_calls(code: CodeType, tests: list[Json], job: Json) -> None:
    following: int | None = 0
    while following is not None and following < len(tests):
        following = _serve_some_calls(code, tests, following, job)


def _serve_some_calls(code: CodeType, tests: list[Json], first: int, job: Json) -> int | None:
    """Run one child until it dies or the memory limit changes; returns the number of the next test, None to stop."""
    memory_mb = tests[first]["memory_mb"]
    child = _Child(lambda: _answer_calls(code, tests[first:]), None, memory_mb, job["max_output"])
    try:
        since = child.started
        why = child.wait(since + tests[first]["timeout_s"], lambda: child.answers.startswith(b"ready\n"))
        if why != "done":
            child.end()
            failed = unanswered(child, why)  # it failed before its functions were defined, as it always would
            for number in range(first, len(tests)):
                report({"test": number, **failed})
            return None
        del child.answers[: len(b"ready\n")]
        for number in range(first, len(tests)):
            if tests[number]["memory_mb"] != memory_mb:
                return number
            child.go_on()
            why = child.wait(since + tests[number]["timeout_s"], lambda: b"\n" in child.answers)
            if why != "done":
                child.end()
                report({"test": number, **unanswered(child, why, since)})
                return None if job["stop_on_failure"] else number + 1
            _report_answers(number, child, since)
            if _num_reported > job["max_reports"]:
                return None
            since = time.monotonic()
        return len(tests)
    finally:
        child.end()


def unanswered(child: _Child, why: str, since: float | None = None) -> Json:
    facts = _report_of(child, why, since)
    if facts["status"] == "success":
        facts.update(status="runtime_error", detail="It ended before it answered.")
    return facts


def _report_answers(number: int, child: _Child, since: float) -> None:
    line, _, rest = bytes(child.answers).partition(b"\n")
    child.answers[:] = rest
    child.drain()  # its output comes before its answer
    facts = _report_of(child, None, since)
    child.out.clear()
    child.err.clear()
    report({"test": number, **facts, "answers": line.decode("ascii", "replace")})


def _answer_calls(code: CodeType, tests: list[Json]) -> None:
    """The child's side. It waits before each test, so that output and time belong to that test."""
    module = _run_as("candidate", code)
    os.write(ANSWERS, b"ready\n")
    for test in tests:
        if not os.read(GO_ON, 1):
            return
        answers = []
        for function, arguments in test["calls"]:
            answers.append(_answer_call(module, function, arguments))
            if "error" in answers[-1]:
                break
        sys.stdout.flush()
        write_line(ANSWERS, answers)


def _answer_call(module: Any, function: str, arguments: Any) -> Json:
    args, kwargs = decode(arguments)
    try:
        if function not in module.__dict__:
            raise NameError(f"name {function!r} is not defined")
        return {"value": encode(module.__dict__[function](*args, **kwargs))}
    except BaseException as error:  # noqa: BLE001 - any exception, exits included, is its answer
        _print_error(error)
        return {"error": said(error), "type": type(error).__name__}


def said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - an exception whose __str__ raises
        text = ""
    return (type(error).__name__ + ": " + text)[:1000] if text else type(error).__name__


# --- becoming the candidate ---


def _become_candidate(
    run: Callable[[], None], stdin: int, stdout: int, stderr: int, answers: int, memory_mb: int, waits_for_go: bool
) -> None:
    """In the child: never returns."""
    exit_code = 1
    try:
        os.setsid()
        _set_dumpable(True)  # /dev/stdin is a link to /proc/self/fd/0
        os.dup2(answers, ANSWERS, inheritable=False)
        if waits_for_go:
            os.dup2(stdin, GO_ON, inheritable=False)
            stdin = os.open(os.devnull, os.O_RDONLY)
        for target, fd in enumerate((stdin, stdout, stderr)):
            os.dup2(fd, target)
        os.closerange(3, ANSWERS)
        os.closerange(GO_ON + waits_for_go, 256)
        limit = memory_mb * 1024 * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        _renew_streams()
        sys.argv = ["solution.py"]
        exit_code = _run_to_the_end(run)
    finally:
        os._exit(exit_code)


def _renew_streams() -> None:
    """Replace the parent's streams, which have been read from and belong to other pipes."""
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _run_to_the_end(run: Callable[[], None]) -> int:
    """Like the interpreter: run, wait for threads, call atexit functions, flush; returns the exit code."""
    code = 0
    try:
        run()
    except SystemExit as error:
        code = _exit_code(error.code)
    except BaseException as error:  # noqa: BLE001 - this is the bottom of the candidate's stack
        _print_error(error)
        code = 1
    if "threading" in sys.modules:
        sys.modules["threading"]._shutdown()
    if "atexit" in sys.modules:
        sys.modules["atexit"]._run_exitfuncs()
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        code = code or 120
    return code


def _exit_code(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _print_error(error: BaseException) -> None:
    """Its traceback without the frames of this file."""
    if isinstance(error, MemoryError):
        os.write(2, b"MemoryError\n")  # there may be no memory left for more
        return
    try:
        import traceback

        frames = error.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename != "solution.py":
            frames = frames.tb_next
        traceback.print_exception(type(error), error, frames)
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - the candidate may have broken anything that printing needs
        os.write(2, (type(error).__name__ + "\n").encode("utf-8", "replace"))


# --- reports of a child ---


def _report_of(child: _Child, why: str | None, since: float | None = None) -> Json:
    """`why` is that of `_Child.wait`; None for a child that answered and goes on."""
    stderr = bytes(child.err[-_MAX_STDERR:]).decode("utf-8", "replace")
    facts = {
        "stdout": bytes(child.out[: child.max_output]).decode("utf-8", "replace"),
        "stderr": stderr,
        "ms": (time.monotonic() - (child.started if since is None else since)) * 1000,
    }
    if child.usage is not None:
        facts["peak_kb"] = child.usage.ru_maxrss
        facts["cpu_ms"] = (child.usage.ru_utime + child.usage.ru_stime) * 1000
    return {**facts, **how_it_ended(child, why, stderr)}


def how_it_ended(child: _Child, why: str | None, stderr: str) -> Json:
    if why is None:
        return {"status": "success", "exit_code": None, "signal": None}
    if why == "timeout":
        return {"status": "timeout", "exit_code": None, "signal": SIGKILL}
    if why == "output":
        return {"status": "killed", "exit_code": None, "signal": SIGKILL, "detail": "It wrote too much."}
    assert child.status is not None, "it has been waited for"
    if os.WIFSIGNALED(child.status):
        number = os.WTERMSIG(child.status)
        status = "timeout" if number == SIGXCPU else "killed"
        return {"status": status, "exit_code": None, "signal": number}
    code = os.WEXITSTATUS(child.status)
    if code == 0:
        return {"status": "success", "exit_code": 0, "signal": None}
    ran_out = stderr.rstrip().rpartition("\n")[2].startswith("MemoryError")
    return {"status": "memory_exceeded" if ran_out else "runtime_error", "exit_code": code, "signal": None}


if __name__ == "__main__":
    main()
