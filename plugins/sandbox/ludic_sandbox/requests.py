"""Requests to a sandbox: what `compile`, `execute` and `run_command` ask for, as objects that also travel to a sandbox server.

A server speaks msgpack over HTTP:

    GET  /health   the server's load, without the token
    GET  /info     `ServerInfo`
    POST /run      one of `Compile`, `Execute`, `Command`; the answer is its result. ?wait_s= bounds the wait for a sandbox

Every request but /health carries the token. An error is JSON as in OpenAI's API, with the status that says whose error it is: 400
the caller's, 401 the token's, 429 and 503 the run has not started, 502 the sandbox failed. Decoding is typed: a message that does
not fit is refused, and none can hold code that either end would run outside a sandbox.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ludic.types import ConfigError
from ludic_sandbox.interface import (
    Bind,
    CommandResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    SandboxError,
    SandboxLimits,
)
from ludic_sandbox.runner.runner_process import PROGRAM, Job

TOKEN_HEADER = "X-Ludic-Control-Token"
T = TypeVar("T")
PROTOCOL = 1
"""Raised with every change after which the two ends do not understand each other."""
Result: TypeAlias = CompileResult | ExecutionResult | CommandResult


class ServerInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """Facts that a client needs of a server before its first run."""

    protocol: int
    python_version: str
    num_sandboxes: int


class Request(Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One run. Texts are bytes where a program may hold code points that UTF-8 does not have."""

    result_type: ClassVar[type[Any]]
    timeout_s: float

    def job(self, limits: SandboxLimits) -> Job:
        """The job of a runner process, in a sandbox with these limits."""
        raise NotImplementedError

    def asked(self) -> Mapping[str, float | None]:
        """The requested amounts, by the names of RunLimits without max_; None is the sandbox's default."""
        return {"timeout_s": self.timeout_s}

    def failed(self, error: SandboxError) -> Any:
        """The result of a run whose sandbox failed."""
        compiled = CompileResult(status=CompileStatus.UNKNOWN_ERROR, error_message=str(error))
        return self.result_type(compile_result=compiled, run_status=RunStatus.SANDBOX_ERROR, detail=str(error))


class Compile(Request):
    """`Sandbox.compile`."""

    result_type: ClassVar[type[Any]] = CompileResult
    code: bytes

    def job(self, limits: SandboxLimits) -> Job:
        return Job(files={PROGRAM: self.code}, timeout_s=self.timeout_s, limits=limits, compile_only=True)

    def failed(self, error: SandboxError) -> Any:
        raise error


class Execute(Request):
    """`Sandbox.execute`."""

    result_type: ClassVar[type[Any]] = ExecutionResult
    code: bytes
    stdin: bytes
    skip_compile: bool
    memory_limit_mb: int | None
    env_vars: dict[str, str]

    def job(self, limits: SandboxLimits) -> Job:
        return Job(
            files={PROGRAM: self.code},
            stdin=self.stdin,
            skip_compile=self.skip_compile,
            timeout_s=self.timeout_s,
            limits=replace(limits, memory_mb=self.memory_limit_mb or limits.memory_mb),
            env=self.env_vars,
        )

    def asked(self) -> Mapping[str, float | None]:
        return {"timeout_s": self.timeout_s, "memory_mb": self.memory_limit_mb}


class Command(Request):
    """`CommandSandbox.run_command`, without binds."""

    result_type: ClassVar[type[Any]] = CommandResult
    argv: list[str]
    files: dict[str, bytes]
    outputs: list[str]
    stdin: bytes
    memory_limit_mb: int | None
    max_processes: int | None
    workspace_mb: int | None
    env_vars: dict[str, str]

    def job(self, limits: SandboxLimits) -> Job:
        if not self.argv:
            raise ConfigError("run_command got an empty argv. Its first entry is the program to run.")
        limits = replace(
            limits,
            memory_mb=self.memory_limit_mb or limits.memory_mb,
            max_processes=self.max_processes or limits.max_processes,
            workspace_mb=self.workspace_mb or limits.workspace_mb,
        )
        return Job(
            argv=self.argv,
            files=self.files,
            outputs=self.outputs,
            stdin=self.stdin,
            timeout_s=self.timeout_s,
            limits=limits,
            env=self.env_vars,
        )

    def asked(self) -> Mapping[str, float | None]:
        return {
            "timeout_s": self.timeout_s,
            "memory_mb": self.memory_limit_mb,
            "processes": self.max_processes,
            "workspace_mb": self.workspace_mb,
        }


class RequestSandbox(ABC):
    """Implements Sandbox and CommandSandbox of ludic_sandbox.interface: each of their calls is a request."""

    @abstractmethod
    async def _run(self, request: Request, binds: Sequence[Bind]) -> Any:
        """The result; SandboxError if the sandbox fails."""

    async def perform(self, request: Request, binds: Sequence[Bind] = ()) -> Any:
        """The result, of the request's `result_type`. A failure of the sandbox also gives one, except for `Compile`."""
        try:
            return await self._run(request, binds)
        except SandboxError as error:
            return request.failed(error)

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        result: CompileResult = await self.perform(Compile(code=as_bytes(code), timeout_s=timeout_s))
        return result

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
        request = Execute(
            code=as_bytes(code),
            stdin=as_bytes(stdin),
            skip_compile=skip_compile,
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            env_vars=dict(env_vars or {}),
        )
        result: ExecutionResult = await self.perform(request)
        return result

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
        request = Command(
            argv=list(argv),
            files={path: as_bytes(content) for path, content in (files or {}).items()},
            outputs=list(outputs),
            stdin=as_bytes(stdin),
            timeout_s=timeout_s,
            memory_limit_mb=memory_limit_mb,
            max_processes=max_processes,
            workspace_mb=workspace_mb,
            env_vars=dict(env_vars or {}),
        )
        result: CommandResult = await self.perform(request, binds)
        return result


def as_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


# --- as bytes ---

_requests = msgspec.msgpack.Decoder(Compile | Execute | Command)


def encode(message: Request | ServerInfo | Result) -> bytes:
    """ConfigError for a text that cannot be sent."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError as e:
        raise ConfigError(f"An argument, path or variable of a remote run is no valid text: {e}") from e


def decode_request(data: bytes) -> Request:
    """A client's run; ConfigError if it is none."""
    try:
        return _requests.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise ConfigError(f"The body is no run of protocol {PROTOCOL}: {e}") from e


def decode(data: bytes, kind: type[T]) -> T:
    """A server's answer; SandboxError if it is something else, so that no run is graded by it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise SandboxError(f"The sandbox server answered with something that is no {kind.__name__}: {e}") from e
