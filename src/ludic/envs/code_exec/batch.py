"""Many tests of one program in one run of a sandbox: sends `inside/serve_tests.py` with the job, and reads its reports.

The reports come from inside the sandbox, so they are trusted only where forging them gains nothing. They hold
what the program answered, never a verdict: forging a pass needs the right answer. Each test must be
reported exactly once and in order, and the run must end cleanly; otherwise no report of that run counts.
"""

import json
import marshal
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from ludic.envs.code_exec.cases import TestCase
from ludic.sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox

MAX_OUTPUT = 1024 * 1024
"""Bytes that a program may write in one test."""
_MAX_REPORTS = 1024 * 1024
"""Bytes of reports after which the other tests go into another run. With one more report, in which JSON may write a
byte as six, they stay below the output limit of sandboxes (8 MiB)."""
_OVERHEAD_S = 10.0
_MAX_INPUTS = 4 * 1024 * 1024
"""Characters of input that go into one run."""
_HERE = Path(__file__).parent
_SAID_BEFORE = re.compile(r"^from (?:__future__|ludic\.envs\.code_exec\.plain_data) import .*$", re.MULTILINE)

Mode = Literal["stdin", "calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExecutionSpec:
    """One program, and the tests that it is to be run on."""

    code: str
    tests: Sequence[TestCase]
    compile_first: bool = True
    """Say so at once when it does not compile; without it, a syntax error is an error of every test."""
    timeout_s: float = 5.0
    """For a test that sets none."""
    stop_on_first_failure: bool = True
    """Run no other test after one that crashed or ran out of time."""
    memory_limit_mb: int = 256
    """For a test that sets none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What is asked of the program in one test."""

    timeout_s: float
    memory_limit_mb: int
    stdin: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """(function, arguments as plain data)."""

    def to_job(self) -> dict[str, Any]:
        return {
            "stdin": self.stdin,
            "calls": [(function, json.loads(arguments)) for function, arguments in self.calls],
            "timeout_s": self.timeout_s,
            "memory_mb": self.memory_limit_mb,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What came of one task."""

    execution: ExecutionResult
    answers: str | None = None
    """For calls: a JSON list of what each gave, as the program sent it."""


@dataclass(kw_only=True, slots=True)
class _Run:
    """The reports of one run."""

    compile_result: CompileResult
    served: list[Served] = field(default_factory=list)


async def execute_batch(sandbox: Sandbox, spec: BatchExecutionSpec) -> list[Served]:
    """Run a program on the stdin of each test. Shorter than the tests where it stopped early."""
    tasks = [
        Task(
            stdin=test.input,
            timeout_s=test.timeout_s(spec.timeout_s),
            memory_limit_mb=test.memory_limit_mb(spec.memory_limit_mb),
        )
        for test in spec.tests
    ]
    served = await serve(sandbox, "stdin", spec.code, tasks, stop_on_failure=spec.stop_on_first_failure)
    return served if spec.compile_first else [_as_run(one) for one in served]


def _as_run(served: Served) -> Served:
    """A program that does not compile, as one that was started and failed at once."""
    problem = served.execution.compile_result
    if problem.success:
        return served
    execution = ExecutionResult(
        compile_result=CompileResult(status=CompileStatus.SUCCESS),
        run_status=RunStatus.RUNTIME_ERROR,
        stderr=f"SyntaxError: {problem.error_message} (line {problem.error_line})\n",
        exit_code=1,
    )
    return Served(execution=execution)


async def serve(
    sandbox: Sandbox, mode: Mode, code: str, tasks: Sequence[Task], *, stop_on_failure: bool
) -> list[Served]:
    """What the program made of each task, in order. Shorter than the tasks where it stopped at a failure."""
    served: list[Served] = []
    while len(served) < len(tasks):
        rest = _fitting(tasks[len(served) :])
        run = await _one_run(sandbox, mode, code, rest, stop_on_failure=stop_on_failure)
        served += run.served
        is_over = not run.compile_result.success or not run.served
        if is_over or (stop_on_failure and run.served[-1].execution.run_status is not RunStatus.SUCCESS):
            break
    return served


def _fitting(tasks: Sequence[Task]) -> Sequence[Task]:
    """The first ones whose inputs together leave the harness, and so every test, its memory."""
    sizes = accumulate(len(task.stdin) + sum(len(call) for _, call in task.calls) for task in tasks)
    return tasks[: max(1, sum(size <= _MAX_INPUTS for size in sizes))]


async def _one_run(sandbox: Sandbox, mode: Mode, code: str, tasks: Sequence[Task], *, stop_on_failure: bool) -> _Run:
    job = {
        "mode": mode,
        "code": code,
        "tests": [task.to_job() for task in tasks],
        "stop_on_failure": stop_on_failure,
        "max_output": MAX_OUTPUT,
        "max_reports": _MAX_REPORTS,
    }
    result = await sandbox.execute(
        program("serve_tests", sandbox.python_version),
        stdin=ascii(job),
        skip_compile=True,
        timeout_s=sum(task.timeout_s for task in tasks) + _OVERHEAD_S,
        memory_limit_mb=max(task.memory_limit_mb for task in tasks),
    )
    if result.run_status is not RunStatus.SUCCESS:
        return _void(result, len(tasks))
    try:
        return _read(result, len(tasks))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        detail = f"The reports of the run were tampered with ({type(error).__name__}: {error})."
        return _void(result, len(tasks), RunStatus.KILLED, detail)


@lru_cache
def program(name: str, python_version: str) -> str:
    """The text of a program in `inside/`, after the text of plain_data, which it uses."""
    shared = (_HERE / "plain_data.py").read_text(encoding="utf-8")
    text = (_HERE / "inside" / f"{name}.py").read_text(encoding="utf-8")
    source = f"{shared}\n\n{_SAID_BEFORE.sub('', text)}"
    if python_version != "{}.{}".format(*sys.version_info):
        return source
    # Compiling takes as long as a whole run. The same Python as ours can do without.
    return f"import marshal\nexec(marshal.loads({marshal.dumps(compile(source, f'{name}.py', 'exec'))!r}))\n"


def _void(result: ExecutionResult, num_tasks: int, status: RunStatus | None = None, detail: str = "") -> _Run:
    """Nothing that the run reported counts; it ended in the same way for every task."""
    compiled = CompileResult(status=CompileStatus.SUCCESS)
    execution = ExecutionResult(
        compile_result=compiled,
        run_status=status or result.run_status,
        stderr=result.stderr,
        signal=result.signal,
        total_duration_ms=result.total_duration_ms / num_tasks,
        detail=detail or result.detail or "The program ended the whole run, and with it all of its tests.",
    )
    return _Run(compile_result=compiled, served=[Served(execution=execution)] * num_tasks)


def _read(result: ExecutionResult, num_tasks: int) -> _Run:
    first, *lines = [json.loads(line) for line in result.stdout.split("\n") if line]
    compile_result = _compile_result(first)
    if not compile_result.success:
        failed = ExecutionResult(compile_result=compile_result, compile_duration_ms=compile_result.duration_ms)
        return _Run(compile_result=compile_result, served=[Served(execution=failed)] * num_tasks)
    *reports, last = lines
    if last != {"done": True} or len(reports) > num_tasks:
        raise ValueError(f"{len(reports)} reports for {num_tasks} tests, ending with {str(last)[:80]}")
    served = []
    for number, told in enumerate(reports):
        if told["test"] != number:
            raise ValueError(f"report {number} is about test {told['test']}")
        served.append(Served(execution=_execution(told, compile_result), answers=told.get("answers")))
    return _Run(compile_result=compile_result, served=served)


def _compile_result(line: Mapping[str, Any]) -> CompileResult:
    problem, ms = line["compile"], float(line["ms"])
    if problem is None:
        return CompileResult(status=CompileStatus.SUCCESS, duration_ms=ms)
    return CompileResult(
        status=CompileStatus(problem["status"]),
        error_message=str(problem["message"]),
        error_line=problem["line"],
        error_column=problem["column"],
        duration_ms=ms,
    )


def _execution(told: Mapping[str, Any], compile_result: CompileResult) -> ExecutionResult:
    peak_kb, ms = told.get("peak_kb"), float(told["ms"])
    return ExecutionResult(
        compile_result=compile_result,
        run_status=RunStatus(told["status"]),
        stdout=str(told["stdout"]),
        stderr=str(told["stderr"]),
        exit_code=told["exit_code"],
        signal=told["signal"],
        compile_duration_ms=compile_result.duration_ms,
        run_duration_ms=ms,
        total_duration_ms=ms,
        peak_memory_bytes=None if peak_kb is None else int(peak_kb) * 1024,
        cpu_time_ms=told.get("cpu_ms"),
        detail=str(told.get("detail", "")),
    )
