import pytest

from ludic.types import ConfigError
from ludic_sandbox import CompileResult, CompileStatus, ExecutionResult, RunStatus
from ludic_sandbox.code_exec import (
    BatchTestResult,
    ExactMatchVerifier,
    FloatTolerantVerifier,
    TestCase,
    TestResult,
    WhitespaceNormalizedVerifier,
    compute_hash,
    hash_tests,
)

COMPILED = CompileResult(status=CompileStatus.SUCCESS, duration_ms=2.0)


def result(passed: bool, *, weight: float = 1.0, id: str = "", compiled: CompileResult = COMPILED) -> TestResult:
    execution = ExecutionResult(
        compile_result=compiled,
        run_status=RunStatus.SUCCESS,
        compile_duration_ms=2.0,
        run_duration_ms=5.0,
        total_duration_ms=7.0,
    )
    return TestResult(test_case=TestCase("1", "2", id=id, weight=weight), passed=passed, actual="", execution=execution)


def test_the_pass_rate_goes_by_weight_and_the_counts_do_not():
    batch = BatchTestResult(results=[result(True, weight=3.0), result(False, id="b"), result(False)])
    assert batch.pass_rate == 0.6 and (batch.passed_count, batch.total_count) == (1, 3)
    assert batch.first_failure.test_case.id == "b" and not batch.all_passed
    assert len(batch.get_failures()) == 2 and len(batch.get_successes()) == 1


def test_no_tests_do_not_count_as_passed():
    empty = BatchTestResult(results=[])
    assert not empty.all_passed and empty.pass_rate == 0.0 and empty.first_failure is None and not empty.compile_failed


def test_times_add_up_but_a_program_is_compiled_once():
    batch = BatchTestResult(results=[result(True), result(True)])
    assert (batch.total_compile_ms, batch.total_run_ms, batch.total_execution_ms) == (2.0, 10.0, 14.0)


def test_a_program_that_does_not_compile_is_told_from_one_that_fails():
    broken = CompileResult(status=CompileStatus.SYNTAX_ERROR, error_message="invalid syntax", error_line=1)
    assert BatchTestResult(results=[result(False, compiled=broken)]).compile_failed
    assert not BatchTestResult(results=[result(False)]).compile_failed


def test_hashes_are_sixteen_hex_digits_and_depend_on_everything_that_grading_depends_on():
    assert len(compute_hash("x")) == 16 and compute_hash("x") != compute_hash("y")
    assert compute_hash("\ud800") != compute_hash("?")  # text that is no UTF-8
    tests = [
        TestCase("1", "2"),
        TestCase("1", "3"),
        TestCase("2", "2"),
        TestCase("1", "2", weight=2.0),
        TestCase("1", "2", metadata={"timeout_s": 1}),
    ]
    assert len({hash_tests([test]) for test in tests}) == len(tests)
    assert hash_tests(tests) != hash_tests(tests[::-1]) and hash_tests(tests) == hash_tests(list(tests))


def test_limits_of_a_test_override_those_of_the_runner():
    test = TestCase("", "", metadata={"timeout_s": 0.5, "memory_limit_mb": 64})
    assert (test.timeout_s(5.0), test.memory_limit_mb(256)) == (0.5, 64)
    assert (TestCase("", "").timeout_s(5.0), TestCase("", "").memory_limit_mb(256)) == (5.0, 256)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"weight": -1.0}, "weight=-1.0"),
        ({"metadata": {"timeout_s": 0}}, "timeout_s=0"),
        ({"metadata": {"memory_limit_mb": "many"}}, "memory_limit_mb='many'"),
    ],
)
def test_a_test_that_makes_no_sense_is_refused_by_name(settings, named):
    with pytest.raises(ConfigError, match=named):
        TestCase("", "", id="t", **settings)


# --- verifiers ---


@pytest.mark.parametrize(
    ("verifier", "actual", "expected", "passes"),
    [
        (ExactMatchVerifier(), "4\n", "4", True),
        (ExactMatchVerifier(), "4 \n5", "4\n5", False),  # inside it counts
        (ExactMatchVerifier(strip=False), "4\n", "4", False),
        (ExactMatchVerifier(), "Yes", "yes", False),
        (ExactMatchVerifier(case_sensitive=False), "YES", "yes", True),
        (WhitespaceNormalizedVerifier(), "1  2\n\n3 ", "1 2 3\n", True),
        (WhitespaceNormalizedVerifier(), "12 3", "1 2 3", False),
        (WhitespaceNormalizedVerifier(), "", "0", False),
        (FloatTolerantVerifier(), "0.30000000000000004 ok", "0.3 ok", True),
        (FloatTolerantVerifier(), "0.31", "0.3", False),
        (FloatTolerantVerifier(abs_tol=0.1), "0.31", "0.3", True),
        (FloatTolerantVerifier(rel_tol=1e-3), "1000.5", "1000", True),
        (FloatTolerantVerifier(), "nan", "1", False),
        (FloatTolerantVerifier(), "inf", "1e308", False),
        (FloatTolerantVerifier(), "one", "1", False),
        (FloatTolerantVerifier(), "1 2", "1", False),
    ],
)
def test_output_is_compared_as_the_verifier_says(verifier, actual, expected, passes):
    verdict = verifier.verify(actual, expected)
    assert verdict.passed is passes and (verdict.details is None) is passes


@pytest.mark.parametrize(
    ("verifier", "actual", "expected", "details"),
    [
        (ExactMatchVerifier(), "1\n5", "1\n2", "Line 2 is '5', '2' is expected."),
        (ExactMatchVerifier(), "1", "1\n2", "The output has 1 lines, 2 are expected."),
        (WhitespaceNormalizedVerifier(), "a b", "a c", "Word 2 is 'b', 'c' is expected."),
        (FloatTolerantVerifier(), "1", "1 2", "The output has 1 words, 2 are expected."),
    ],
)
def test_a_wrong_output_is_told_where_it_first_differs(verifier, actual, expected, details):
    assert verifier.verify(actual, expected).details == details
