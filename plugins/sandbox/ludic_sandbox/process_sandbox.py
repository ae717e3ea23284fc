"""`ProcessSandbox`: runs each program in a new runner process, keeps the next one ready, and chooses the status of a run.

Each backend is this class with its own launcher. Two runs share nothing but the launcher, so a reset only has to end running jobs.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from ludic.tasks import cancel_all
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
from ludic_sandbox.runner.runner_process import PROGRAM, ExitFacts, Job, RawRun, RunnerProcess

T = TypeVar("T")
BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide whether a program passes
    "OMP_NUM_THREADS": "1",  # numerical libraries would start a thread per core of the host
    "OPENBLAS_NUM_THREADS": "1",
}


class Launcher(Protocol):
    """Starts the runner processes of one backend."""

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        """A runner that is ready; SandboxError if it does not start."""
        ...


class ActiveRuns(Generic[T]):
    """The runs of one sandbox, each in a separate task, so that a reset can end them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[T]] = set()

    async def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result; SandboxError if `end` was called meanwhile."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not _is_being_cancelled():
                raise SandboxError("The sandbox was reset during the run.") from None
            raise

    async def end(self) -> None:
        """End all runs and wait until they have ended."""
        await cancel_all(self._tasks)


class ProcessSandbox:
    """Implements Sandbox and CommandSandbox of ludic_sandbox.interface."""

    def __init__(self, launcher: Launcher, limits: SandboxLimits | None = None, *, keep_spare: bool = True) -> None:
        """`keep_spare`: start the runner of the next run beforehand; a run with binds cannot use it."""
        self._launcher = launcher
        self._keeps_spare = keep_spare
        self._limits = limits or SandboxLimits()
        self._spare: asyncio.Task[RunnerProcess] | None = None
        self._runs: ActiveRuns[RawRun] = ActiveRuns()
        self._python_version = ""
        self._closed = False

    @property
    def python_version(self) -> str:
        return self._python_version

    async def reset(self) -> None:
        """End running jobs and have a fresh runner ready."""
        await self._runs.end()
        if self._spare is not None and self._spare.done() and not _is_good(self._spare):
            await self._drop_spare()
        self._prepare()
        assert self._spare is not None, "prepared above"
        self._python_version = (await asyncio.shield(self._spare)).python_version

    async def close(self) -> None:
        """End everything; no run can start afterwards."""
        self._closed = True
        await self._runs.end()
        await self._drop_spare()

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        raw = await self._run(
            Job(files={PROGRAM: _bytes(code)}, timeout_s=timeout_s, limits=self._limits, compile_only=True)
        )
        status, detail = run_verdict(raw)
        if status is RunStatus.SANDBOX_ERROR:
            raise SandboxError(detail)
        return compile_verdict(raw)

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
        job = Job(
            files={PROGRAM: _bytes(code)},
            stdin=_bytes(stdin),
            skip_compile=skip_compile,
            timeout_s=timeout_s,
            limits=replace(self._limits, memory_mb=memory_limit_mb or self._limits.memory_mb),
            env={**BASE_ENV, **(env_vars or {})},
        )
        _, facts = await self._facts(job)
        return ExecutionResult(**facts)

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
        if not argv:
            raise ConfigError("run_command got an empty argv. Its first entry is the program to run.")
        limits = replace(
            self._limits,
            memory_mb=memory_limit_mb or self._limits.memory_mb,
            max_processes=max_processes or self._limits.max_processes,
            workspace_mb=workspace_mb or self._limits.workspace_mb,
        )
        job = Job(
            argv=argv,
            files={path: _bytes(content) for path, content in (files or {}).items()},
            outputs=outputs,
            stdin=_bytes(stdin),
            timeout_s=timeout_s,
            limits=limits,
            env={**BASE_ENV, **(env_vars or {})},
        )
        found, facts = await self._facts(job, binds)
        return CommandResult(**facts, outputs=found)

    # --- one run ---

    async def _facts(self, job: Job, binds: Sequence[Bind] = ()) -> tuple[dict[str, bytes], dict[str, Any]]:
        """The output files, and the fields of an ExecutionResult."""
        started = time.perf_counter()
        try:
            raw = await self._run(job, binds)
        except SandboxError as e:
            compiled = CompileResult(status=CompileStatus.UNKNOWN_ERROR, error_message=str(e))
            return {}, {"compile_result": compiled, "run_status": RunStatus.SANDBOX_ERROR, "detail": str(e)}
        compiled, ending = compile_verdict(raw), raw.ending
        status, detail = run_verdict(raw)
        ran = status is not RunStatus.NOT_RUN
        exit_code, signal_number = termination(raw) if ran else (None, None)
        total_ms = (time.perf_counter() - started) * 1000.0
        return raw.outputs, {
            "compile_result": compiled,
            "run_status": status,
            "stdout": raw.stdout.decode("utf-8", "replace"),
            "stderr": raw.stderr.decode("utf-8", "replace"),
            "exit_code": exit_code,
            "signal": signal_number,
            "compile_duration_ms": compiled.duration_ms,
            "run_duration_ms": max(0.0, (ending.run_ms if ending else total_ms) - compiled.duration_ms) if ran else 0.0,
            "total_duration_ms": total_ms,
            "peak_memory_bytes": raw.group_peak or (ending.peak if ending else None),
            "cpu_time_ms": ending.cpu_ms if ending else None,
            "output_truncated": ending is not None and ending.overflow,
            "detail": detail,
        }

    async def _run(self, job: Job, binds: Sequence[Bind] = ()) -> RawRun:
        if self._closed:
            raise SandboxError("This sandbox is closed. Check another one out of the pool.")
        return await self._runs.run(self._run_in_runner(job, binds))

    async def _run_in_runner(self, job: Job, binds: Sequence[Bind]) -> RawRun:
        runner = await self._take(job.limits, binds)
        try:
            return await runner.run(job)
        finally:
            if self._keeps_spare:
                self._prepare()

    # --- runners ---

    async def _take(self, limits: SandboxLimits, binds: Sequence[Bind]) -> RunnerProcess:
        """The spare runner if it fits, else one made for these limits."""
        spare, fits = self._spare, limits.memory_mb <= self._limits.memory_mb and not binds
        if spare is not None and fits and limits.workspace_mb == self._limits.workspace_mb:
            self._spare = None
            with contextlib.suppress(SandboxError):  # after a failed start in the background another one is tried
                try:
                    runner = await spare
                except asyncio.CancelledError:
                    if spare.done() and _is_good(spare):
                        await spare.result().close()
                    raise
                if runner.is_alive:
                    return runner
                await runner.close()
        return await self._start(limits, binds)

    async def _start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        try:
            return await self._launcher.start(limits, binds)
        except OSError as e:  # out of processes, files, groups …
            raise SandboxError(f"The sandbox did not start: {e}") from e

    def _prepare(self) -> None:
        if self._spare is None and not self._closed:
            self._spare = asyncio.create_task(self._start(self._limits))

    async def _drop_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is None:
            return
        spare.cancel()
        await asyncio.wait([spare])
        if spare.cancelled() or isinstance(spare.exception(), SandboxError):
            return  # it has cleaned up after itself
        await spare.result().close()


def _is_good(spare: asyncio.Task[RunnerProcess]) -> bool:
    return not spare.cancelled() and spare.exception() is None and spare.result().is_alive


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content


# --- from a run to its result: the one place where a status is chosen ---


def compile_verdict(raw: RawRun) -> CompileResult:
    """The compiler's own record, or why there is none."""
    if raw.compiled is not None:
        return raw.compiled
    status, message = CompileStatus.UNKNOWN_ERROR, "The sandbox ended before it could compile."
    if raw.killed_for_memory:
        message = "The compiler ran out of memory."
    elif raw.timed_out:
        status, message = CompileStatus.TIMEOUT, "Compiling took too long."
    elif raw.ending is not None:
        how = _signal_name(raw.ending.status) or f"exit code {os.waitstatus_to_exitcode(raw.ending.status)}"
        message = f"The compiler ended with {how}."
    return CompileResult(status=status, error_message=message)


def run_verdict(raw: RawRun) -> tuple[RunStatus, str]:
    """The status, and a sentence that explains it. A failed run has one reason: memory before time before the rest."""
    if raw.isolation_error and not raw.killed_for_memory:
        return RunStatus.SANDBOX_ERROR, raw.isolation_error
    if raw.compiled is None:
        known = raw.ending is not None or raw.timed_out or raw.killed_for_memory
        return (
            (RunStatus.NOT_RUN, "") if known else (RunStatus.SANDBOX_ERROR, raw.launcher_error or "It ended unasked.")
        )
    if not raw.compiled.success:
        return RunStatus.NOT_RUN, ""
    ending = raw.ending
    if ending is not None and ending.overflow:  # also when it had just ended by itself: the output is incomplete
        return RunStatus.KILLED, "It wrote more output than it may."
    if ending is not None and ending.status == 0:
        # A program may handle that a child of it was killed for memory.
        return RunStatus.SUCCESS, "A process of it was killed for memory." if raw.killed_for_memory else ""
    if raw.killed_for_memory or (ending is not None and (ending.memory_error or _died_full(ending, raw.memory_limit))):
        return RunStatus.MEMORY_EXCEEDED, "It used more memory than it may."
    if raw.timed_out:
        return RunStatus.TIMEOUT, "It ran longer than it may."
    if ending is None:
        return RunStatus.KILLED, "It ended the whole sandbox."
    if os.WIFSIGNALED(ending.status):
        if os.WTERMSIG(ending.status) == signal.SIGXCPU:
            return RunStatus.TIMEOUT, "It used more CPU time than it may."
        return RunStatus.KILLED, f"It was ended by {_signal_name(ending.status)}."
    return RunStatus.RUNTIME_ERROR, ""


def _died_full(ending: ExitFacts, limit: int) -> bool:
    """Killed with its memory used up; container engines do not always report the reason."""
    killed = os.WIFSIGNALED(ending.status) and os.WTERMSIG(ending.status) == signal.SIGKILL
    return killed and not ending.timed_out and 0 < 0.95 * limit <= ending.peak


def termination(raw: RawRun) -> tuple[int | None, int | None]:
    """Exit code and signal of the program; one of them is None, or both."""
    if raw.ending is None:
        return None, None
    code = os.waitstatus_to_exitcode(raw.ending.status)
    return (None, -code) if code < 0 else (code, None)


def _signal_name(status: int) -> str:
    """Like SIGKILL, for a process that a signal ended; else empty."""
    if not os.WIFSIGNALED(status):
        return ""
    number = os.WTERMSIG(status)
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
