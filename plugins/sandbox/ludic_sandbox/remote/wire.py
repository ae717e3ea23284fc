"""Messages between a `RemoteSandboxPool` and a `SandboxServer`: runs and results in msgpack over HTTP.

    GET  /health   the server's load, without the token
    GET  /info     `ServerInfo`
    POST /run      one of `Compile`, `Execute`, `Command`; the answer is its result. ?wait_s= bounds the wait for a sandbox

Every request but /health carries the token. An error is JSON as in OpenAI's API, with the status that says whose error it is: 400
the caller's, 401 the token's, 429 and 503 the run has not started, 502 the sandbox failed. Decoding is typed: a message that does
not fit is refused, and none can hold code that either end would run outside a sandbox.
"""

from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec
from msgspec import Struct

from ludic.types import ConfigError
from ludic_sandbox.interface import CommandResult, CommandSandbox, CompileResult, ExecutionResult, Sandbox, SandboxError

TOKEN_HEADER = "X-Ludic-Control-Token"
T = TypeVar("T")
PROTOCOL = 1
"""Raised with every change after which the two ends do not understand each other."""
Result: TypeAlias = CompileResult | ExecutionResult | CommandResult


class ServerInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client has to know of a server before its first run."""

    protocol: int
    python_version: str
    num_sandboxes: int


class Message(Struct, kw_only=True, tag=True, forbid_unknown_fields=True):
    """One run. Texts are bytes where a program may hold code points that UTF-8 does not have."""

    timeout_s: float

    async def run(self, sandbox: Sandbox) -> Result:
        """Run it in a sandbox of this machine."""
        raise NotImplementedError

    def asked(self) -> Mapping[str, float | None]:
        """What it asks for, by the names of RunLimits without max_; None is the server's default."""
        return {"timeout_s": self.timeout_s}

    def result(self, data: bytes) -> Result:
        """The decoded answer."""
        raise NotImplementedError


class Compile(Message):
    """`Sandbox.compile`."""

    code: bytes

    async def run(self, sandbox: Sandbox) -> CompileResult:
        return await sandbox.compile(as_text(self.code), timeout_s=self.timeout_s)

    def result(self, data: bytes) -> CompileResult:
        return decode(data, CompileResult)


class Execute(Message):
    """`Sandbox.execute`."""

    code: bytes
    stdin: bytes
    skip_compile: bool
    memory_limit_mb: int | None
    env_vars: dict[str, str]

    async def run(self, sandbox: Sandbox) -> ExecutionResult:
        return await sandbox.execute(
            as_text(self.code),
            stdin=as_text(self.stdin),
            skip_compile=self.skip_compile,
            timeout_s=self.timeout_s,
            memory_limit_mb=self.memory_limit_mb,
            env_vars=self.env_vars,
        )

    def asked(self) -> Mapping[str, float | None]:
        return {"timeout_s": self.timeout_s, "memory_mb": self.memory_limit_mb}

    def result(self, data: bytes) -> ExecutionResult:
        return decode(data, ExecutionResult)


class Command(Message):
    """`CommandSandbox.run_command`, without binds."""

    argv: list[str]
    files: dict[str, bytes]
    outputs: list[str]
    stdin: bytes
    memory_limit_mb: int | None
    max_processes: int | None
    workspace_mb: int | None
    env_vars: dict[str, str]

    async def run(self, sandbox: Sandbox) -> CommandResult:
        if not isinstance(sandbox, CommandSandbox):
            raise SandboxError("The server's sandboxes run Python programs, not commands.")
        return await sandbox.run_command(
            self.argv,
            files=self.files,
            outputs=self.outputs,
            stdin=self.stdin,
            timeout_s=self.timeout_s,
            memory_limit_mb=self.memory_limit_mb,
            max_processes=self.max_processes,
            workspace_mb=self.workspace_mb,
            env_vars=self.env_vars,
        )

    def asked(self) -> Mapping[str, float | None]:
        return {
            "timeout_s": self.timeout_s,
            "memory_mb": self.memory_limit_mb,
            "processes": self.max_processes,
            "workspace_mb": self.workspace_mb,
        }

    def result(self, data: bytes) -> CommandResult:
        return decode(data, CommandResult)


_messages = msgspec.msgpack.Decoder(Compile | Execute | Command)


def encode(message: Message | ServerInfo | Result) -> bytes:
    """ConfigError for a text that cannot be sent."""
    try:
        return msgspec.msgpack.encode(message)
    except UnicodeEncodeError as e:
        raise ConfigError(f"An argument, path or variable of a remote run is no valid text: {e}") from e


def decode_message(data: bytes) -> Message:
    """A client's run; ConfigError if it is none."""
    try:
        return _messages.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise ConfigError(f"The body is no run of protocol {PROTOCOL}: {e}") from e


def decode(data: bytes, kind: type[T]) -> T:
    """A server's answer; SandboxError if it is something else, so that no run is graded by it."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as e:
        raise SandboxError(f"The sandbox server answered with something that is no {kind.__name__}: {e}") from e


def as_bytes(text: str | bytes) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text


def as_text(data: bytes) -> str:
    """ConfigError if the bytes are not what `as_bytes` makes of a text."""
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as e:
        raise ConfigError(f"A program or its input is no text: {e}") from e
