"""Test cases of a programming problem and their results. Pure data."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ludic.sandbox import CompileResult, ExecutionResult
from ludic.types import ConfigError


@dataclass(frozen=True, slots=True)
class TestCase:
    """One test: what a program is given, and what it should make of it."""

    __test__: ClassVar[bool] = False  # pytest collects classes by their name

    input: str
    """What enters the sandbox: the program's stdin, or the calls that a test makes."""
    expected: str
    """What never enters it: the right output, or the assertion about what the calls return."""
    id: str = ""
    weight: float = 1.0
    """Its share in the pass rate, relative to the other tests."""
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """`timeout_s` and `memory_limit_mb` here override the runner's for this test."""

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise ConfigError(f"Test {self.id!r} has weight={self.weight}; a weight is at least 0.")
        for limit in ("timeout_s", "memory_limit_mb"):
            value = self.metadata.get(limit)
            if value is not None and not (isinstance(value, int | float) and value > 0):
                raise ConfigError(f"Test {self.id!r} has {limit}={value!r} in its metadata; use a number above 0.")

    def timeout_s(self, default: float) -> float:
        return float(self.metadata.get("timeout_s", default))

    def memory_limit_mb(self, default: int) -> int:
        return int(self.metadata.get("memory_limit_mb", default))


@dataclass(frozen=True, kw_only=True, slots=True)
class TestResult:
    """What came of one test."""

    __test__: ClassVar[bool] = False

    test_case: TestCase
    passed: bool
    actual: str
    """What the program answered, as text."""
    execution: ExecutionResult
    comparison_details: str | None = None
    """Why it did not pass, for people and for agents that try again."""

    @property
    def compiled(self) -> bool:
        return self.execution.compiled

    @property
    def ran(self) -> bool:
        """It ran to its end, whatever it answered."""
        return self.execution.succeeded


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTestResult:
    """What came of all tests of one program; in the order of the tests."""

    results: Sequence[TestResult]
    code_hash: str = ""
    tests_hash: str = ""

    @property
    def passed_count(self) -> int:
        return sum(result.passed for result in self.results)

    @property
    def total_count(self) -> int:
        return len(self.results)

    @property
    def all_passed(self) -> bool:
        """False without any tests: nothing was shown."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def pass_rate(self) -> float:
        """Weight of the passed tests over the weight of all; a test that was not run is not passed."""
        total = sum(result.test_case.weight for result in self.results)
        return sum(result.test_case.weight for result in self.results if result.passed) / total if total else 0.0

    @property
    def first_failure(self) -> TestResult | None:
        return next((result for result in self.results if not result.passed), None)

    @property
    def compile_failed(self) -> bool:
        return any(not result.compiled for result in self.results)

    @property
    def compile_result(self) -> CompileResult | None:
        return self.results[0].execution.compile_result if self.results else None

    @property
    def total_execution_ms(self) -> float:
        return sum(result.execution.total_duration_ms for result in self.results)

    @property
    def total_compile_ms(self) -> float:
        """The program is compiled once, whatever the number of tests."""
        return max((result.execution.compile_duration_ms for result in self.results), default=0.0)

    @property
    def total_run_ms(self) -> float:
        return sum(result.execution.run_duration_ms for result in self.results)

    def get_failures(self) -> list[TestResult]:
        return [result for result in self.results if not result.passed]

    def get_successes(self) -> list[TestResult]:
        return [result for result in self.results if result.passed]


def compute_hash(text: str) -> str:
    """16 hex digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def hash_tests(tests: Iterable[TestCase]) -> str:
    """Stands for the tests in their order: what is given, what is expected, weights and limits."""
    canonical = [[t.input, t.expected, t.weight, dict(sorted(t.metadata.items()))] for t in tests]
    return compute_hash(json.dumps(canonical, default=str))
