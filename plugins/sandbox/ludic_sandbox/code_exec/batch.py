"""Many tests of one program in one run of a sandbox: sends `inside/serve_tests.py` with the job, and reads its reports.

The reports come from inside the sandbox and may be forged. They hold the program's answers, never a verdict, so forging a pass
needs the right answer. Each test must be reported exactly once and in order, and the run must end cleanly; otherwise no report of
the run counts.
"""

import marshal
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from ludic.util.files import parse_json
from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic_sandbox.code_exec.cases import TestCase

MAX_OUTPUT = 1024 * 1024
"""Bytes that a program may write in one test."""
_MAX_REPORTS = 1024 * 1024
"""Bytes of reports after which the other tests go into another run. With one more report, in which JSON may write a byte as six,
they stay below the output limit of sandboxes (8 MiB)."""
_OVERHEAD_S = 10.0
_MAX_INPUTS = 4 * 1024 * 1024
"""Characters of input that go into one run."""
_HERE = Path(__file__).parent
_IMPORTS = re.compile(r"^from (?:__future__|ludic_sandbox\.code_exec\.plain_data) import .*$", re.MULTILINE)

Mode = Literal["stdin", "calls"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchExecutionSpec:
    """One program and its tests."""

    code: str
    tests: Sequence[TestCase]
    compile_first: bool = True
    """Report that it does not compile; without it, a syntax error is an error of every test."""
    timeout_s: float = 5.0
    """For a test that sets none."""
    stop_on_first_failure: bool = True
    """Run no tests after one that crashed or ran out of time."""
    memory_limit_mb: int = 256
    """For a test that sets none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One test, as the program gets it."""

    timeout_s: float
    memory_limit_mb: int
    stdin: str = ""
    calls: Sequence[tuple[str, str]] = ()
    """(function, arguments as plain data)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """The result of one task."""

    execution: ExecutionResult
    answers: str | None = None
    """For calls: a JSON list with the answer to each, as the program sent it."""


async def execute_batch(sandbox: Sandbox, spec: BatchExecutionSpec) -> list[Served]:
    """Run a program on the stdin of each test; shorter than the tests after an early stop."""
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
    """A program that does not compile, as one that started and failed."""
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
    """The result of each task, in order; shorter than the tasks after a stop at a failure."""
    served: list[Served] = []
    while len(served) < len(tasks):
        run = await _one_run(sandbox, mode, code, _fitting(tasks[len(served) :]), stop_on_failure=stop_on_failure)
        served += run
        if not run or not run[-1].execution.compiled or (stop_on_failure and not run[-1].execution.succeeded):
            break
    return served


def _fitting(tasks: Sequence[Task]) -> Sequence[Task]:
    """The first tasks whose inputs together leave the runner, and so every test, enough memory."""
    sizes = accumulate(len(task.stdin) + sum(len(call) for _, call in task.calls) for task in tasks)
    return tasks[: max(1, sum(size <= _MAX_INPUTS for size in sizes))]


async def _one_run(
    sandbox: Sandbox, mode: Mode, code: str, tasks: Sequence[Task], *, stop_on_failure: bool
) -> list[Served]:
    job = {
        "mode": mode,
        "code": code,
        "tests": [
            {
                "stdin": task.stdin,
                "calls": [(function, parse_json(arguments)) for function, arguments in task.calls],
                "timeout_s": task.timeout_s,
                "memory_mb": task.memory_limit_mb,
            }
            for task in tasks
        ],
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
        return _void(replace(result, run_status=RunStatus.KILLED, detail=detail), len(tasks))


@lru_cache
def program(name: str, python_version: str) -> str:
    """The source of plain_data followed by that of a program in `inside/`, which uses it."""
    shared = (_HERE / "plain_data.py").read_text(encoding="utf-8")
    text = (_HERE / "inside" / f"{name}.py").read_text(encoding="utf-8")
    source = f"{shared}\n\n{_IMPORTS.sub('', text)}"
    if python_version != "{}.{}".format(*sys.version_info):
        return source
    # Compiling takes as long as a whole run; for the same version of Python it is done here.
    return f"import marshal\nexec(marshal.loads({marshal.dumps(compile(source, f'{name}.py', 'exec'))!r}))\n"


def _void(result: ExecutionResult, num_tasks: int) -> list[Served]:
    """No report of the run counts; every task gets the way in which the run ended."""
    execution = ExecutionResult(
        compile_result=CompileResult(status=CompileStatus.SUCCESS),
        run_status=result.run_status,
        stderr=result.stderr,
        signal=result.signal,
        total_duration_ms=result.total_duration_ms / num_tasks,
        detail=result.detail or "The program ended the whole run, and with it all of its tests.",
    )
    return [Served(execution=execution)] * num_tasks


def _read(result: ExecutionResult, num_tasks: int) -> list[Served]:
    first, *lines = [parse_json(line) for line in result.stdout.split("\n") if line]
    compiled = _compile_result(first)
    if not compiled.success:
        failed = ExecutionResult(compile_result=compiled, compile_duration_ms=compiled.duration_ms)
        return [Served(execution=failed)] * num_tasks
    *reports, last = lines
    if last != {"done": True} or len(reports) > num_tasks:
        raise ValueError(f"{len(reports)} reports for {num_tasks} tests, ending with {str(last)[:80]}")
    for number, report in enumerate(reports):
        if report["test"] != number:
            raise ValueError(f"report {number} is about test {report['test']}")
    return [Served(execution=_execution(report, compiled), answers=report.get("answers")) for report in reports]


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


def _execution(report: Mapping[str, Any], compile_result: CompileResult) -> ExecutionResult:
    peak_kb, ms = report.get("peak_kb"), float(report["ms"])
    return ExecutionResult(
        compile_result=compile_result,
        run_status=RunStatus(report["status"]),
        stdout=str(report["stdout"]),
        stderr=str(report["stderr"]),
        exit_code=report["exit_code"],
        signal=report["signal"],
        compile_duration_ms=compile_result.duration_ms,
        run_duration_ms=ms,
        total_duration_ms=ms,
        peak_memory_bytes=None if peak_kb is None else int(peak_kb) * 1024,
        cpu_time_ms=report.get("cpu_ms"),
        detail=str(report.get("detail", "")),
    )
