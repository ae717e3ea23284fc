"""What an agent is told about its program, in words."""

import re
from dataclasses import replace

from ludic.envs.code_exec.cases import BatchTestResult, TestResult
from ludic.envs.code_exec.config import CodeExecConfig, Feedback
from ludic.envs.code_exec.runner import ended

_LINE = re.compile(r'(File "solution\.py", line )(\d{1,9})(?!\d)')


def observation(
    result: BatchTestResult | None, config: CodeExecConfig, *, attempts_left: int, lines_before: int = 0
) -> str:
    """`result` is None for an empty program. `lines_before` are those that the env put before the agent's own."""
    if result is not None and result.all_passed:
        return f"All {result.total_count} tests passed."
    if result is not None and lines_before:
        result = _in_own_lines(result, lines_before)
    parts = [_what_failed(result, config)]
    if attempts_left > 0:
        parts.append(f"Correct the program and hand it in again. Attempts left: {attempts_left}.")
    return "\n\n".join(parts)


def _in_own_lines(result: BatchTestResult, lines_before: int) -> BatchTestResult:
    """With the numbers of lines as the agent knows them."""
    failure = result.first_failure
    assert failure is not None, "a result without a failure has all passed"
    execution, compiled = failure.execution, failure.execution.compile_result
    line = compiled.error_line if compiled.error_line is None else max(1, compiled.error_line - lines_before)
    stderr = _LINE.sub(lambda found: f"{found[1]}{max(1, int(found[2]) - lines_before)}", execution.stderr)
    shown = replace(execution, compile_result=replace(compiled, error_line=line), stderr=stderr)
    details = ended(shown) if not compiled.success else failure.comparison_details
    moved = replace(failure, execution=shown, comparison_details=details)
    return replace(result, results=[moved if each is failure else each for each in result.results])


def _what_failed(result: BatchTestResult | None, config: CodeExecConfig) -> str:
    if result is None:
        return "There is no program in the reply."
    failure = result.first_failure
    assert failure is not None, "a result without a failure has all passed"
    if not failure.compiled:
        return _cut(ended(failure.execution), config)
    if config.feedback is Feedback.NOTHING:
        return "The program did not pass all tests."
    count = f"{result.passed_count} of {result.total_count} tests passed."
    if config.feedback is Feedback.STATUS:
        return f"{count} Test {failure.test_case.id}: {_status(failure)}"
    return "\n".join([f"{count} The first that failed is test {failure.test_case.id}.", *_contents(failure, config)])


def _status(failure: TestResult) -> str:
    return "The output is wrong." if failure.ran else ended(failure.execution)


def _contents(failure: TestResult, config: CodeExecConfig) -> list[str]:
    test, execution = failure.test_case, failure.execution
    parts = [f"Input:\n{_cut(test.input, config)}", f"Expected:\n{_cut(test.expected, config)}"]
    if failure.ran:
        parts.append(f"Got:\n{_cut(failure.actual, config)}")
    details = failure.comparison_details or ("" if failure.ran else ended(execution))
    if details:
        parts.append(_cut(details, config))
    if config.include_stderr_in_obs and execution.stderr.strip():
        parts.append(f"Error output:\n{_end_of(execution.stderr.strip(), config)}")
    return parts


def _cut(text: str, config: CodeExecConfig) -> str:
    text = text.rstrip("\n")
    return text if len(text) <= config.max_error_length else text[: config.max_error_length] + "…"


def _end_of(text: str, config: CodeExecConfig) -> str:
    """A traceback says last what happened."""
    return text if len(text) <= config.max_error_length else "…" + text[-config.max_error_length :]
