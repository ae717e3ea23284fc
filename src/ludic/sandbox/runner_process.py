"""A cell: one fresh isolated process that is ready for a job, runs that one, and is gone.

Being ready beforehand is what makes a pool fast; serving one job only is what keeps a program from influencing the next.
How the process is isolated is the launcher's business (bubblewrap, containers, plain); the conversation with the
supervisor inside is the same for all of them.
"""

import asyncio
import base64
import contextlib
import marshal
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Protocol

from ludic.sandbox.interface import MB, CompileResult, CompileStatus, RunStatus, SandboxError
from ludic.sandbox.process import Process, start_process
from ludic.sandbox.run import ExitFacts, Job, read_compile_record, read_exit_facts

_GRACE_S = 2.0
"""What a supervisor may take to notice that a program's time is up."""
_SECOND_LOOK_S = 0.5
"""If it was this process that had no time, the frames are there by then."""
_START_S = 60.0
"""From starting a process to its being ready; tens of milliseconds, unless the machine is drowning."""


@cache
def supervisor_command(magic: str = "") -> tuple[str, ...]:
    """Arguments for the Python inside. No bytecode is written, and no site module is loaded (the supervisor does it).

    `magic` is the mark of its bytecode, where known: if it is ours, the supervisor is compiled here, once for all runs.
    """
    source = (Path(__file__).parent / "supervisor.py").read_text()
    if magic == MAGIC_NUMBER.hex():
        code = base64.b64encode(marshal.dumps(compile(source, "<supervisor>", "exec", optimize=2))).decode()
        source = f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64('{code}')))"
    return ("-s", "-S", "-B", "-c", source)


@dataclass(kw_only=True, slots=True)
class RawRun:
    """All that came out of one run, before anyone judges it."""

    compiled: CompileResult | None = None
    ending: ExitFacts | None = None
    """None when the supervisor was gone before it could tell."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    outputs: dict[str, bytes] = field(default_factory=dict)
    memory_limit: int = 0
    """Bytes that the run was given."""
    timed_out: bool = False
    killed_for_memory: bool = False
    """The kernel killed a process of it because the limit of all together was reached."""
    group_peak: int | None = None
    """Bytes of all processes together, where the kernel counts."""
    complaint: str = ""
    """What the launcher or the supervisor wrote on its own stderr; empty in a healthy sandbox."""


class Isolation(Protocol):
    """What holds the processes of one cell: ends them all, and limits and measures their memory together."""

    async def identify(self) -> None:
        """The supervisor inside is ready and alive: get hold of what `end` will need."""
        ...

    def begin(self, limit_bytes: int) -> None:
        """A run with this limit begins."""
        ...

    async def end(self) -> None:
        """Kill every process and wait until none is left. Calling it again does nothing."""
        ...

    def memory(self) -> tuple[int | None, bool]:
        """Peak bytes of all together (None: not counted), and whether one was killed for memory. After the end."""
        ...


class RunnerProcess:
    """Made by a launcher. Use `run` once, or `close`."""

    def __init__(
        self,
        process: Process,
        enclosure: Isolation,
        *,
        workspace: str,
        limit_processes: bool,
    ) -> None:
        self._process = process
        self._enclosure = enclosure
        self._workspace = workspace
        self._limit_processes = limit_processes
        self._header: bytes | None = None
        self.python_version = ""
        """Known once it is ready."""

    @property
    def pid(self) -> int:
        """Of the outer process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_running

    async def ready(self) -> None:
        """Wait until the supervisor inside says that it takes a job. A cell that does not come to that is closed."""
        try:
            async with asyncio.timeout(_START_S):
                letter, payload = await self._frame()
            assert letter == b"R", "the supervisor begins with R"
            self.python_version = payload.decode()
            await self._enclosure.identify()
        except (TimeoutError, asyncio.IncompleteReadError) as e:
            await self.close()
            raise SandboxError(f"The sandbox did not start: {await self._complaint() or self._exit()}") from e
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Job) -> RawRun:
        """Run the job to its end, by itself or by its limits; afterwards no process of it is left."""
        seen = RawRun(memory_limit=job.limits.memory_mb * MB)
        feeding = asyncio.create_task(self._feed(job))
        try:
            self._enclosure.begin(seen.memory_limit)
            await self._watch(job, seen)
        except OSError as e:
            raise SandboxError(f"The sandbox could not limit memory: {e}") from e
        finally:
            feeding.cancel()
            await self.close()
        seen.group_peak, seen.killed_for_memory = self._enclosure.memory()
        if seen.ending is None:
            seen.complaint = await self._complaint()
        return seen

    async def close(self) -> None:
        """End every process of the cell and wait until they are gone."""
        try:
            await self._enclosure.end()
        finally:
            self._process.kill()
            await self._process.wait()
            self._process.close_pipes()

    async def _feed(self, job: Job) -> None:
        with contextlib.suppress(ConnectionError):  # a program may end without reading its input
            self._process.stdin.write(job.encode(self._workspace, limit_processes=self._limit_processes))
            self._process.stdin.write(job.stdin)
            await self._process.stdin.drain()
            self._process.stdin.close()

    async def _watch(self, job: Job, seen: RawRun) -> None:
        """Read frames to the last one, or until the supervisor no longer answers."""
        with contextlib.suppress(asyncio.IncompleteReadError):  # no last frame: `RawRun` has no ending
            while seen.ending is None:
                if not await self._next(job, seen):
                    seen.timed_out = True
                    return

    async def _next(self, job: Job, seen: RawRun) -> bool:
        """Wait for a frame, longer than the supervisor's own clock may take. False when none comes."""
        for seconds in (job.timeout_s + _GRACE_S, _SECOND_LOOK_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._note(job, seen)
                    return True
        return False

    async def _note(self, job: Job, seen: RawRun) -> None:
        """Take one frame into account."""
        letter, payload = await self._frame()
        match letter:
            case b"C":
                seen.compiled = read_compile_record(payload)
            case b"O":
                seen.stdout += payload
            case b"E":
                seen.stderr += payload
            case b"F":
                index, _, content = payload.partition(b" ")
                seen.outputs[job.outputs[int(index)]] = content
            case b"X":
                seen.ending = read_exit_facts(payload)
                seen.timed_out = seen.ending.timed_out

    async def _frame(self) -> tuple[bytes, bytes]:
        # Kept over an interruption, which must not lose the place in the stream.
        if self._header is None:
            self._header = await self._process.stdout.readexactly(5)
        payload = await self._process.stdout.readexactly(int.from_bytes(self._header[1:], "big"))
        letter, self._header = self._header[:1], None
        return letter, payload

    async def _complaint(self) -> str:
        """The last line, which is the one that says what was wrong."""
        lines = (await self._process.stderr.read(100_000)).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _exit(self) -> str:
        return f"it ended with exit code {self._process.returncode} and without a word."


async def start_runner(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    enclosure: Isolation,
    workspace: str,
    limit_processes: bool = True,
    stdin_owner: int | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
) -> RunnerProcess:
    """Start the outer process; `ready` waits for the one inside.

    `workspace` is the writable folder inside. `limit_processes` is off where RLIMIT_NPROC would count processes of others.
    `stdin_owner`: the user that the program runs as, where it is not ours. It may open /dev/stdin then.
    """
    try:
        process = await start_process(
            argv, env=env, stdin_owner=stdin_owner, pass_fds=pass_fds, new_session=new_session
        )
    except OSError as e:
        raise SandboxError(f"The sandbox did not start: {argv[0]}: {e.strerror}") from e
    return RunnerProcess(process, enclosure, workspace=workspace, limit_processes=limit_processes)


# From what was seen of a run to its result: the one place where a status is chosen.


def compile_verdict(seen: RawRun) -> CompileResult:
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


def run_verdict(seen: RawRun) -> tuple[RunStatus, str]:
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


def _died_full(ending: ExitFacts, limit: int) -> bool:
    """Killed with its memory used up. Container engines do not always say that it was for that."""
    killed = os.WIFSIGNALED(ending.status) and os.WTERMSIG(ending.status) == signal.SIGKILL
    return killed and not ending.timed_out and 0 < 0.95 * limit <= ending.peak


def termination(seen: RawRun) -> tuple[int | None, int | None]:
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
