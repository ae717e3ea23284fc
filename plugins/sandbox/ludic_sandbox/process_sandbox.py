"""`ProcessSandbox`: runs each program in a new runner process, keeps the next one ready, and chooses the status of a run.

Each backend is this class with its own launcher. Two runs share nothing but the launcher, so a reset only has to end running jobs.
"""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Coroutine, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ludic.tasks import cancel_all
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
from ludic_sandbox.pool import BaseSandboxPool
from ludic_sandbox.requests import Request, RequestSandbox, Result
from ludic_sandbox.runner.runner_process import ExitFacts, Job, RawRun, RunnerProcess

T = TypeVar("T")


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


class ProcessSandbox(RequestSandbox):
    """Sandbox and CommandSandbox of ludic_sandbox.interface on the runner processes of one launcher."""

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

    # --- one run ---

    async def _run(self, request: Request, binds: Sequence[Bind]) -> Result:
        if self._closed:
            raise SandboxError("This sandbox is closed. Check another one out of the pool.")
        started = time.perf_counter()
        raw = await self._runs.run(self._run_in_runner(request.job(self._limits), binds))
        if request.result_type is CompileResult:
            status, detail = run_verdict(raw)
            if status is RunStatus.SANDBOX_ERROR:
                raise SandboxError(detail)
            return compile_verdict(raw)
        outputs = {"outputs": raw.outputs} if request.result_type is CommandResult else {}
        result: ExecutionResult = request.result_type(**_facts(raw, started), **outputs)
        return result

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


class LauncherPool(BaseSandboxPool):
    """Sandboxes of one launcher; the pools of all local backends."""

    def __init__(self, launcher: Launcher, limits: SandboxLimits, **settings: Any) -> None:
        super().__init__(**settings)
        self._launcher = launcher
        self._limits = limits

    async def _make_sandbox(self) -> ProcessSandbox:
        return ProcessSandbox(self._launcher, self._limits)


def _is_good(spare: asyncio.Task[RunnerProcess]) -> bool:
    return not spare.cancelled() and spare.exception() is None and spare.result().is_alive


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


# --- from a run to its result: the one place where a status is chosen ---


def _facts(raw: RawRun, started: float) -> dict[str, Any]:
    """The fields of an ExecutionResult."""
    compiled, ending = compile_verdict(raw), raw.ending
    status, detail = run_verdict(raw)
    ran = status is not RunStatus.NOT_RUN
    exit_code, signal_number = termination(raw) if ran else (None, None)
    total_ms = (time.perf_counter() - started) * 1000.0
    return {
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
