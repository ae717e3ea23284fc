"""What a sandbox and a pool of sandboxes promise; backends implement it, envs and tools ask for it.

A sandbox runs untrusted programs. Whatever the program does, a run ends by its limits, says how it ended, and
leaves nothing behind that a later run could see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from ludic.types import ConfigError
from ludic.types.errors import LudicError

# What came of a program: did it compile, how did it end, what did it say, what did it use.
# Pure data. Everything here was observed from outside the program (exit status, streams, kernel counters) or recorded
# before its first line ran (the compile result), so nothing a program prints can change it.


class CompileStatus(StrEnum):
    """What the compiler said."""

    SUCCESS = "success"
    SYNTAX_ERROR = "syntax_error"
    IMPORT_ERROR = "import_error"  # it opens with an import of a module that the sandbox does not have
    TIMEOUT = "timeout"
    UNKNOWN_ERROR = "unknown_error"  # the compiler itself gave up: nesting too deep, out of memory


class RunStatus(StrEnum):
    """How the run ended. One value; `ludic.sandbox.runner_process` chooses it."""

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


class SandboxError(LudicError, RuntimeError):
    """The sandbox itself failed; says nothing about the program."""


class SandboxPoolExhaustedError(SandboxError):
    """No sandbox is left and none can be made: every attempt of the last few failed."""


@runtime_checkable
class Sandbox(Protocol):
    """Runs Python programs, isolated in network, CPU, memory, time and filesystem. Its holder has it alone."""

    @property
    def python_version(self) -> str:
        """Of the Python inside, as "3.11"."""
        ...

    async def reset(self) -> None:
        """Make it as good as new; raises SandboxError if that cannot be done."""
        ...

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        """Compile without running. SandboxError where the sandbox failed and nothing is known."""
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

        `timeout_s` is wall time from the program's start. `skip_compile` leaves out the look at the imports and reports
        the compile step as a success; a syntax error then is a runtime error. Nothing the program does raises; a
        failure of the sandbox is a result too (SANDBOX_ERROR).
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
    """A sandbox that also runs other programs than Python ones."""

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
        """Run `argv` in a fresh workspace that holds `files` (executable), and bring `outputs` back from it.

        Both are paths relative to the workspace, which is also the working folder and HOME. `binds` are what else the
        command sees of the host, besides the system's own folders.
        """
        ...


@runtime_checkable
class SandboxPool(Protocol):
    """A fixed number of sandboxes, lent one at a time, and a cache of results."""

    @property
    def python_version(self) -> str: ...

    @property
    def available(self) -> int:
        """Sandboxes that a checkout would get without waiting."""
        ...

    @property
    def cache_stats(self) -> dict[str, int]:
        """hits, misses, size, max_size."""
        ...

    async def start(self) -> None:
        """Make the sandboxes. Calling it again does nothing."""
        ...

    async def checkout(self, timeout_s: float = 30.0) -> Sandbox:
        """A clean sandbox. TimeoutError when none comes free in time; SandboxPoolExhaustedError when none ever will."""
        ...

    async def release(self, sandbox: Sandbox) -> None:
        """Give it back; it is reset in the background before anyone else gets it."""
        ...

    async def shutdown(self) -> None:
        """End every process of the pool and wait for it."""
        ...

    def get_cached(self, code_hash: str, tests_hash: str) -> Any | None:
        """What `put_cached` stored for the pair, or None. Safe from any thread."""
        ...

    def put_cached(self, code_hash: str, tests_hash: str, result: Any) -> None:
        """Never store what a sandbox error decided: the next attempt may go well."""
        ...


# What a program may use. Every backend enforces these; a run may ask for other time and memory.

MB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """The limits of one run."""

    memory_mb: int = 256
    """Of all processes together where there is a memory cgroup, else of each process."""
    max_processes: int = 32
    """Threads count too."""
    max_output_bytes: int = 8 * MB
    """Of stdout and of stderr, each. A program that writes more is killed; what it wrote until then is kept."""
    max_outputs_bytes: int = 64 * MB
    """Of all files that a command's caller asks back."""
    workspace_mb: int = 64
    """Size of the one writable folder."""
    max_open_files: int = 256

    def __post_init__(self) -> None:
        for name in (
            "memory_mb",
            "max_processes",
            "max_output_bytes",
            "max_outputs_bytes",
            "workspace_mb",
            "max_open_files",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"SandboxLimits.{name}={getattr(self, name)}, but it must be at least 1.")
        if self.memory_mb < 16:
            raise ConfigError(f"SandboxLimits.memory_mb={self.memory_mb}, but Python itself needs about 16 MB.")
