"""Python processes without the five seconds that torch and transformers take to be imported in each of them.

They are forked from a server that has imported, and done, nothing else; what they run, they run as `python -m …` and
`python script.py` do, with their own folder, variables and output. Where a test is about the start of a program
itself, or about torchrun, it takes a fresh interpreter.
"""

import atexit
import gc
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from ludic.http.address import free_port

ROOT = Path(__file__).parents[1]
PRELOADED = [
    "torch.distributed.fsdp", "torch.distributed.checkpoint", "transformers.models.llama.modeling_llama",
    "transformers.models.auto.modeling_auto", "transformers.generation", "peft", "ludic.cli.main", "ludic.cli.args", "ludic.run.run",
    "ludic.inference.local", "ludic.training.trainer", "ludic.distributed.fsdp",
]  # fmt: skip
"""What cannot be imported is left to the processes, which then say so themselves."""
ALWAYS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
"""These are read when modules are imported, so they are the server's already."""


class Forked:
    """A process; the methods are those of subprocess.Popen."""

    def __init__(self, process: Any, out: Path, err: Path) -> None:
        self._process, self._out, self._err = process, out, err
        self.pid: int = process.pid

    @property
    def returncode(self) -> int | None:
        code: int | None = self._process.exitcode
        return code

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout or 0.0)
        return self.returncode

    def said(self) -> str:
        """On its standard output, up to now."""
        return self._out.read_text(errors="replace") if self._out.exists() else ""

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has said, when it has ended."""
        self.wait(timeout)
        return self._out.read_text(errors="replace"), self._err.read_text(errors="replace")

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def call(function: Callable[..., Any], *arguments: Any, name: str = "") -> Any:
    """A function in a separate process: a multiprocessing.Process that has been started."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, ALWAYS):
        forkserver.ensure_running()
    process = context.Process(target=function, args=arguments, name=name or None, daemon=True)
    process.start()
    return process


def python(
    *command: object,
    cwd: Path | None = None,
    environment: Mapping[str, str | None] | None = None,
    output: Path | None = None,
    executable: str = sys.executable,
) -> Forked:
    """`python -m module …` or `python script.py …`. A variable of None is taken away. With `output`, both streams are appended to
    that file. `executable` is the interpreter that the process starts itself."""
    folder = Path(tempfile.mkdtemp(prefix="ludic-forked-"))
    out, err = (folder / "out", folder / "err") if output is None else (output, output)
    given: dict[str, str | None] = {**os.environ, **ALWAYS, **(environment or {})}
    environ = {name: value for name, value in given.items() if value is not None}
    arguments = [str(word) for word in command]
    streams = (str(out), str(err))
    process = call(_run, arguments, str(cwd or Path.cwd()), environ, *streams, executable, name=" ".join(arguments[:2]))
    started = Forked(process, out, err)
    weakref.finalize(started, shutil.rmtree, folder, ignore_errors=True)
    return started


def _run(arguments: list[str], cwd: str, environ: dict[str, str], out: str, err: str, executable: str) -> None:
    gc.freeze()  # a pass over what the server has imported would take a quarter of a second, and copy all of its pages
    sys.executable = executable
    for number, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves run in the background
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path[:0] = [path for path in environ["PYTHONPATH"].split(os.pathsep) if path]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            sys.path.insert(0, cwd)
            sys.modules.pop(arguments[1], None)  # it may be among what was preloaded
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out


# --- several as one ---


@dataclass(frozen=True, slots=True)
class Finished:
    """A group that has ended, by itself or because its time was up."""

    code: int | None
    """None: its time was up."""
    output: str


def ranks(num: int, module: str, *arguments: str, timeout_s: float) -> Finished:
    """`torchrun --nproc-per-node NUM -m MODULE …`: the same variables, and when one rank fails the others are ended, too."""
    with tempfile.TemporaryDirectory(prefix="ludic-ranks-") as folder:
        return _ranks(num, ["-m", module, *arguments], Path(folder) / "output", time.monotonic() + timeout_s)


def _ranks(num: int, command: list[str], output: Path, deadline: float) -> Finished:
    meeting = {"WORLD_SIZE": str(num), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    group = [
        python(
            *command, cwd=ROOT, output=output,
            environment={**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(num)
    ]  # fmt: skip
    code = _ended(group, deadline)
    for rank in group:
        rank.kill()
        rank.wait()
    return Finished(code, output.read_text(errors="replace"))


def _ended(group: Sequence[Forked], deadline: float) -> int | None:
    while time.monotonic() < deadline:
        codes = [rank.poll() for rank in group]
        if any(codes):
            _end(group)
            return 1
        if None not in codes:
            return 0
        time.sleep(0.05)
    return None


def _end(group: Sequence[Forked]) -> None:
    """As torchrun does: asked first."""
    for rank in group:
        rank.terminate()
    deadline = time.monotonic() + 30
    while any(rank.poll() is None for rank in group) and time.monotonic() < deadline:
        time.sleep(0.05)
