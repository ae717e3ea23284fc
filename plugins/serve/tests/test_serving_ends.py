"""SIGTERM to the commands that serve, as processes: a request in progress gets its whole answer, and the command exits with 0."""

import asyncio
import json
import os
import re
import signal
import socket
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ludic.types import ConfigError
from ludic.util import stop
from ludic.util.stop import serve_until_stopped
from ludic_tinker.command import serve_tinker
from tests import forked

pytestmark = pytest.mark.slow

NUM_TOKENS = 1500
COMMANDS = {
    "serve": ["serve", "--model", "tiny"],
    "gateway": ["gateway", "--model", "tiny", "--max-tokens", str(NUM_TOKENS)],
    "tinker": ["serve", "--tinker", "--model", "tiny"],
}


class Server:
    """A command that serves, and its address."""

    def __init__(self, command: list[str], folder: Path) -> None:
        environment = {"LUDIC_CONTROL_TOKEN": "secret"}
        self.process = forked.python(
            "-m", "ludic.cli.main", *command, "--port", 0, "--drain-s", 600, cwd=folder, environment=environment
        )
        while not (found := re.search(r"http://127.0.0.1:\d+", self.process.said())):
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.02)
        self.url = found[0]

    def open(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **headers}
        return urllib.request.urlopen(urllib.request.Request(f"{self.url}{path}", data, headers), timeout=300)

    def ask(self, path: str, body: dict[str, Any] | None = None, **headers: str) -> Any:
        with self.open(path, body, **headers) as answer:
            return json.load(answer)


def from_serve(server: Server) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True}
    answer = json.loads(stopped_during(server, "/v1/completions", body))
    assert answer["usage"]["completion_tokens"] == NUM_TOKENS


def from_gateway(server: Server) -> None:
    session = server.ask("/sessions", {}, **{"X-Ludic-Control-Token": "secret"})
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": NUM_TOKENS}
    answer = json.loads(stopped_during(server, "/v1/chat/completions", body, f"Bearer {session['api_key']}"))
    assert answer["choices"]


def from_tinker(server: Server) -> None:
    session = server.ask("/api/v1/create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
    sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny"}
    sampler = server.ask("/api/v1/create_sampling_session", sampler)["sampling_session_id"]
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
    sampling = {"num_samples": 1, "sampling_params": {"max_tokens": NUM_TOKENS}}
    promise = server.ask("/api/v1/asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": prompt, **sampling})
    assert stopped_during(server, "/api/v1/retrieve_future", {"request_id": promise["request_id"]})


def stopped_during(server: Server, path: str, body: dict[str, Any], key: str = "none") -> bytes:
    """The body of the answer to a request that is in progress when the server is asked to stop."""
    data = json.dumps(body).encode()
    head = [
        f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Authorization: {key}",
        f"Content-Length: {len(data)}",
    ]  # fmt: skip
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=300) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + data)
        server.ask("/api/v1/healthz" if path.startswith("/api") else "/health")  # is read after it, and answered
        server.process.terminate()
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head_, _, received = answer.partition(b"\r\n\r\n")
    assert head_.startswith(b"HTTP/1.1 200"), answer
    return received


@pytest.mark.parametrize("kind", COMMANDS)
def test_a_request_in_progress_gets_its_answer_and_the_command_exits_with_0(kind, tmp_path):
    server = Server(COMMANDS[kind], tmp_path)
    {"serve": from_serve, "gateway": from_gateway, "tinker": from_tinker}[kind](server)
    out, err = server.process.communicate(timeout=300)
    assert server.process.returncode == 0, err
    assert "Stopped." in out


def test_the_tinker_server_loads_its_model_where_signals_are_heard(monkeypatch, tmp_path):
    """Outside the event loop: its handlers run between callbacks only, and loading is one long callback."""
    pytest.importorskip("torch")

    def load_model(*_: Any, **__: Any) -> None:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        raise ConfigError("The test ends here.")

    monkeypatch.setattr("ludic.models.loading.load_model", load_model)
    with pytest.raises(ConfigError, match="ends here"):
        serve_tinker(["--model", "tiny", "--port", "0", "--data", str(tmp_path)])


async def test_the_first_signal_drains_and_the_second_ends_it(monkeypatch):
    monkeypatch.setattr(stop, "SAME_REQUEST_S", -1.0)  # no two signals are one request
    seen: list[str] = []

    async def serving() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            seen.append("drains")
            try:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.Event().wait()
            finally:
                seen.append("ends")

    await serve_until_stopped(serving())
    assert seen == ["drains", "ends"]


async def test_a_signal_that_is_delivered_twice_is_one_request():
    drained = asyncio.Event()

    async def serving() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            asyncio.get_running_loop().call_later(0.01, drained.set)
            await drained.wait()

    await serve_until_stopped(serving())
    assert drained.is_set()


async def test_while_a_trainer_hears_signals_the_server_does_not():
    async def serving() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0.01)

    await serve_until_stopped(serving(), hears_signals=lambda: True)


async def test_a_cancellation_that_is_no_signal_is_passed_on():
    task = asyncio.create_task(serve_until_stopped(asyncio.Event().wait()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
