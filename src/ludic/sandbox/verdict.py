"""From what was seen of a run to its result: the one place where a status is chosen."""

import os
import signal

from ludic.sandbox.cell import Seen
from ludic.sandbox.job import Ending
from ludic.sandbox.results import CompileResult, CompileStatus, RunStatus


def compile_verdict(seen: Seen) -> CompileResult:
    """The compiler's own record, or why there is none."""
    if seen.compiled is not None:
        return seen.compiled
    if seen.killed_for_memory:
        return _no_compile(CompileStatus.UNKNOWN_ERROR, "The compiler ran out of memory.")
    if seen.timed_out:
        return _no_compile(CompileStatus.TIMEOUT, "Compiling took too long.")
    if seen.ending is not None:
        how = signal_name(seen.ending.status) or f"exit code {os.waitstatus_to_exitcode(seen.ending.status)}"
        return _no_compile(CompileStatus.UNKNOWN_ERROR, f"The compiler ended with {how}.")
    return _no_compile(CompileStatus.UNKNOWN_ERROR, "The sandbox ended before it could compile.")


def run_verdict(seen: Seen) -> tuple[RunStatus, str]:
    """The status, and a sentence where it needs one. A failed run has one reason: memory before time before the rest."""
    if seen.compiled is None:
        known = seen.ending is not None or seen.timed_out or seen.killed_for_memory
        return (RunStatus.NOT_RUN, "") if known else (RunStatus.SANDBOX_ERROR, seen.complaint or "It ended unasked.")
    if not seen.compiled.success:
        return RunStatus.NOT_RUN, ""
    ending = seen.ending
    if ending is not None and ending.overflow:  # also when it had just ended by itself: the output is not whole
        return RunStatus.KILLED, "It wrote more output than it may."
    if ending is not None and ending.status == 0:
        # What it did about a child that was killed for memory is its own affair.
        return RunStatus.SUCCESS, "A process of it was killed for memory." if seen.killed_for_memory else ""
    if seen.killed_for_memory or (
        ending is not None and (ending.memory_error or _died_full(ending, seen.memory_limit))
    ):
        return RunStatus.MEMORY_EXCEEDED, "It used more memory than it may."
    if seen.timed_out:
        return RunStatus.TIMEOUT, "It ran longer than it may."
    if ending is None:
        return RunStatus.KILLED, "It ended the whole sandbox."
    if os.WIFSIGNALED(ending.status):
        if os.WTERMSIG(ending.status) == signal.SIGXCPU:
            return RunStatus.TIMEOUT, "It used more CPU time than it may."
        return RunStatus.KILLED, f"It was ended by {signal_name(ending.status)}."
    return RunStatus.RUNTIME_ERROR, ""


def _died_full(ending: Ending, limit: int) -> bool:
    """Killed with its memory used up. Container engines do not always say that it was for that."""
    killed = os.WIFSIGNALED(ending.status) and os.WTERMSIG(ending.status) == signal.SIGKILL
    return killed and not ending.timed_out and 0 < 0.95 * limit <= ending.peak


def termination(seen: Seen) -> tuple[int | None, int | None]:
    """Exit code and signal of the program; one of them is None, or both."""
    if seen.ending is None:
        return None, None
    code = os.waitstatus_to_exitcode(seen.ending.status)
    return (None, -code) if code < 0 else (code, None)


def signal_name(status: int) -> str:
    """Like SIGKILL, for a process that one ended; else empty."""
    if not os.WIFSIGNALED(status):
        return ""
    number = os.WTERMSIG(status)
    known = {member.value: member.name for member in signal.Signals}
    return known.get(number, f"signal {number}")


def _no_compile(status: CompileStatus, message: str) -> CompileResult:
    return CompileResult(status=status, error_message=message)
