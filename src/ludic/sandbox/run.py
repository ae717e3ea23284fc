"""One job for the supervisor: what to run, with which files and limits; and what the supervisor says of it."""

import ast
import marshal
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.sandbox.interface import MB, CompileResult, CompileStatus, SandboxLimits
from ludic.types import ConfigError

PROGRAM = "main.py"
_INTERPRETER_MB = 64
"""Address space that an interpreter takes before the program has anything."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Exactly one of a Python program (the file main.py) and a command."""

    files: Mapping[str, bytes]
    """Path inside the workspace → content."""
    limits: SandboxLimits
    timeout_s: float
    stdin: bytes = b""
    argv: Sequence[str] = ()
    """Empty for a Python program."""
    outputs: Sequence[str] = ()
    """Files of the workspace to send back."""
    env: Mapping[str, str] = field(default_factory=dict)
    compile_only: bool = False
    skip_compile: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s={self.timeout_s}, but a program needs some time: give seconds above 0.")
        for path in (*self.files, *self.outputs):
            if os.path.isabs(path) or ".." in path.split("/") or "\0" in path or not path:
                raise ConfigError(f"{path!r} is no path inside the workspace. Use relative ones, like 'src/main.rs'.")
        for text in (*self.argv, *self.env, *self.env.values()):
            if "\0" in text:
                raise ConfigError(f"{text!r} has a null byte; arguments and variables cannot.")
        for name in self.env:
            if not name or "=" in name:
                raise ConfigError(f"{name!r} cannot be the name of a variable.")

    def encode(self, workspace: str, *, limit_processes: bool) -> bytes:
        """Length and content, as the supervisor reads them. The workspace is where the program starts, and its HOME."""
        body = marshal.dumps(
            {
                "argv": list(self.argv),
                "program": f"{workspace}/{PROGRAM}",
                "files": list(self.files.items()),
                "outputs": list(self.outputs),
                "env": {"HOME": workspace, **self.env},
                "cwd": workspace,
                "compile_only": self.compile_only,
                "skip_compile": self.skip_compile,
                "seconds": self.timeout_s,
                "max_output_bytes": self.limits.max_output_bytes,
                "max_outputs_bytes": self.limits.max_outputs_bytes,
                "rlimits": self._rlimits(limit_processes),
            },
            2,  # the format that every Python 3 reads
        )
        return len(body).to_bytes(4, "big") + body

    def _rlimits(self, limit_processes: bool) -> dict[str, int]:
        cores = os.cpu_count() or 1
        found = {
            "RLIMIT_AS": (self.limits.memory_mb + _INTERPRETER_MB) * MB,
            "RLIMIT_CPU": math.ceil(self.timeout_s * cores) + 1,
            "RLIMIT_FSIZE": self.limits.workspace_mb * MB,
            "RLIMIT_NOFILE": self.limits.max_open_files,
            "RLIMIT_CORE": 0,
        }
        if limit_processes:
            found["RLIMIT_NPROC"] = self.limits.max_processes
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitFacts:
    """What the supervisor saw of the program's end."""

    status: int
    """As waitpid gives it."""
    run_ms: float
    cpu_ms: float
    peak: int
    """Bytes of the largest process."""
    memory_error: bool
    """The program ended with an uncaught MemoryError, or says so; believed only if it failed."""
    overflow: bool
    """It wrote more than it may, and was killed."""
    timed_out: bool
    """Its time was up, and it was killed."""


def read_exit_facts(payload: bytes) -> ExitFacts:
    return ExitFacts(**ast.literal_eval(payload.decode()))


def read_compile_record(payload: bytes) -> CompileResult:
    record: tuple[Any, ...] = ast.literal_eval(payload.decode())
    status, message, line, column, duration_ms = record
    return CompileResult(
        status=CompileStatus(status),
        error_message=message,
        error_line=line,
        error_column=column,
        duration_ms=duration_ms,
    )
