"""Runs the tests of a stdin/stdout program in a sandbox; verifiers compare its output outside."""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

from ludic.types import ConfigError
from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus, Sandbox
from ludic_sandbox.code_exec.batch import BatchExecutionSpec, execute_batch
from ludic_sandbox.code_exec.cases import BatchTestResult, TestCase, TestResult, compute_hash, hash_tests
from ludic_sandbox.interface import explain_failure

_FIRST_CHUNK = 4
_CHUNK_GROWTH = 4


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a comparison."""

    passed: bool
    details: str | None = None
    """The first difference; None when the output is right."""


class OutputVerifier(Protocol):
    """Compares a program's output with the expected one."""

    def verify(self, actual: str, expected: str) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class ExactMatchVerifier:
    """Equal character by character."""

    strip: bool = True
    """Ignore white space at both ends."""
    case_sensitive: bool = True

    def verify(self, actual: str, expected: str) -> Verdict:
        if self.strip:
            actual, expected = actual.strip(), expected.strip()
        same = actual == expected if self.case_sensitive else actual.casefold() == expected.casefold()
        if same:
            return Verdict(True)
        difference = _first_difference("line", actual.split("\n"), expected.split("\n"))
        return Verdict(False, difference or "The output differs in case only.")


@dataclass(frozen=True, slots=True)
class WhitespaceNormalizedVerifier:
    """The same words in the same order; spaces and line breaks do not matter."""

    def verify(self, actual: str, expected: str) -> Verdict:
        difference = _first_difference("word", actual.split(), expected.split())
        return Verdict(difference is None, difference)


@dataclass(frozen=True, slots=True)
class FloatTolerantVerifier:
    """The same words in the same order; numbers may differ by the tolerances."""

    abs_tol: float = 1e-9
    rel_tol: float = 1e-9

    def verify(self, actual: str, expected: str) -> Verdict:
        difference = _first_difference("word", actual.split(), expected.split(), self._close)
        return Verdict(difference is None, difference)

    def _close(self, got: str, wanted: str) -> bool:
        if got == wanted:
            return True
        try:
            a, b = float(got), float(wanted)
        except ValueError:
            return False
        return math.isclose(a, b, rel_tol=self.rel_tol, abs_tol=self.abs_tol)


def _first_difference(
    unit: str, actual: list[str], expected: list[str], same: Callable[[str, str], bool] = operator.eq
) -> str | None:
    for number, (got, wanted) in enumerate(zip_longest(actual, expected), start=1):
        if got is None or wanted is None:
            return f"The output has {len(actual)} {unit}s, {len(expected)} are expected."
        if not same(got, wanted):
            return f"{unit.capitalize()} {number} is {_cut(got)!r}, {_cut(wanted)!r} is expected."
    return None


def _cut(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[:limit] + "…"


# --- runners ---


class CodeRunner(Protocol):
    """Runs a program's tests."""

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
        return [
            await sandbox.execute(
                code,
                stdin=test.input,
                skip_compile=not compile_first,
                timeout_s=test.timeout_s(self.default_timeout_s),
                memory_limit_mb=test.memory_limit_mb(self.memory_limit_mb),
            )
            for test in tests
        ]


def graded(test: TestCase, execution: ExecutionResult, verifier: OutputVerifier) -> TestResult:
    """The result of one run; a program that crashed has failed."""
    ran = execution.succeeded
    verdict = verifier.verify(execution.stdout, test.expected) if ran else Verdict(False, ended(execution))
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
    """All results in order. After an early stop, tests behind the first failure are NOT_RUN even if some ran: their number depends
    on how tests are grouped into runs."""
    kept = list(results)
    failed = next((i for i, result in enumerate(kept) if not result.passed), None)
    if stop_on_first_failure and failed is not None:
        kept = kept[: failed + 1]
    compiled = kept[-1].execution.compile_result if kept else CompileResult(status=CompileStatus.SUCCESS)
    not_run = ExecutionResult(compile_result=compiled, run_status=RunStatus.NOT_RUN)
    for test in tests[len(kept) :]:
        why = "An earlier test failed."
        kept.append(TestResult(test_case=test, passed=False, actual="", execution=not_run, comparison_details=why))
    return BatchTestResult(results=tuple(kept), code_hash=compute_hash(code), tests_hash=hash_tests(tests))


def ended(execution: ExecutionResult) -> str:
    return f"{explain_failure(execution)} {execution.detail}".strip()
