"""The interfaces of a sandbox and of a pool of sandboxes: backends implement them, envs and tools use them.

A sandbox runs untrusted programs. Every run ends within its limits, reports how it ended, and leaves nothing behind that a later
run could see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from ludic.types import ConfigError
from ludic.types.errors import LudicError

# --- results ---
# Everything here is observed from outside the program (exit status, streams, kernel counters) or recorded before its first line
# runs (the compile result), so no output of a program can change it.


class CompileStatus(StrEnum):
    """The compiler's verdict."""

    SUCCESS = "success"
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"  # it begins with an import of a module that the sandbox does not have
    TIMEOUT = "timeout"
    UNKNOWN_ERROR = "unknown_error"  # the compiler itself gave up: nesting too deep, out of memory


class RunStatus(StrEnum):
    """The end of a run; `ludic_sandbox.process_sandbox` chooses it."""

    SUCCESS = "success"  # it ended by itself with exit code 0
    RUNTIME_ERROR = "runtime_error"  # it ended by itself with another exit code
    TIMEOUT = "timeout"
    MEMORY_EXCEEDED = "memory_exceeded"
    KILLED = "killed"  # ended by a signal, or for too much output; see `signal` and `detail`
    NOT_RUN = "not_run"  # it did not compile, or an earlier test decided
    SANDBOX_ERROR = "sandbox_error"  # the sandbox failed; nothing is known about the program


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileResult:
    """The result of compiling, which also happens inside the sandbox."""

    status: CompileStatus
    error_message: str | None = None
    error_line: int | None = None
    """The first line is 1."""
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
    """Decoded as UTF-8 with replacement characters; cut at the sandbox's output limit."""
    stderr: str = ""
    exit_code: int | None = None
    """None when a signal ended it, or it did not run."""
    signal: int | None = None
    """The signal that ended it, if any."""
    return_value: str = ""
    """For sandboxes that evaluate expressions; programs have none."""
    compile_duration_ms: float = 0.0
    run_duration_ms: float = 0.0
    total_duration_ms: float = 0.0
    """Including the wait for a fresh process."""
    peak_memory_bytes: int | None = None
    """The peak of all processes together with a memory cgroup, else of the largest one; None if the backend cannot measure it."""
    cpu_time_ms: float | None = None
    output_truncated: bool = False
    """It wrote more than the output limit, and was killed for it."""
    detail: str = ""
    """Why it was ended, or how the sandbox failed; for people."""
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
    """The requested files by path, without those that are missing, no regular files, or too large."""


def explain_failure(result: ExecutionResult, subject: str = "It") -> str:
    """Why a program did not end successfully, as a sentence; empty if it did."""
    problem, status = result.compile_result, result.run_status
    if status is not RunStatus.SANDBOX_ERROR and not problem.success:
        where = f" in line {problem.error_line}" if problem.error_line is not None else ""
        return f"{subject} does not compile: {problem.error_message or problem.status}{where}."
    code, signal = result.exit_code, result.signal
    return {
        RunStatus.SUCCESS: "",
        RunStatus.NOT_RUN: f"{subject} was not run.",
        RunStatus.SANDBOX_ERROR: "The sandbox failed, which is not the program's fault.",
        RunStatus.MEMORY_EXCEEDED: f"{subject} ran out of memory.",
        RunStatus.TIMEOUT: f"{subject} ran out of time.",
        RunStatus.KILLED: f"{subject} was ended by signal {signal}." if signal else f"{subject} was ended.",
        RunStatus.RUNTIME_ERROR: f"{subject} raised an error."
        if code is None
        else f"{subject} ended with exit code {code}.",
    }[status]


class SandboxError(LudicError, RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


class SandboxPoolExhaustedError(SandboxError):
    """No sandbox is left, and the last attempts to make one failed."""


@runtime_checkable
class Sandbox(Protocol):
    """Runs Python programs, isolated in network, CPU, memory, time and filesystem; used by one holder at a time."""

    @property
    def python_version(self) -> str:
        """Version of the Python inside, like "3.11"."""
        ...

    async def reset(self) -> None:
        """Restore the initial state; SandboxError if that fails."""
        ...

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        """Compile without running; SandboxError if the sandbox fails."""
        ...

    async def execute(
        self,
        code: str,
        *,
        stdin: str = "",
        skip_compile: bool = False,
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> ExecutionResult:
        """Run a program in a fresh process and wait for its end.

        `timeout_s` is wall time from the program's start. `skip_compile` skips the check of imports and reports the compile step
        as a success; a syntax error then is a runtime error. It never raises: a failure of the sandbox is the status
        SANDBOX_ERROR.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bind:
    """A file or folder of the host that a command sees inside."""

    source: str
    """Path on the host."""
    target: str
    """Absolute path inside."""
    writable: bool = False


@runtime_checkable
class CommandSandbox(Sandbox, Protocol):
    """A sandbox that also runs commands."""

    async def run_command(
        self,
        argv: Sequence[str],
        *,
        files: Mapping[str, str | bytes] | None = None,
        outputs: Sequence[str] = (),
        binds: Sequence[Bind] = (),
        stdin: str | bytes = "",
        timeout_s: float = 10.0,
        memory_limit_mb: int | None = None,
        max_processes: int | None = None,
        workspace_mb: int | None = None,
        env_vars: Mapping[str, str] | None = None,
    ) -> CommandResult:
        """Run `argv` in a fresh workspace that holds `files` (executable), and return its files `outputs`.

        Both are paths relative to the workspace, which is also the working folder and HOME. The command sees `binds` and the
        system's own folders of the host.
        """
        ...


@runtime_checkable
class SandboxPool(Protocol):
    """A fixed number of sandboxes, lent one at a time, and a cache of results."""

    @property
    def python_version(self) -> str: ...

    @property
    def available(self) -> int:
        """Sandboxes that a checkout gets without waiting."""
        ...

    @property
    def cache_stats(self) -> dict[str, int]:
        """hits, misses, size, max_size."""
        ...

    async def start(self) -> None:
        """Make the sandboxes. Calling it again does nothing."""
        ...

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox:
        """A clean sandbox. TimeoutError if none comes free in time; SandboxPoolExhaustedError if the pool has given up."""
        ...

    async def release(self, sandbox: Sandbox) -> None:
        """Return it; it is reset in the background before its next checkout."""
        ...

    async def shutdown(self) -> None:
        """End every process of the pool."""
        ...

    def get_cached(self, code_hash: str, tests_hash: str) -> Any | None:
        """The result that `put_cached` stored for the pair, or None. Safe from any thread."""
        ...

    def put_cached(self, code_hash: str, tests_hash: str, result: Any) -> None:
        """Store a result; never one of a sandbox error, since the next attempt may succeed."""
        ...


MB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one run. Every backend enforces them; a run may set its own time and memory."""

    memory_mb: int = 256
    """Memory of all processes together with a memory cgroup, else of each process."""
    address_space_mb: int | None = None
    """Address space of each process. Default: memory_mb; runtimes that reserve much more than they use, such as Node, need more."""
    max_processes: int = 32
    """Threads count too."""
    max_output_bytes: int = 8 * MB
    """Bytes of stdout and of stderr, each. A program that writes more is killed; the output until then is kept."""
    max_outputs_bytes: int = 64 * MB
    """Bytes of all requested output files of a command."""
    workspace_mb: int = 64
    """Size of the only writable folder."""
    max_open_files: int = 256

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if value is not None and value < 1:
                raise ConfigError(f"SandboxLimits.{limit.name}={value}, but it must be at least 1.")
        if self.memory_mb < 16:
            raise ConfigError(f"SandboxLimits.memory_mb={self.memory_mb}, but Python itself needs about 16 MB.")
