"""Plain data of programming problems: tests, their results, and the settings of an env."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, ClassVar

from ludic.types import ConfigError
from ludic_sandbox import CompileResult, ExecutionResult


@dataclass(frozen=True, slots=True)
class TestCase:
    """One test of a program."""

    __test__: ClassVar[bool] = False  # pytest collects classes by their name

    input: str
    """The program's stdin, or the calls that the test makes. It enters the sandbox."""
    expected: str
    """The right output, or the assertion about the results of the calls. It never enters the sandbox of the program."""
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
    """The result of one test."""

    __test__: ClassVar[bool] = False

    test_case: TestCase
    passed: bool
    actual: str
    """The program's output or answers, as text."""
    execution: ExecutionResult
    comparison_details: str | None = None
    """Why the test did not pass."""

    @property
    def compiled(self) -> bool:
        return self.execution.compiled

    @property
    def ran(self) -> bool:
        """True if the program ran to its end, with a right or a wrong answer."""
        return self.execution.succeeded


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchTestResult:
    """The results of all tests of one program, in order."""

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
        """False without tests."""
        return bool(self.results) and all(result.passed for result in self.results)

    @property
    def pass_rate(self) -> float:
        """Weight of the passed tests over the weight of all; a test that was not run counts as failed."""
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
        """The program is compiled once for all tests."""
        return max((result.execution.compile_duration_ms for result in self.results), default=0.0)

    @property
    def total_run_ms(self) -> float:
        return sum(result.execution.run_duration_ms for result in self.results)

    def get_failures(self) -> list[TestResult]:
        return [result for result in self.results if not result.passed]

    def get_successes(self) -> list[TestResult]:
        return [result for result in self.results if result.passed]


def compute_hash(text: str) -> str:
    """16 hex digits of the text's SHA-256."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def hash_tests(tests: Iterable[TestCase]) -> str:
    """Hash of the tests in order: inputs, expected outputs, weights and limits."""
    canonical = [[t.input, t.expected, t.weight, dict(sorted(t.metadata.items()))] for t in tests]
    return compute_hash(json.dumps(canonical, default=str))


# --- settings of an env ---


class Feedback(StrEnum):
    """The feedback that an agent gets after a failed attempt."""

    TEST = "test"
    """The first failing test with its input, the expected and the actual output; an agent with several attempts could
    hard-code these."""
    STATUS = "status"
    """The number of passed tests and the end of the first failing one (wrong, crash, time-out), without its contents."""
    NOTHING = "nothing"
    """The fact that it failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeExecConfig:
    """Settings of a CodeExecEnv: limits, rewards, attempts."""

    timeout_per_test_s: float = 5.0
    """For tests that set none."""
    memory_limit_mb: int = 256
    """For tests that set none."""
    max_tests: int | None = None
    """Use the first `max_tests` tests; None uses all."""
    stop_on_first_failure: bool = True
    """Run no tests after the first that fails; ignored with partial_credit, which needs all."""
    compile_first: bool = True
    """Report programs that do not compile; without it, a syntax error is a failed test. Functions tested by asserts are always
    compiled first."""
    partial_credit: bool = False
    """Reward the weighted share of passed tests instead of all or nothing."""
    compile_failure_reward: float = -0.1
    """Also for an empty program."""
    include_stderr_in_obs: bool = True
    max_error_length: int = 500
    """Characters of each part of an observation: an error, an input, an output."""
    use_cache: bool = True
    """Grade the same program on the same tests once."""
    sandbox_wait_s: float = 1800.0
    """Seconds that an episode waits for a free sandbox before it fails; many episodes share few sandboxes."""
    max_attempts: int = 1
    """Programs that an agent may submit; after a failed one it gets `feedback`. The reward is that of the last one."""
    feedback: Feedback = Feedback.TEST

    def __post_init__(self) -> None:
        limits = "timeout_per_test_s memory_limit_mb max_tests max_error_length sandbox_wait_s max_attempts"
        for name in limits.split():
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"CodeExecConfig.{name}={value!r}; it must be above 0.")
        known = list(Feedback)
        if self.feedback not in known:
            raise ConfigError(f"CodeExecConfig.feedback={str(self.feedback)!r}; use one of {', '.join(known)}.")
        object.__setattr__(self, "feedback", Feedback(self.feedback))  # it may come as plain text, from a file

    @property
    def stops_early(self) -> bool:
        return self.stop_on_first_failure and not self.partial_credit


def as_config(config: CodeExecConfig | Mapping[str, Any] | None) -> CodeExecConfig:
    """The config, also from the plain settings of a command line or a file."""
    if config is None or isinstance(config, CodeExecConfig):
        return config or CodeExecConfig()
    known = [field.name for field in fields(CodeExecConfig)]
    unknown = sorted(set(config) - set(known))
    if unknown:
        raise ConfigError(f"CodeExecConfig has no {', '.join(unknown)}. It has: {', '.join(known)}.")
    return CodeExecConfig(**config)
