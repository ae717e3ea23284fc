"""What a sandbox and a pool of sandboxes promise; backends implement it, envs and tools ask for it.

A sandbox runs programs that nobody trusts. Whatever the program does, a run ends by its limits, says how it ended, and
leaves nothing behind that a later run could see.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ludic.sandbox.results import CommandResult, CompileResult, ExecutionResult
from ludic.types.errors import LudicError


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
