"""vLLM servers without the half minute of computing that importing vLLM takes, once in each of their two processes.

They are forked from a process of vLLM's interpreter that has imported it and done nothing else: this file, run as a program
there. Where a test is about the start or the end of a server's processes, it takes a server that begins as users' do.
"""

import atexit
import json
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ENTRY_POINT = "vllm.entrypoints.launchers.api_server.entry"
TICK_S = 0.05


# --- in vLLM's interpreter ---


def main() -> None:
    """Read one request a line, answer each with one line; end the servers when there are no more."""
    import importlib

    for module in (ENTRY_POINT, "vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker"):
        importlib.import_module(module)
    alive: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        answer = fork(alive, **request["fork"]) if "fork" in request else ended(alive, request["ended"])
        sys.stdout.write(f"{json.dumps(answer)}\n")
        sys.stdout.flush()
    for pid in alive:
        os.killpg(pid, signal.SIGKILL)


def fork(alive: set[int], arguments: list[str], environment: dict[str, str], log: str) -> int:
    if pid := os.fork():
        alive.add(pid)
        return pid
    code = 1
    try:
        os.setsid()
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            file = os.open(path, flags, 0o644)
            os.dup2(file, number)
            os.close(file)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = arguments
        serve()
        code = 0
    finally:  # whatever it raised, this process must not go on reading requests
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def serve() -> None:
    import multiprocessing

    import vllm.model_executor.models.registry as registry
    import vllm.v1.engine.utils as engines

    engines.get_mp_context = lambda: multiprocessing.get_context("fork")  # on a CPU vLLM says spawn
    registry._run_in_subprocess = lambda function: function()  # a model of a new kind is looked at in another process
    sys.modules.pop(ENTRY_POINT)
    runpy.run_module(ENTRY_POINT, run_name="__main__", alter_sys=True)


def ended(alive: set[int], pid: int) -> int | None:
    if pid in alive and os.waitpid(pid, os.WNOHANG)[0] == 0:
        return None
    alive.discard(pid)
    return 0


# --- in the tests' ---


class Template:
    """The process that servers are forked from; it ends with this one."""

    def __init__(self, python: str, environment: Mapping[str, str]) -> None:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([python, __file__], env={**environment}, stderr=subprocess.DEVNULL, **pipes)
        atexit.register(self.end)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(request)}\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def end(self) -> None:
        self._process.communicate()


class WarmProcess:
    """The methods of subprocess.Popen that VLLMServerProcess uses."""

    def __init__(self, template: Template, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._template = template
        self._code: int | None = None
        self.pid: int = template.ask(fork={"arguments": [*arguments], "environment": {**environment}, "log": str(log)})

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._template.ask(ended=self.pid)
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout if timeout is not None else float("inf"))
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a vLLM server", timeout or 0.0)
            time.sleep(TICK_S)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


if __name__ == "__main__":
    main()
