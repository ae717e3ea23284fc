"""What came of a program: did it compile, how did it end, what did it say, what did it use.

Pure data. Everything here was observed from outside the program (exit status, streams, kernel counters) or recorded
before its first line ran (the compile result), so nothing a program prints can change it.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class CompileStatus(StrEnum):
    """What the compiler said."""

    SUCCESS = "success"
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"  # it opens with an import of a module that the sandbox does not have
    TIMEOUT = "timeout"
    UNKNOWN_ERROR = "unknown_error"  # the compiler itself gave up: nesting too deep, out of memory


class RunStatus(StrEnum):
    """How the run ended. One value; `ludic.sandbox.verdict` chooses it."""

    SUCCESS = "success"  # it ended by itself with exit code 0
    RUNTIME_ERROR = "runtime_error"  # it ended by itself with another exit code
    TIMEOUT = "timeout"
    MEMORY_EXCEEDED = "memory_exceeded"
    KILLED = "killed"  # ended by a signal, or for endless output; see `signal` and `detail`
    NOT_RUN = "not_run"  # it did not compile, or an earlier test decided
    SANDBOX_ERROR = "sandbox_error"  # our fault, not the program's: nothing is known about it


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileResult:
    """The verdict of the compiler, which ran inside the sandbox too."""

    status: CompileStatus
    error_message: str | None = None
    error_line: int | None = None
    """From 1, as compilers count."""
    error_column: int | None = None
    duration_ms: float = 0.0

    @property
    def success(self) -> bool:
        return self.status is CompileStatus.SUCCESS


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionResult:
    """One run of one program."""

    compile_result: CompileResult
    run_status: RunStatus = RunStatus.NOT_RUN
    stdout: str = ""
    """UTF-8, with a replacement character for what is not; cut at the sandbox's output limit."""
    stderr: str = ""
    exit_code: int | None = None
    """None when it was ended by a signal, or did not run."""
    signal: int | None = None
    """The signal that ended it, if one did."""
    return_value: str = ""
    """For sandboxes that evaluate expressions; programs have none."""
    compile_duration_ms: float = 0.0
    run_duration_ms: float = 0.0
    total_duration_ms: float = 0.0
    """From asking to knowing, including a wait for a fresh process."""
    peak_memory_bytes: int | None = None
    """All processes of the program together where the kernel counts so (memory cgroup), else the largest one; None
    when the backend cannot tell."""
    cpu_time_ms: float | None = None
    output_truncated: bool = False
    """It wrote more than the output limit, and was killed for it."""
    detail: str = ""
    """Why it was ended, or what went wrong with the sandbox; for people."""
    cache_hit: bool = False
    cache_key: str | None = None

    @property
    def compiled(self) -> bool:
        return self.compile_result.success

    @property
    def succeeded(self) -> bool:
        return self.compiled and self.run_status is RunStatus.SUCCESS

    @property
    def timed_out(self) -> bool:
        return self.run_status is RunStatus.TIMEOUT or self.compile_result.status is CompileStatus.TIMEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class CommandResult(ExecutionResult):
    """One run of a command; its compile result is a success."""

    outputs: dict[str, bytes] = field(default_factory=dict)
    """The files that were asked back, by path. What is missing, no regular file, or too large is not in it."""
