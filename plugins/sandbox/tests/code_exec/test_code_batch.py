"""Reports from inside are believed only if they are whole."""

import json
from dataclasses import dataclass

import pytest

from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic_sandbox.code_exec import BatchExecutionSpec, ExactMatchVerifier, StdinStdoutRunner, TestCase
from ludic_sandbox.code_exec.batch import execute_batch, program

COMPILED = {"compile": None, "ms": 1.0}
DONE = {"done": True}
TESTS = [TestCase("1", "2", id="a"), TestCase("2", "4", id="b")]


def report(number: int, stdout: str = "2", status: str = "success") -> dict:
    return {"test": number, "status": status, "stdout": stdout, "stderr": "", "exit_code": 0, "signal": None, "ms": 3.0}


@dataclass
class Sandbox:
    """Answers each run with the next list of lines; a text is a line that is no JSON."""

    replies: list
    run_status: RunStatus = RunStatus.SUCCESS
    python_version: str = "3.11"

    def __post_init__(self) -> None:
        self.runs: list[dict] = []

    async def execute(self, code, *, stdin="", timeout_s=10.0, memory_limit_mb=None, **settings):
        self.runs.append({"stdin": stdin, "timeout_s": timeout_s, "memory_limit_mb": memory_limit_mb})
        lines = self.replies.pop(0)
        text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
        compiled = CompileResult(status=CompileStatus.SUCCESS)
        return ExecutionResult(compile_result=compiled, run_status=self.run_status, stdout=text, detail="why")


async def served(sandbox: Sandbox, **settings):
    spec = BatchExecutionSpec(code="print(1)", tests=TESTS, **settings)
    return [one.execution for one in await execute_batch(sandbox, spec)]


async def test_whole_reports_become_results_in_order():
    one, two = await served(Sandbox([[COMPILED, report(0), report(1, "4"), DONE]]))
    assert (one.stdout, two.stdout) == ("2", "4") and one.run_duration_ms == 3.0 and two.succeeded


@pytest.mark.parametrize(
    "lines",
    [
        [COMPILED, report(0), report(0), report(1), DONE],
        [COMPILED, report(1), report(0), DONE],
        [COMPILED, report(0), report(1)],
        [COMPILED, report(0), DONE, report(1), DONE],
        [COMPILED, report(0), "not json", DONE],
        [COMPILED, report(0, status="passed"), report(1), DONE],
        [COMPILED, {"test": 0}, report(1), DONE],
        [COMPILED],
        [],
        ["[" * 100_000],
    ],
    ids=[
        "twice",
        "out of order",
        "no end",
        "after the end",
        "garbage",
        "no status",
        "no facts",
        "nothing",
        "empty",
        "deep",
    ],
)
async def test_forged_reports_void_the_run(lines):
    results = await served(Sandbox([lines]))
    assert [result.run_status for result in results] == [RunStatus.KILLED] * 2
    assert "tampered" in results[0].detail


@pytest.mark.parametrize(
    "status", [RunStatus.KILLED, RunStatus.TIMEOUT, RunStatus.SANDBOX_ERROR, RunStatus.RUNTIME_ERROR]
)
async def test_reports_of_a_failed_run_do_not_count(status):
    results = await served(Sandbox([[COMPILED, report(0), report(1, "4"), DONE]], run_status=status))
    assert [result.run_status for result in results] == [status] * 2


async def test_tests_beyond_the_report_limit_go_into_another_run():
    sandbox = Sandbox([[COMPILED, report(0), DONE], [COMPILED, report(0, "4"), DONE]])
    results = await served(sandbox, stop_on_first_failure=False)
    assert [result.stdout for result in results] == ["2", "4"] and len(sandbox.runs) == 2


async def test_the_outer_limits_leave_room_for_every_test_and_the_job_holds_no_expected_output():
    sandbox = Sandbox([[COMPILED, report(0), report(1, "4"), DONE]])
    tests = [
        TestCase("in-1", "secret-1", metadata={"timeout_s": 7, "memory_limit_mb": 100}),
        TestCase("in-2", "secret-2"),
    ]
    await execute_batch(sandbox, BatchExecutionSpec(code="x", tests=tests, timeout_s=2.0, memory_limit_mb=50))
    (run,) = sandbox.runs
    assert run["timeout_s"] > 9.0 and run["memory_limit_mb"] == 100
    assert "in-1" in run["stdin"] and "in-2" in run["stdin"] and "secret" not in run["stdin"]


async def test_tests_are_run_in_growing_chunks_where_the_first_failure_ends_it():
    tests = [TestCase(str(n), "2", id=str(n)) for n in range(30)]
    chunks = [[COMPILED, *(report(n) for n in range(size)), DONE] for size in (4, 16)]
    chunks[1][3] = report(2, "wrong")
    sandbox = Sandbox(chunks)
    result = await StdinStdoutRunner().run_tests(
        sandbox, "x", tests, verifier=ExactMatchVerifier(), stop_on_first_failure=True
    )
    assert len(sandbox.runs) == 2 and result.passed_count == 6 and result.total_count == 30
    assert {str(each.execution.run_status) for each in result.results[7:]} == {"not_run"}


def test_the_text_of_a_program_is_the_same_as_source_and_compiled():
    import marshal
    import re
    import sys

    here = "{}.{}".format(*sys.version_info)
    source, short = program("serve_tests", "2.7"), program("serve_tests", here)
    assert len(short.splitlines()) == 2 and re.match(r"import marshal\nexec\(marshal", short)
    names: dict = {"__name__": "elsewhere"}
    exec(short, names)
    assert "def serve_calls" in source and callable(names["serve_calls"]) and marshal
