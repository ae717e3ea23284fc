"""A runner process: one fresh isolated process that is ready for a job, runs that one job, and ends.

Starting it beforehand makes a pool fast; serving one job only keeps a program from influencing the next. A launcher isolates it
(bubblewrap, containers, a plain subprocess); the messages to and from the supervisor inside are the same for all of them.
"""

import ast
import asyncio
import base64
import contextlib
import marshal
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import MAGIC_NUMBER
from pathlib import Path

from ludic.tasks import to_its_end
from ludic.types import ConfigError
from ludic_sandbox.interface import MB, CompileResult, CompileStatus, SandboxError, SandboxLimits
from ludic_sandbox.process import Process, start_process

PROGRAM = "main.py"
BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide whether a program passes
    "OMP_NUM_THREADS": "1",  # numerical libraries would start a thread per core of the host
    "OPENBLAS_NUM_THREADS": "1",
}
"""Variables of every program."""
_INTERPRETER_MB = 64
"""Address space of an interpreter without a program."""
_GRACE_S = 2.0
"""Time for a supervisor to notice that a program's time is up."""
_SECOND_LOOK_S = 0.5
"""If this process itself had no CPU time, the frames are there by then."""
_START_S = 60.0
"""Time for a process to get ready; it takes tens of milliseconds, unless the machine is overloaded."""


@cache
def supervisor_command(magic: str = "") -> tuple[str, ...]:
    """Arguments for the Python inside. No bytecode is written, and no site module is loaded (the supervisor does it).

    `magic` is the bytecode version of that Python, if known: if it is ours, the supervisor is compiled here, once for all runs.
    """
    source = (Path(__file__).parent / "supervisor.py").read_text()
    if magic == MAGIC_NUMBER.hex():
        code = base64.b64encode(marshal.dumps(compile(source, "<supervisor>", "exec", optimize=2))).decode()
        source = f"import binascii, marshal; exec(marshal.loads(binascii.a2b_base64('{code}')))"
    return ("-s", "-S", "-B", "-c", source)


# --- messages: a job for the supervisor, and its report ---


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """Either a Python program (the file main.py) or a command."""

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
    keep: bool = False
    """The runner stays for another job; processes that this one leaves are killed, and its stdin is empty."""
    folder: str = ""
    """Its working folder, to which its paths are relative. Default: the workspace."""

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
        """Length and content, as the supervisor reads them. The program starts in the workspace, which is also its HOME."""
        limits = self.limits
        rlimits = {
            "RLIMIT_AS": ((limits.address_space_mb or limits.memory_mb) + _INTERPRETER_MB) * MB,
            "RLIMIT_CPU": math.ceil(self.timeout_s * (os.cpu_count() or 1)) + 1,
            "RLIMIT_FSIZE": limits.workspace_mb * MB,
            "RLIMIT_NOFILE": limits.max_open_files,
            "RLIMIT_CORE": 0,
            **({"RLIMIT_NPROC": limits.max_processes} if limit_processes else {}),
        }
        body = {
            "argv": list(self.argv),
            "program": f"{workspace}/{PROGRAM}",
            "files": list(self.files.items()),
            "outputs": list(self.outputs),
            "env": {**BASE_ENV, "HOME": workspace, **self.env},
            "cwd": self.folder or workspace,
            "keep": self.keep,
            "compile_only": self.compile_only,
            "skip_compile": self.skip_compile,
            "seconds": self.timeout_s,
            "max_output_bytes": limits.max_output_bytes,
            "max_outputs_bytes": limits.max_outputs_bytes,
            "rlimits": rlimits,
        }
        data = marshal.dumps(body, 2)  # the format that every Python 3 reads
        return len(data).to_bytes(4, "big") + data


@dataclass(frozen=True, kw_only=True, slots=True)
class ExitFacts:
    """The supervisor's report of how the program ended."""

    status: int
    """The wait status of waitpid."""
    run_ms: float
    cpu_ms: float
    peak: int
    """Bytes of the largest process."""
    memory_error: bool
    """The program ended with an uncaught MemoryError, or claims so; believed only if it failed."""
    overflow: bool
    """It was killed because it wrote more than its limit."""
    timed_out: bool
    """It was killed because its time was up."""
    oom_kills: int = 0
    """Processes that the kernel killed because all together reached the limit; 0 where the supervisor cannot see its cgroup."""


def read_exit_facts(payload: bytes) -> ExitFacts:
    return ExitFacts(**ast.literal_eval(payload.decode()))


def read_compile_record(payload: bytes) -> CompileResult:
    status, message, line, column, ms = ast.literal_eval(payload.decode())
    return CompileResult(
        status=CompileStatus(status), error_message=message, error_line=line, error_column=column, duration_ms=ms
    )


@dataclass(kw_only=True, slots=True)
class RawRun:
    """Everything observed of one run, before a status is chosen."""

    compiled: CompileResult | None = None
    ending: ExitFacts | None = None
    """None when the supervisor ended before it could report."""
    stdout: bytearray = field(default_factory=bytearray)
    stderr: bytearray = field(default_factory=bytearray)
    outputs: dict[str, bytes] = field(default_factory=dict)
    memory_limit: int = 0
    """In bytes."""
    timed_out: bool = False
    killed_for_memory: bool = False
    """The kernel killed a process because all processes together reached the limit."""
    group_peak: int | None = None
    """Bytes of all processes together, where the kernel counts them."""
    isolation_error: str = ""
    """The failure of the isolation while the program ran, by no act of the program."""
    launcher_error: str = ""
    """The last line that the launcher or the supervisor wrote to stderr; empty in a healthy sandbox."""


# --- the process ---


class Isolation:
    """Holds the processes of one runner: ends them all, and, where possible, limits and measures their memory together."""

    async def identify(self) -> None:
        """The supervisor is ready and alive: get hold of what `end` needs."""

    def begin(self, limit_bytes: int) -> None:
        """A run with this limit begins."""

    async def end(self) -> None:
        """Kill every process and wait until none is left. Calling it again does nothing."""
        raise NotImplementedError

    async def finish(self) -> None:
        """The outer process has ended too: remove what it may have made since `end`."""

    def memory(self) -> tuple[int | None, bool]:
        """After the end: peak bytes of all processes together (None: not counted), and whether one was killed for memory."""
        return None, False

    def failure(self, *, timed_out: bool, was_killed: bool) -> str:
        """After the end of a run without a report: how the isolation itself failed; empty if the program may be the cause.

        `timed_out`: its time was up; else its stream of frames ended. `was_killed`: SIGKILL ended the outer process.
        """
        return ""


class GroupIsolation(Isolation):
    """A process group, and a folder that is removed with it; a program without a process namespace can leave the group."""

    def __init__(self, folder: str | None = None) -> None:
        self.group: int | None = None
        self._folder = folder

    async def end(self) -> None:
        group, self.group = self.group, None
        if group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


class RunnerProcess:
    """Made by a launcher. Use `run` once (more often with jobs that `keep` it), or `close`."""

    def __init__(self, process: Process, isolation: Isolation, *, workspace: str, limit_processes: bool) -> None:
        self._process = process
        self._isolation = isolation
        self._workspace = workspace
        self._limit_processes = limit_processes
        self._header: bytes | None = None
        self.python_version = ""
        """Known once it is ready."""

    @property
    def pid(self) -> int:
        """Number of the outer process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.is_running

    async def ready(self) -> None:
        """Wait until the supervisor inside takes a job; on failure close the runner and raise."""
        try:
            async with asyncio.timeout(_START_S):
                letter, payload = await self._frame()
            assert letter == b"R", "the supervisor begins with R"
            self.python_version = payload.decode()
            await self._isolation.identify()
        except (TimeoutError, asyncio.IncompleteReadError) as e:
            await self.close()
            why = await self._last_error() or f"exit code {self._process.returncode} without a message."
            raise SandboxError(f"The sandbox did not start: {why}") from e
        except BaseException:
            await self.close()
            raise

    async def run(self, job: Job) -> RawRun:
        """Run the job until it ends by itself or by its limits; no process of it is left afterwards.

        After a job with `keep` the runner takes the next one, unless the job has ended it, or this is cancelled: it is closed then.
        """
        assert not (job.keep and job.stdin), "a job with keep has no stdin"
        raw = RawRun(memory_limit=job.limits.memory_mb * MB)
        feeding = asyncio.create_task(self._feed(job))
        is_kept = False
        try:
            self._isolation.begin(raw.memory_limit)
            with contextlib.suppress(asyncio.IncompleteReadError):  # no last frame: `raw` has no ending
                while raw.ending is None and not raw.timed_out:
                    await self._next_frame(job, raw)
            is_kept = job.keep and raw.ending is not None
            was_killed = raw.ending is None and not raw.timed_out and await self._was_killed()
        except OSError as e:
            raise SandboxError(f"The sandbox could not limit memory: {e}") from e
        finally:
            feeding.cancel()
            if not is_kept:
                await self.close()
        if not is_kept:
            await self._explain(raw, was_killed)
        return raw

    async def close(self) -> None:
        """End every process and wait until they are gone, also if this is cancelled meanwhile: a loop that ends cancels its tasks,
        and a pool that is shut down because of it cancels them again."""
        await to_its_end(self._end())

    async def _end(self) -> None:
        try:
            await self._isolation.end()
        finally:
            self._process.kill()
            await self._process.wait()
            self._process.close_pipes()
            await self._isolation.finish()

    async def _explain(self, raw: RawRun, was_killed: bool) -> None:
        """After `close`: note what the isolation and the outer process know of the run."""
        raw.group_peak, raw.killed_for_memory = self._isolation.memory()
        if raw.ending is not None:
            raw.killed_for_memory = raw.killed_for_memory or raw.ending.oom_kills > 0
            return
        raw.isolation_error = self._isolation.failure(timed_out=raw.timed_out, was_killed=was_killed)
        raw.launcher_error = await self._last_error()

    async def _was_killed(self) -> bool:
        """True if SIGKILL has ended the outer process, after the end of its output."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_SECOND_LOOK_S):
                await self._process.wait()
        return self._process.returncode == -signal.SIGKILL

    async def _feed(self, job: Job) -> None:
        with contextlib.suppress(ConnectionError):  # a program may end without reading its input
            self._process.stdin.write(job.encode(self._workspace, limit_processes=self._limit_processes))
            self._process.stdin.write(job.stdin)
            await self._process.stdin.drain()
            if not job.keep:  # the pipe has the next jobs
                self._process.stdin.close()

    async def _next_frame(self, job: Job, raw: RawRun) -> None:
        """Read one frame. The wait is longer than the supervisor's own time limit: without a frame it hangs."""
        for seconds in (job.timeout_s + _GRACE_S, _SECOND_LOOK_S):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    letter, payload = await self._frame()
                break
        else:
            raw.timed_out = True
            return
        match letter:
            case b"C":
                raw.compiled = read_compile_record(payload)
            case b"O":
                raw.stdout += payload
            case b"E":
                raw.stderr += payload
            case b"F":
                index, _, content = payload.partition(b" ")
                raw.outputs[job.outputs[int(index)]] = content
            case b"X":
                raw.ending = read_exit_facts(payload)
                raw.timed_out = raw.ending.timed_out

    async def _frame(self) -> tuple[bytes, bytes]:
        if self._header is None:  # kept over a time-out, which must not lose the place in the stream
            self._header = await self._process.stdout.readexactly(5)
        payload = await self._process.stdout.readexactly(int.from_bytes(self._header[1:], "big"))
        letter, self._header = self._header[:1], None
        return letter, payload

    async def _last_error(self) -> str:
        """The last line of stderr, which names the problem."""
        lines = (await self._process.stderr.read(100_000)).decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


async def start_runner(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    isolation: Isolation,
    workspace: str,
    limit_processes: bool = True,
    stdin_owner: int | None = None,
    pass_fds: Sequence[int] = (),
    new_session: bool = False,
    cwd: str | None = None,
) -> RunnerProcess:
    """Start the outer process; `ready` waits for the one inside.

    `workspace` is the writable folder inside. `limit_processes` is off where RLIMIT_NPROC would count other processes too.
    `stdin_owner` is the user that the program runs as, if another: that user may then open /dev/stdin.
    """
    try:
        process = await start_process(
            argv, env=env, stdin_owner=stdin_owner, pass_fds=pass_fds, new_session=new_session, cwd=cwd
        )
    except OSError as e:
        raise SandboxError(f"The sandbox did not start: {argv[0]}: {e.strerror}") from e
    return RunnerProcess(process, isolation, workspace=workspace, limit_processes=limit_processes)
