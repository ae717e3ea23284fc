"""`ContainerWorkspace`: a task in a container of podman or docker, with the image that its Dockerfile builds.

RUN, FROM and USER work here. The container has no network unless the task asks for one, and limits on memory and processes; it
runs as the image's user, often root inside. Commands run through `exec`; after each, every process but the container's first is
killed.
"""

import asyncio
import hashlib
import io
import os
import shutil
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from weakref import WeakKeyDictionary

from ludic.types import ConfigError
from ludic_sandbox import SandboxError, SandboxLimits
from ludic_sandbox.containers import engine_args, engine_problem
from ludic_sandbox.harbor.task import HarborTask
from ludic_sandbox.harbor.workspace import HOME, IN_FOLDER, LOST, CommandOutput, Workspace, WorkspaceCommand
from ludic_sandbox.interface import MB

_BUILD_S = 600.0
"""Harbor's default for building an image."""
_ENGINE_S = 120.0
_KILL = "kill -9 -1 2>/dev/null; exit 0"
_PROCESSES = ("--ulimit", "nproc=4096:4096")
"""Without it podman asks for more than it may where its user has a limit."""
_MAX_FILE = 1 << 20
_building: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]]" = WeakKeyDictionary()


class ContainerWorkspace(Workspace):
    """One container, which `close` removes."""

    def __init__(self, engine: str, name: str, limits: SandboxLimits) -> None:
        super().__init__()
        self._engine = engine
        self._name = name
        self._limits = limits
        self._is_lost = False

    @classmethod
    async def open(
        cls, engine: str, task: HarborTask, limits: SandboxLimits, *, run_args: Sequence[str] = ()
    ) -> "ContainerWorkspace":
        """Build the task's image, unless it is there, and start a container. `run_args` are further arguments of `run`."""
        if problem := await asyncio.to_thread(engine_problem, engine):
            raise ConfigError(f"workspace={engine!r} cannot be used: {problem}")
        image = await _image(engine, task)
        name = f"ludic-{os.getpid()}-{os.stat('/proc/self/ns/pid').st_ino}-{uuid.uuid4().hex}"
        arguments = [*await asyncio.to_thread(engine_args, engine), *run_args]
        command = workspace_command(engine, name, image, limits, arguments, has_network=needs_network(task))
        made = cls(engine, name, limits)
        code, output = await _engine(command, timeout_s=_ENGINE_S)
        if code != 0:
            await made.close()
            raise SandboxError(f"The container of the task {task.name} did not start: {_last_line(output)}")
        return made

    async def _run(self, asked: WorkspaceCommand) -> CommandOutput:
        if self._is_lost:
            return LOST
        if asked.files:
            code, output = await _engine(
                [self._engine, "cp", "-", f"{self._name}:/"], stdin=_archive(asked.files), timeout_s=_ENGINE_S
            )
            if code != 0:
                return await self._failed(output)
        variables = [part for pair in {"HOME": HOME, **asked.env}.items() for part in ("--env", "=".join(pair))]
        inside = ["/bin/bash", "-c", IN_FOLDER, "bash", asked.cwd, asked.text]
        started = time.monotonic()
        limit = self._limits.max_output_bytes
        code, output = await _engine(
            [self._engine, "exec", *variables, self._name, *inside], timeout_s=asked.timeout_s, max_bytes=limit
        )
        seconds = time.monotonic() - started
        killed, why = await _engine([self._engine, "exec", self._name, "/bin/sh", "-c", _KILL], timeout_s=_ENGINE_S)
        if killed != 0:
            return await self._failed(why)
        detail = (
            "" if code is not None else "It ran longer than it may." if len(output) <= limit else "It wrote too much."
        )
        return CommandOutput(
            text=output[:limit].decode("utf-8", "replace"),
            exit_code=code,
            detail=detail,
            timed_out=code is None and len(output) <= limit,
            outputs={path: data for path in asked.outputs if (data := await self._read(path)) is not None},
            seconds=seconds,
        )

    async def _failed(self, output: bytes) -> CommandOutput:
        """The engine refused: a container that has ended is lost; else it is an ordinary failure, such as a full disk."""
        code, state = await _engine(
            [self._engine, "inspect", "--format", "{{.State.Running}}", self._name], timeout_s=_ENGINE_S
        )
        self._is_lost = code != 0 or state.strip() != b"true"
        return LOST if self._is_lost else CommandOutput(text=output.decode("utf-8", "replace"), exit_code=1)

    async def _read(self, path: str) -> bytes | None:
        """The content of a regular file; None for anything else."""
        code, data = await _engine(
            [self._engine, "cp", f"{self._name}:{path}", "-"], timeout_s=_ENGINE_S, max_bytes=4 * _MAX_FILE
        )
        if code != 0:
            return None
        try:
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                (entry,) = archive.getmembers()
                file = archive.extractfile(entry) if entry.isreg() and entry.size <= _MAX_FILE else None
                return None if file is None else file.read()
        except (tarfile.TarError, ValueError):
            return None

    async def _close(self) -> None:
        self._is_lost = True
        await asyncio.shield(_engine([self._engine, "rm", "--force", self._name], timeout_s=_ENGINE_S))


def workspace_command(
    engine: str,
    name: str,
    image: str,
    limits: SandboxLimits,
    arguments: Sequence[str] = (),
    *,
    has_network: bool = False,
) -> list[str]:
    """The `run` command of a workspace: a container that waits."""
    memory = str(limits.memory_mb * MB)
    command = [engine, "run", "--detach", "--name", name, "--pull", "missing", "--stop-timeout", "0"]
    command += ["--security-opt", "no-new-privileges", "--memory", memory, "--memory-swap", memory]
    command += [
        "--pids-limit",
        str(limits.max_processes),
        "--ulimit",
        f"nofile={limits.max_open_files}:{limits.max_open_files}",
    ]
    command += ["--ulimit", "core=0:0", *_PROCESSES] + ([] if has_network else ["--network", "none"])
    return [*command, *arguments, "--entrypoint", "/bin/sh", image, "-c", "while :; do sleep 3600; done"]


def needs_network(task: HarborTask) -> bool:
    """True if the task asks for a network; Harbor's default is not counted."""
    return any(need.name == "network" for need in task.needs)


async def _image(engine: str, task: HarborTask) -> str:
    """The prebuilt image, or the one of the Dockerfile, named by the content of the build context."""
    if task.image:
        return task.image
    if task.context is None:
        raise ConfigError(f"The task {task.name} has neither a Dockerfile nor [environment].docker_image.")
    digest = hashlib.sha256()
    for path, data in sorted(task.context.items()):
        digest.update(f"{path}\0{len(data)}\0".encode() + data)
    tag = f"localhost/ludic-harbor:{digest.hexdigest()[:24]}"
    lock = _building.setdefault(asyncio.get_running_loop(), {}).setdefault(tag, asyncio.Lock())
    async with lock:
        if (await _engine([engine, "image", "inspect", tag], timeout_s=_ENGINE_S))[0] != 0:
            await _build(engine, tag, task)
    return tag


async def _build(engine: str, tag: str, task: HarborTask) -> None:
    folder = Path(tempfile.mkdtemp(prefix="ludic-build-"))
    try:
        for path, data in (task.context or {}).items():
            place = folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(data)
        arguments = [*await asyncio.to_thread(engine_args, engine), *_PROCESSES, "--ulimit", "nofile=1024:1024"]
        code, output = await _engine([engine, "build", *arguments, "--tag", tag, str(folder)], timeout_s=_BUILD_S)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if code != 0:
        raise ConfigError(f"`{engine} build` of the task {task.name} failed: {_last_line(output)}")


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path.lstrip("/"))
            entry.size, entry.mode = len(data), 0o755
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "no message"


async def _engine(
    command: Sequence[str], *, timeout_s: float, stdin: bytes = b"", max_bytes: int = 64 * MB
) -> tuple[int | None, bytes]:
    """Exit code and output of the engine; the code is None if it took too long or wrote more than `max_bytes`."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=tempfile.gettempdir(),  # conmon leaves an empty file `oom` in its folder when memory runs out
    )
    assert process.stdin is not None and process.stdout is not None, "both are pipes"
    output = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            if stdin:
                process.stdin.write(stdin)
            process.stdin.close()
            while (piece := await process.stdout.read(1 << 16)) and len(output) <= max_bytes:
                output += piece
            if len(output) > max_bytes:
                raise TimeoutError
            return await process.wait(), bytes(output)
    except TimeoutError:
        return None, bytes(output)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
