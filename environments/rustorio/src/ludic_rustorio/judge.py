"""Judging a program: refused, compiled in one sandbox, run in another.

The program's own output decides nothing. It has won if Ludic's main got the goods and the clock back from it: main then writes a
secret that only it knows (see report.rs), and the number of ticks.
"""

import hashlib
import re
import secrets
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ludic.types import ConfigError
from ludic_rustorio.game import BuiltGame, Game
from ludic_rustorio.source_rules import refusal
from ludic_rustorio.toolchain import Toolchain
from ludic_sandbox import CommandResult, CommandSandbox, RunStatus, SandboxError, SandboxPool

_MAX_MESSAGE = 20_000
_REPORT = Path(__file__).with_name("report.rs").read_text(encoding="utf-8")


class Status(StrEnum):
    """The end of a program."""

    WON = "won"
    REFUSED = "refused"  # it breaks a rule of the source, and was not compiled
    COMPILE_ERROR = "compile_error"
    COMPILE_LIMIT = "compile_limit"  # the compiler ran out of time or memory
    PANICKED = "panicked"  # it ended without a victory
    RUN_LIMIT = "run_limit"  # it ran out of time, memory or output


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The end of one program."""

    status: Status
    ticks: int | None = None
    """Ticks of a game that was won."""
    message: str = ""
    """Output of the compiler or the program."""


_NOT_CACHED = (Status.COMPILE_LIMIT, Status.RUN_LIMIT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of one program."""

    compile_timeout_s: float = 60.0
    compile_memory_mb: int = 2048
    run_timeout_s: float = 10.0
    run_memory_mb: int = 256
    edition: str = "2021"
    """The edition of the Rust language."""

    def __post_init__(self) -> None:
        if min(self.compile_timeout_s, self.compile_memory_mb, self.run_timeout_s, self.run_memory_mb) <= 0:
            raise ConfigError(f"{self}: every limit must be above 0.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Compiles and runs programs of one game."""

    game: Game
    built: BuiltGame
    toolchain: Toolchain
    limits: Limits

    async def verdict(self, source: str, pool: SandboxPool) -> Verdict:
        """The verdict, cached per pool unless the program reached a limit, which a busy machine may cause."""
        if reason := refusal(source, self.game.head):
            return Verdict(status=Status.REFUSED, message=reason)
        code, game = _hash(source), _hash(f"{self.built.key}{self.game.main}{self.toolchain}{self.limits}")
        known = pool.get_cached(code, game)
        if isinstance(known, Verdict):
            return known
        sandbox = await pool.checkout(timeout_s=600.0)
        try:
            verdict = await self._tried(source, _for_commands(sandbox))
        finally:
            await pool.release(sandbox)
        if verdict.status not in _NOT_CACHED:
            pool.put_cached(code, game, verdict)
        return verdict

    async def _tried(self, source: str, sandbox: CommandSandbox) -> Verdict:
        compiled = await self._compile(source, sandbox)
        program = compiled.outputs.get("game")
        if compiled.run_status in (RunStatus.TIMEOUT, RunStatus.MEMORY_EXCEEDED, RunStatus.KILLED):
            return Verdict(status=Status.COMPILE_LIMIT, message=f"The compiler was stopped ({compiled.run_status}).")
        if program is None or compiled.run_status is not RunStatus.SUCCESS:
            return Verdict(status=Status.COMPILE_ERROR, message=compiled.stderr[:_MAX_MESSAGE])
        secret = secrets.token_hex(16)
        ran = await sandbox.run_command(
            ["./game"],
            files={"game": program},
            stdin=secret + "\n",
            timeout_s=self.limits.run_timeout_s,
            memory_limit_mb=self.limits.run_memory_mb,
        )
        return verdict_of(_sound(ran), secret)

    async def _compile(self, source: str, sandbox: CommandSandbox) -> CommandResult:
        """Compile the player's crate, then main, which uses it. Never with --cap-lints: it would permit unsafe code."""
        rustc = [self.toolchain.rustc_inside, "--edition", self.limits.edition, "-A", "warnings", *self.built.flags]
        rustc += ["--color", "never", "-C", "debuginfo=0"]
        player = [*rustc, "--crate-name", "player", "--crate-type", "rlib", "-F", "unsafe_code", "player.rs"]
        link = ["-C", f"linker={self.toolchain.linker}", "-C", "strip=symbols"]
        main = [*rustc, *link, "--crate-name", "game", "--extern", "player=libplayer.rlib", "main.rs"]
        result = await sandbox.run_command(
            ["/bin/sh", "-c", f"{shlex.join(player)} && {shlex.join(main)}"],
            files={"player.rs": source, "main.rs": self.game.main, "report.rs": _REPORT},
            outputs=["game"],
            binds=[*self.toolchain.binds(), *self.built.binds()],
            timeout_s=self.limits.compile_timeout_s,
            memory_limit_mb=self.limits.compile_memory_mb,
            max_processes=64,
            workspace_mb=256,
        )
        return _sound(result)


def verdict_of(ran: CommandResult, secret: str) -> Verdict:
    """The verdict on a run: won only if it ended successfully and main wrote the secret."""
    if ran.run_status in (RunStatus.TIMEOUT, RunStatus.MEMORY_EXCEEDED) or ran.output_truncated:
        return Verdict(status=Status.RUN_LIMIT, message=ran.run_status.value)
    reported = re.search(rf"^{secret} (\d+)$", ran.stdout, flags=re.MULTILINE)
    if reported is None or ran.run_status is not RunStatus.SUCCESS:
        said = ran.stderr.strip() or f"It ended without a victory ({ran.run_status})."
        return Verdict(status=Status.PANICKED, message=said[:_MAX_MESSAGE])
    return Verdict(status=Status.WON, ticks=int(reported[1]))


def _sound(result: CommandResult) -> CommandResult:
    if result.run_status is RunStatus.SANDBOX_ERROR:
        raise SandboxError(f"The sandbox failed, which says nothing about the program: {result.detail}")
    return result


def _for_commands(sandbox: object) -> CommandSandbox:
    if not isinstance(sandbox, CommandSandbox):
        raise ConfigError(
            f"{type(sandbox).__name__} runs only Python programs; Rustorio needs a sandbox that runs commands, such as "
            "bubblewrap's."
        )
    return sandbox


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
