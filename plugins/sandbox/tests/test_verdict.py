"""The status of a run, from what was seen of it."""

import signal

import pytest

from ludic_sandbox import CompileResult, CompileStatus, RunStatus
from ludic_sandbox.process_sandbox import compile_verdict, run_verdict, termination
from ludic_sandbox.runner.runner_process import ExitFacts, RawRun, read_compile_record, read_exit_facts

GOOD = CompileResult(status=CompileStatus.SUCCESS)


def ending(status: int = 0, **facts: bool) -> ExitFacts:
    flags = {"memory_error": False, "overflow": False, "timed_out": False, **facts}
    return ExitFacts(status=status, run_ms=1.0, cpu_ms=1.0, peak=1, **flags)


def exited(code: int) -> int:
    return code << 8


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (RawRun(compiled=GOOD, ending=ending()), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(exited(1))), RunStatus.RUNTIME_ERROR),
        (RawRun(compiled=GOOD, ending=ending(exited(137))), RunStatus.RUNTIME_ERROR),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGSEGV)), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGXCPU)), RunStatus.TIMEOUT),
        (RawRun(compiled=GOOD, ending=ending(exited(1), memory_error=True)), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(0, memory_error=True)), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(), killed_for_memory=True), RunStatus.SUCCESS),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), memory_limit=1), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL), memory_limit=2), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGSEGV), memory_limit=1), RunStatus.KILLED),
        (RawRun(compiled=GOOD, timed_out=True), RunStatus.TIMEOUT),
        (RawRun(compiled=GOOD, timed_out=True, isolation_error="conmon died"), RunStatus.SANDBOX_ERROR),
        (RawRun(compiled=GOOD, isolation_error="conmon died"), RunStatus.SANDBOX_ERROR),
        (RawRun(compiled=GOOD, isolation_error="conmon died", killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (
            RawRun(compiled=GOOD, ending=ending(signal.SIGKILL, timed_out=True), timed_out=True, memory_limit=1),
            RunStatus.TIMEOUT,
        ),
        (RawRun(compiled=GOOD, timed_out=True, killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=GOOD, ending=ending(signal.SIGKILL, overflow=True)), RunStatus.KILLED),
        (RawRun(compiled=GOOD, ending=ending(0, overflow=True)), RunStatus.KILLED),
        (RawRun(compiled=GOOD), RunStatus.KILLED),
        (RawRun(compiled=GOOD, killed_for_memory=True), RunStatus.MEMORY_EXCEEDED),
        (RawRun(compiled=CompileResult(status=CompileStatus.SYNTAX_ERROR), ending=ending()), RunStatus.NOT_RUN),
        (RawRun(timed_out=True), RunStatus.NOT_RUN),
        (RawRun(ending=ending(signal.SIGSEGV)), RunStatus.NOT_RUN),
        (RawRun(killed_for_memory=True), RunStatus.NOT_RUN),
        (RawRun(), RunStatus.SANDBOX_ERROR),
    ],
)
def test_each_way_to_end_has_its_status(seen, status):
    assert run_verdict(seen)[0] is status


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (RawRun(compiled=GOOD), CompileStatus.SUCCESS),
        (RawRun(timed_out=True), CompileStatus.TIMEOUT),
        (RawRun(ending=ending(signal.SIGSEGV)), CompileStatus.UNKNOWN_ERROR),
        (RawRun(killed_for_memory=True), CompileStatus.UNKNOWN_ERROR),
        (RawRun(), CompileStatus.UNKNOWN_ERROR),
    ],
)
def test_each_way_to_compile_has_its_status(seen, status):
    assert compile_verdict(seen).status is status


def test_a_sandbox_error_passes_on_what_the_launcher_said():
    assert run_verdict(RawRun(launcher_error="bwrap: no such thing")) == (
        RunStatus.SANDBOX_ERROR,
        "bwrap: no such thing",
    )


def test_exit_code_and_signal_exclude_each_other():
    assert termination(RawRun(ending=ending(exited(7)))) == (7, None)
    assert termination(RawRun(ending=ending(signal.SIGKILL))) == (None, 9)
    assert termination(RawRun()) == (None, None)


def test_frames_are_read_as_plain_values_and_nothing_else():
    record = read_compile_record(b"('syntax_error', \"it's\", 3, None, 1.5)")
    assert (record.status, record.error_message, record.error_line) == (CompileStatus.SYNTAX_ERROR, "it's", 3)
    with pytest.raises(ValueError):
        read_exit_facts(b"__import__('os').abort()")
