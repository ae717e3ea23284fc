"""A vLLM server as a child process (`ludic.util.processes`): start, wait until it is ready, stop, restart, quote its errors."""

import atexit
import re
import sys
import threading
import time
from pathlib import Path

from ludic.http.address import check_port
from ludic.http.client import EndpointError, get_without_loop
from ludic.types import LudicError
from ludic.util.processes import ChildProcess, ChildProcesses, how_it_ended
from ludic_vllm.command import ServerCommand

_STOP_AFTER_S = 20.0
_LAST_LINES = 40
_LINE = 400
"""Maximum characters of a quoted line; vLLM lists all its models in one."""
_CAUSE = re.compile(
    r"^(?:\(.*?\) )*(?:\w+ [\d-]+ [\d:]+ \[.*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .+|.*: error: .+)$"
)


class ServerDied(LudicError, RuntimeError):
    """The server process ended while it was needed."""


class ServerNotReady(LudicError, TimeoutError):
    """The server process runs but does not respond in time."""


class VLLMServerProcess:
    """A server owned by this process. `start` after `stop` or `kill` starts it again on the same port."""

    def __init__(self, command: ServerCommand, *, log: Path, stream_output: bool = False) -> None:
        self.command = command
        self.log = log
        self.stream_output = stream_output
        self._children = ChildProcesses(log.parent)
        self._process: ChildProcess | None = None

    @property
    def url(self) -> str:
        return base_url(self.command.host, self.command.port)

    @property
    def control_token(self) -> str:
        return self.command.control_token

    @property
    def pid(self) -> int:
        return self._started().pid

    def start(self) -> None:
        """Start it; `wait_for_vllm_health` waits until it is ready."""
        if self._process is not None and self.poll() is None:
            raise ServerDied(f"The server at {self.url} is already running (process {self.pid}); stop it first.")
        check_port(self.command.host, self.command.port)
        self._process = self._children.start(
            self.log.stem, self.command.arguments, self.command.environment, grace_s=_STOP_AFTER_S
        )
        atexit.register(self.stop)
        if self.stream_output:
            threading.Thread(target=_follow, args=(self._process,), daemon=True).start()

    def poll(self) -> int | None:
        """The exit code (128 + n for signal n), or None while it runs."""
        return self._started().poll()

    def wait(self, timeout_s: float | None = None) -> int:
        return self._started().wait(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self._started().terminate()

    def stop(self, timeout_s: float = _STOP_AFTER_S) -> None:
        """Send SIGTERM; after `timeout_s`, SIGKILL."""
        if self._process is not None:
            self._process.stop(timeout_s)
            self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the server and all its workers."""
        self._started().kill()
        self._children.close()
        atexit.unregister(self.stop)

    def output(self) -> str:
        """Everything written since the last start."""
        return self._started().output()

    def _started(self) -> ChildProcess:
        assert self._process is not None, "the server has not been started"
        return self._process


def _follow(process: ChildProcess) -> None:
    """Copy the output to stderr until the process ends."""
    has_ended = False
    while not has_ended:
        has_ended = process.poll() is not None  # before reading, so that the last lines are not lost
        sys.stderr.write(process.read().decode("utf-8", "replace"))
        time.sleep(0.2)


def wait_for_vllm_health(host: str, port: int, proc: VLLMServerProcess | None = None, timeout_s: float = 180) -> None:
    """Return when the server is healthy; raise with its last output if `proc` dies or is not ready in time."""
    deadline = time.monotonic() + timeout_s
    while not is_healthy(host, port):
        if proc is not None and (code := proc.poll()) is not None:
            raise ServerDied(f"The vLLM server {how_it_ended(code)}. {last_words(proc.output())}")
        if time.monotonic() > deadline:
            said = last_words(proc.output()) if proc is not None else ""
            raise ServerNotReady(f"{base_url(host, port)}/health did not respond within {timeout_s:g} s. {said}")
        time.sleep(0.2)


def is_healthy(host: str, port: int) -> bool:
    """Return True if the server is up and ready for requests."""
    try:
        get_without_loop(f"{base_url(host, port)}/health", 5.0)
        return True
    except (OSError, EndpointError):
        return False


def base_url(host: str, port: int) -> str:
    """The URL of a server that listens on `host`."""
    name = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def last_words(output: str) -> str:
    """The first error in a server's output, since later ones usually follow from it, and the last lines."""
    if not output.strip():
        return "It wrote nothing."
    lines = [line if len(line) <= _LINE else f"{line[:_LINE]}…" for line in output.splitlines()]
    last = "Its last lines:\n" + "\n".join(lines[-_LAST_LINES:])
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        if found := _CAUSE.match(line.strip()):
            detail = f" {after.strip()}" if after.startswith(" ") else ""  # pydantic's details begin on the second line
            return f"Its first error: {found[1]}{detail}\n{last}"
    return last


def collect_proc_output(proc: VLLMServerProcess) -> str:
    """Everything the server has written."""
    return proc.output()
