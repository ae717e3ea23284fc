"""A vLLM server as a child process: start, wait, stop, restart.

Its output goes to a file, not to a pipe: an unread pipe fills up and blocks the server. The process leads its own session, so
that its workers can be stopped with it even if it died without stopping them. It ends when this process does, even
by SIGKILL (see die_with_parent).
"""

import atexit
import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ludic.http.address import check_port
from ludic.http.client import EndpointError, get_without_loop
from ludic.types import LudicError
from ludic.util.die_with_parent import PIPE_VARIABLE
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
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._our_end: int | None = None

    @property
    def url(self) -> str:
        return base_url(self.command.host, self.command.port)

    @property
    def control_token(self) -> str:
        return self.command.control_token

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> None:
        """Start it; `wait_for_vllm_health` waits until it is ready."""
        if self._process is not None and self.poll() is None:
            raise ServerDied(f"The server at {self.url} is already running (process {self.pid}); stop it first.")
        check_port(self.command.host, self.command.port)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        theirs, self._our_end = os.pipe()
        with self.log.open("ab") as file:
            self._log_start = file.tell()
            self._process = subprocess.Popen(
                self.command.arguments,
                env={**self.command.environment, PIPE_VARIABLE: str(theirs)},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs,),
            )
        os.close(theirs)
        atexit.register(self.stop)
        if self.stream_output:
            threading.Thread(target=self._follow, args=(self._process,), daemon=True).start()

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._running().poll()

    def wait(self, timeout_s: float | None = None) -> int:
        return self._running().wait(timeout_s)

    def terminate(self) -> None:
        """Send SIGTERM and return at once."""
        self._running().terminate()

    def stop(self, timeout_s: float = _STOP_AFTER_S) -> None:
        """Send SIGTERM; after `timeout_s`, SIGKILL."""
        if self._process is None:
            return
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and all its workers."""
        process = self._running()
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if self._our_end is not None:
            os.close(self._our_end)
            self._our_end = None
        atexit.unregister(self.stop)

    def output(self) -> str:
        """Everything written since the last start."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode("utf-8", "replace")

    def _running(self) -> "subprocess.Popen[bytes]":
        assert self._process is not None, "the server has not been started"
        return self._process

    def _follow(self, process: "subprocess.Popen[bytes]") -> None:
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            ended = False
            while not ended:
                ended = process.poll() is not None  # before reading, so that the last lines are not lost
                sys.stderr.write(file.read().decode("utf-8", "replace"))
                time.sleep(0.2)


def wait_for_vllm_health(host: str, port: int, proc: VLLMServerProcess | None = None, timeout_s: float = 180) -> None:
    """Return when the server is healthy; raise with its last output if `proc` dies or is not ready in time."""
    deadline = time.monotonic() + timeout_s
    while not is_healthy(host, port):
        if proc is not None and (code := proc.poll()) is not None:
            raise ServerDied(f"The vLLM server ended with exit code {code}. {last_words(proc.output())}")
        if time.monotonic() > deadline:
            said = last_words(proc.output()) if proc is not None else ""
            raise ServerNotReady(f"{base_url(host, port)}/health did not respond within {timeout_s:g} s. {said}")
        time.sleep(0.2)


def is_healthy(host: str, port: int) -> bool:
    """Whether the server is up and ready for requests."""
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
