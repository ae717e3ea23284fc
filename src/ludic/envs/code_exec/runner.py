"""Runs the tests of a stdin/stdout program in a sandbox and compares its output outside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ludic.envs.code_exec.batch import BatchExecutionSpec, execute_batch
from ludic.envs.code_exec.cases import BatchTestResult, TestCase, TestResult, compute_hash, hash_tests
from ludic.envs.code_exec.verifiers import OutputVerifier
from ludic.sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic.types import ConfigError

_FIRST_CHUNK = 4
_CHUNK_GROWTH = 4
_COMPILED = CompileResult(status=CompileStatus.SUCCESS)


class CodeRunner(Protocol):
    """Knows how a program is given its tests."""

    async def run_tests(
        self,
        sandbox: Sandbox,
        code: str,
        tests: Sequence[TestCase],
        *,
        verifier: OutputVerifier,
        stop_on_first_failure: bool = False,
        compile_first: bool = True,
    ) -> BatchTestResult:
        """One result per test, in the order of the tests; those after an early stop are NOT_RUN."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class StdinStdoutRunner:
    """Each test is a fresh process of the program, with the test's input as its stdin."""

    default_timeout_s: float = 5.0
    """For a test that sets none."""
    memory_limit_mb: int = 256
    """For a test that sets none."""
    use_batch_execution: bool = True
    """Many tests per run of the sandbox, each in a forked process; without it, one run per test."""

    def __post_init__(self) -> None:
        if self.default_timeout_s <= 0 or self.memory_limit_mb <= 0:
            raise ConfigError(
                f"StdinStdoutRunner has default_timeout_s={self.default_timeout_s} and memory_limit_mb="
                f"{self.memory_limit_mb}; both must be above 0."
            )

    async def run_tests(
        self,
        sandbox: Sandbox,
        code: str,
        tests: Sequence[TestCase],
        *,
        verifier: OutputVerifier,
        stop_on_first_failure: bool = False,
        compile_first: bool = True,
    ) -> BatchTestResult:
        results: list[TestResult] = []
        for chunk in self._chunks(tests, stop_on_first_failure):
            executions = await self._executions(sandbox, code, chunk, stop_on_first_failure, compile_first)
            # Shorter than the chunk after an early stop; what is missing is added below.
            results += [graded(test, run, verifier) for test, run in zip(chunk, executions, strict=False)]
            if stop_on_first_failure and not all(result.passed for result in results):
                break
        return batch_result(code, tests, results, stop_on_first_failure=stop_on_first_failure)

    def _chunks(self, tests: Sequence[TestCase], stop_on_first_failure: bool) -> list[Sequence[TestCase]]:
        """Tests per run: all at once, or, with an early stop, few tests first and then more."""
        if not stop_on_first_failure:
            return [tests] if tests else []
        if not self.use_batch_execution:
            return [[test] for test in tests]
        chunks: list[Sequence[TestCase]] = []
        start, size = 0, _FIRST_CHUNK
        while start < len(tests):
            chunks.append(tests[start : start + size])
            start, size = start + size, size * _CHUNK_GROWTH
        return chunks

    async def _executions(
        self, sandbox: Sandbox, code: str, tests: Sequence[TestCase], stop_on_first_failure: bool, compile_first: bool
    ) -> list[ExecutionResult]:
        if self.use_batch_execution:
            spec = BatchExecutionSpec(
                code=code,
                tests=tests,
                compile_first=compile_first,
                timeout_s=self.default_timeout_s,
                stop_on_first_failure=stop_on_first_failure,
                memory_limit_mb=self.memory_limit_mb,
            )
            return [served.execution for served in await execute_batch(sandbox, spec)]
        return [await self._execute(sandbox, code, test, compile_first) for test in tests]

    async def _execute(self, sandbox: Sandbox, code: str, test: TestCase, compile_first: bool) -> ExecutionResult:
        return await sandbox.execute(
            code,
            stdin=test.input,
            skip_compile=not compile_first,
            timeout_s=test.timeout_s(self.default_timeout_s),
            memory_limit_mb=test.memory_limit_mb(self.memory_limit_mb),
        )


def graded(test: TestCase, execution: ExecutionResult, verifier: OutputVerifier) -> TestResult:
    """A program that crashed has not passed, whatever it wrote before."""
    if not execution.succeeded:
        return TestResult(
            test_case=test,
            passed=False,
            actual=execution.stdout,
            execution=execution,
            comparison_details=ended(execution),
        )
    verdict = verifier.verify(execution.stdout, test.expected)
    return TestResult(
        test_case=test,
        passed=verdict.passed,
        actual=execution.stdout,
        execution=execution,
        comparison_details=verdict.details,
    )


def batch_result(
    code: str, tests: Sequence[TestCase], results: Sequence[TestResult], *, stop_on_first_failure: bool
) -> BatchTestResult:
    """All results in order. After an early stop, tests behind the first failure are NOT_RUN, also if some were run:
    how many those are depends on how tests are grouped into runs, which must not show."""
    kept = list(results)
    failed = next((i for i, result in enumerate(kept) if not result.passed), None)
    if stop_on_first_failure and failed is not None:
        kept = kept[: failed + 1]
    compiled = kept[-1].execution.compile_result if kept else _COMPILED
    kept += [_not_run(test, compiled) for test in tests[len(kept) :]]
    return BatchTestResult(results=tuple(kept), code_hash=compute_hash(code), tests_hash=hash_tests(tests))


def _not_run(test: TestCase, compiled: CompileResult) -> TestResult:
    execution = ExecutionResult(compile_result=compiled, run_status=RunStatus.NOT_RUN)
    return TestResult(
        test_case=test, passed=False, actual="", execution=execution, comparison_details="An earlier test failed."
    )


def ended(execution: ExecutionResult) -> str:
    """How a program ended that did not end well, in words."""
    if not execution.compiled:
        problem = execution.compile_result
        where = f" in line {problem.error_line}" if problem.error_line is not None else ""
        return f"It does not compile: {problem.error_message or problem.status}{where}."
    words = {
        RunStatus.NOT_RUN: "It was not run.",
        RunStatus.SANDBOX_ERROR: "The sandbox failed.",
        RunStatus.MEMORY_EXCEEDED: "It ran out of memory.",
        RunStatus.TIMEOUT: "It ran out of time.",
        RunStatus.KILLED: f"It was ended by signal {execution.signal}." if execution.signal else "It was ended.",
        RunStatus.RUNTIME_ERROR: "It raised an error."
        if execution.exit_code is None
        else f"It ended with exit code {execution.exit_code}.",
    }
    text = words.get(execution.run_status, "")
    return f"{text} {execution.detail}".strip()
