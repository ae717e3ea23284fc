"""A sandbox that runs each program in a new runner process, and keeps the next one ready.

All backends are this class with another launcher. Nothing is shared between two runs but the launcher, so the state that
a reset has to undo is: runs that are still going.
"""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ludic.sandbox.interface import (
    Bind,
    CommandResult,
    CompileResult,
    CompileStatus,
    ExecutionResult,
    RunStatus,
    SandboxError,
    SandboxLimits,
)
from ludic.sandbox.run import PROGRAM, Job
from ludic.sandbox.runner_process import RawRun, RunnerProcess, compile_verdict, run_verdict, termination
from ludic.types import ConfigError

BASE_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # the order of a set must not decide whether a program passes
    "OMP_NUM_THREADS": "1",  # numerical libraries would start a thread per core of the host
    "OPENBLAS_NUM_THREADS": "1",
}


class Launcher(Protocol):
    """Starts cells of one kind."""

    async def start(self, limits: SandboxLimits, binds: Sequence[Bind] = ()) -> RunnerProcess:
        """A cell that is ready. SandboxError when that cannot be had."""
        ...


class ProcessSandbox:
    """See ludic.sandbox.interface: Sandbox and CommandSandbox."""

    def __init__(self, launcher: Launcher, limits: SandboxLimits | None = None) -> None:
        self._launcher = launcher
        self._limits = limits or SandboxLimits()
        self._spare: asyncio.Task[RunnerProcess] | None = None
        self._runs: set[asyncio.Task[RawRun]] = set()
        self._python_version = ""
        self._closed = False

    @property
    def python_version(self) -> str:
        return self._python_version

    async def reset(self) -> None:
        """End what still runs and have a fresh cell ready."""
        await self._end_runs()
        if self._spare is not None and self._spare.done() and not _is_good(self._spare):
            await self._drop_spare()
        self._prepare()
        assert self._spare is not None, "prepared above"
        self._python_version = (await asyncio.shield(self._spare)).python_version

    async def close(self) -> None:
        """End everything. No run can be started afterwards."""
        self._closed = True
        await self._end_runs()
        await self._drop_spare()

    async def compile(self, code: str, *, timeout_s: float = 5.0) -> CompileResult:
        job = self._python_job(code, timeout_s=timeout_s, limits=self._limits, compile_only=True)
        seen = await self._run(job)
        status, detail = run_verdict(seen)
        if status is RunStatus.SANDBOX_ERROR:
            raise SandboxError(detail)
        return compile_verdict(seen)

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
        limits = replace(self._limits, memory_mb=memory_limit_mb or self._limits.memory_mb)
        job = self._python_job(
            code,
            stdin=stdin.encode("utf-8", "surrogatepass"),
            skip_compile=skip_compile,
            timeout_s=timeout_s,
            limits=limits,
            env={**BASE_ENV, **(env_vars or {})},
        )
        return ExecutionResult(**await self._facts(job))

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
        found: dict[str, bytes] = {}
        return CommandResult(**await self._facts(job, binds, found), outputs=found)

    # --- one run ------------------------------------------------------------------------------------------------

    async def _facts(
        self, job: Job, binds: Sequence[Bind] = (), outputs: dict[str, bytes] | None = None
    ) -> dict[str, Any]:
        """The fields of an ExecutionResult."""
        started = time.perf_counter()
        try:
            seen = await self._run(job, binds)
        except SandboxError as e:
            compiled = CompileResult(status=CompileStatus.UNKNOWN_ERROR, error_message=str(e))
            return {"compile_result": compiled, "run_status": RunStatus.SANDBOX_ERROR, "detail": str(e)}
        compiled = compile_verdict(seen)
        status, detail = run_verdict(seen)
        exit_code, signal_number = termination(seen)
        if outputs is not None:
            outputs.update(seen.outputs)
        total_ms = (time.perf_counter() - started) * 1000.0
        ending = seen.ending
        ran = status is not RunStatus.NOT_RUN
        return {
            "compile_result": compiled,
            "run_status": status,
            "stdout": seen.stdout.decode("utf-8", "replace"),
            "stderr": seen.stderr.decode("utf-8", "replace"),
            "exit_code": exit_code if ran else None,
            "signal": signal_number if ran else None,
            "compile_duration_ms": compiled.duration_ms,
            "run_duration_ms": max(0.0, (ending.run_ms if ending else total_ms) - compiled.duration_ms) if ran else 0.0,
            "total_duration_ms": total_ms,
            "peak_memory_bytes": seen.group_peak or (ending.peak if ending else None),
            "cpu_time_ms": ending.cpu_ms if ending else None,
            "output_truncated": ending is not None and ending.overflow,
            "detail": detail,
        }

    async def _run(self, job: Job, binds: Sequence[Bind] = ()) -> RawRun:
        """In a separate task, so that a reset can end it."""
        if self._closed:
            raise SandboxError("This sandbox is closed. Check another one out of the pool.")
        task = asyncio.create_task(self._run_in_runner(job, binds))
        self._runs.add(task)
        task.add_done_callback(self._runs.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if task.cancelled() and not _is_being_cancelled():
                raise SandboxError("The sandbox was reset during the run.") from None
            raise

    async def _run_in_runner(self, job: Job, binds: Sequence[Bind]) -> RawRun:
        cell = await self._take(job.limits, binds)
        try:
            return await cell.run(job)
        finally:
            self._prepare()

    # --- cells --------------------------------------------------------------------------------------------------

    async def _take(self, limits: SandboxLimits, binds: Sequence[Bind]) -> RunnerProcess:
        """The spare cell where it is good enough, else one made for these limits."""
        spare, fits = self._spare, limits.memory_mb <= self._limits.memory_mb and not binds
        if spare is not None and fits and limits.workspace_mb == self._limits.workspace_mb:
            self._spare = None
            with contextlib.suppress(SandboxError):  # what failed in the background gets a second chance
                try:
                    cell = await spare
                except asyncio.CancelledError:
                    if spare.done() and _is_good(spare):
                        await spare.result().close()
                    raise
                if cell.is_alive:
                    return cell
                await cell.close()
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

    async def _end_runs(self) -> None:
        runs = list(self._runs)
        for run in runs:
            run.cancel()
        await asyncio.gather(*runs, return_exceptions=True)

    def _python_job(self, code: str, **settings: Any) -> Job:
        return Job(
            files={PROGRAM: code.encode("utf-8", "surrogatepass")},
            **settings,
        )


def _is_good(spare: asyncio.Task[RunnerProcess]) -> bool:
    return not spare.cancelled() and spare.exception() is None and spare.result().is_alive


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _bytes(content: str | bytes) -> bytes:
    return content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
