"""With small processes that answer /health, or die, as a server would."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from ludic.http.address import free_port
from ludic.types import ConfigError
from ludic_vllm.command import ServerCommand
from ludic_vllm.process import (
    ServerDied,
    ServerNotReady,
    VLLMServerProcess,
    base_url,
    collect_proc_output,
    is_healthy,
    last_words,
    wait_for_vllm_health,
)

pytestmark = pytest.mark.slow

HEALTHY = """
    import http.server, subprocess, sys
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("worker", worker.pid, flush=True)
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
    http.server.HTTPServer(("127.0.0.1", PORT), Answer).serve_forever()
"""
DYING = """
    print("INFO 11-15 loading", flush=True)
    print("(EngineCore pid=12) ERROR 11-15 10:00:00 [core.py:1] ValueError: no such folder: /nowhere", flush=True)
    raise RuntimeError("Engine core initialization failed. See root cause above.")
"""
SILENT = "import time; print('still loading', flush=True); time.sleep(600)"


@pytest.fixture
def make(tmp_path):
    made = []

    def server(program: str, **options) -> VLLMServerProcess:
        port = free_port()
        code = textwrap.dedent(program).replace("PORT", str(port))
        command = ServerCommand(
            arguments=(sys.executable, "-c", code),
            environment={**os.environ, "LUDIC_CONTROL_TOKEN": "t"},
            host="127.0.0.1",
            port=port,
        )
        made.append(VLLMServerProcess(command, log=tmp_path / "run" / "server.log", **options))
        made[-1].start()
        return made[-1]

    yield server
    for process in made:
        process.stop(timeout_s=1)


def wait(server, timeout_s=20):
    wait_for_vllm_health(server.command.host, server.command.port, server, timeout_s=timeout_s)


def worker_of(server) -> int:
    return int(server.output().split("worker ")[1].split()[0])


def has_ended(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
        return state in ("", "Z") or state.startswith("Z")
    return True


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_healthy_server_is_waited_for_and_stopped(make):
    server = make(HEALTHY)
    wait(server)
    assert server.poll() is None and server.control_token == "t"
    server.stop()
    assert server.poll() is not None and not is_healthy("127.0.0.1", server.command.port)


@pytest.mark.parametrize("end", ["stop", "kill", "its own death"])
def test_the_workers_end_with_the_server(make, end):
    server = make(HEALTHY)
    wait(server)
    worker = worker_of(server)
    assert not has_ended(worker)
    if end == "its own death":
        os.kill(server.pid, signal.SIGKILL)
        server.wait(60)
    server.kill() if end == "kill" else server.stop()
    wait_until(lambda: has_ended(worker))


def test_a_killed_server_starts_again_on_its_port(make):
    server = make(HEALTHY)
    wait(server)
    first = server.pid
    server.kill()
    assert server.poll() == 128 + signal.SIGKILL
    server.start()
    wait(server)
    assert server.pid != first and server.poll() is None


def test_a_running_server_is_not_started_twice(make):
    server = make(HEALTHY)
    with pytest.raises(ServerDied, match="already running"):
        server.start()


def test_start_refuses_a_port_in_use(make):
    first = make(HEALTHY)
    wait(first)
    with pytest.raises(ConfigError, match="Cannot listen"):
        VLLMServerProcess(first.command, log=first.log).start()


def test_the_error_of_a_dead_server_quotes_its_output(make):
    server = make(DYING)
    with pytest.raises(ServerDied) as error:
        wait(server)
    text = str(error.value)
    assert "exit code 1" in text and "Its first error: ValueError: no such folder: /nowhere" in text
    assert "Engine core initialization failed" in text
    assert collect_proc_output(server).startswith("INFO 11-15 loading")


def test_output_of_an_earlier_start_is_not_quoted(make):
    server = make(DYING)
    server.wait(60)
    server.start()
    server.wait(60)
    assert collect_proc_output(server).count("INFO 11-15 loading") == 1
    assert server.log.read_text().count("INFO 11-15 loading") == 2


def test_the_timeout_error_quotes_the_output(make):
    server = make(SILENT)
    wait_until(lambda: "loading" in server.output())
    with pytest.raises(ServerNotReady, match="did not respond within 0.1 s(.|\n)*still loading"):
        wait(server, timeout_s=0.1)


def test_stream_output_copies_the_log_to_stderr(make, capfd):
    server = make(DYING, stream_output=True)
    server.wait(60)
    shown = ""

    def complete():
        nonlocal shown
        shown += capfd.readouterr().err
        return "See root cause above" in shown

    wait_until(complete)
    assert "INFO 11-15 loading" in shown


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("gpu7", "http://gpu7:80"),
    ],
)
def test_base_url_of_a_listening_address(host, url):
    assert base_url(host, 80) == url


def test_an_error_of_two_lines_is_quoted_and_shortened():
    output = f"loading\nValidationError: 1 error for ModelConfig\n  Value error, no model 'x'. Known: {'y' * 9999}\n"
    said = last_words(output)
    assert "first error: ValidationError: 1 error for ModelConfig Value error, no model 'x'. Known" in said
    assert len(said) < 2000


def test_a_flag_that_vllm_does_not_know_is_quoted():
    said = last_words("usage: entry.py [-h]\nentry.py: error: unrecognized arguments: --nonsense\n")
    assert "first error: entry.py: error: unrecognized arguments: --nonsense" in said


PROGRAM = """
    import os, sys
    from pathlib import Path
    from ludic_vllm.command import ServerCommand
    from ludic_vllm.process import VLLMServerProcess, wait_for_vllm_health
    arguments = (sys.executable, "-c", sys.argv[2])
    server = VLLMServerProcess(
        ServerCommand(arguments=arguments, environment=os.environ, host="127.0.0.1", port=int(sys.argv[1])),
        log=Path("server.log"),
    )
    server.start()
    wait_for_vllm_health("127.0.0.1", int(sys.argv[1]), server)
    print(server.pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_server_ends_with_the_program_that_started_it_however_that_ended(tmp_path, number):
    port = free_port()
    program = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), str(port), textwrap.dedent(HEALTHY).replace("PORT", str(port))],
        cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with program:
        server = int(program.stdout.readline())
        assert is_healthy("127.0.0.1", port) and not has_ended(server)
        if number is not None:
            program.send_signal(number)
    wait_until(lambda: has_ended(server))
    worker = int((tmp_path / "server.log").read_text().split("worker ")[1].split()[0])
    wait_until(lambda: has_ended(worker))
