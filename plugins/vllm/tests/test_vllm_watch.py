"""With small processes that answer /health, hang or die, as a server would."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import textwrap
import threading
import time

import pytest

from ludic.http.address import free_port
from ludic.http.client import get_without_loop
from ludic.types import PolicyGone
from ludic.util.processes import RestartLimit, Restarts
from ludic_vllm.command import ServerCommand
from ludic_vllm.process import VLLMServerProcess, is_healthy, wait_for_vllm_health
from ludic_vllm.watch import HealthCheck, ServerWatch
from plugins.vllm.tests.vllm_fake import FakeVLLM, a_request, client_of

pytestmark = pytest.mark.slow

PROGRAM = """
    import http.server, os, signal, sys, time
    place, port, *ways = sys.argv[1:]
    with open(place, "a") as file:
        file.write(f"{os.getpid()}\\n")
    number = sum(1 for _ in open(place)) - 1
    way = ways[min(number, len(ways) - 1)]
    print("start", number, way, flush=True)
    if way == "dies":
        sys.exit("ValueError: no memory")
    if way == "slow":
        time.sleep(1)
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503 if way == "sick" else 200)
            self.end_headers()
            self.wfile.write(str(number).encode())
    http.server.ThreadingHTTPServer(("127.0.0.1", int(port)), Answer).serve_forever()
"""
HUNG_AFTER_S = 1.5
"""Above what a busy machine takes to answer: each of three checks has half a second."""


class Server:
    """A process that behaves in each of its starts as `ways` says, and its watch."""

    def __init__(self, tmp_path, *ways: str, max_restarts: int = 3, start_s: float = 60.0) -> None:
        self._pids = tmp_path / "pids"
        port = free_port()
        command = ServerCommand(
            arguments=(sys.executable, "-c", textwrap.dedent(PROGRAM), str(self._pids), str(port), *ways),
            environment={**os.environ, "LUDIC_CONTROL_TOKEN": "t"},
            host="127.0.0.1",
            port=port,
        )
        self.process = VLLMServerProcess(command, log=tmp_path / "server.log")
        self.process.start()
        wait_for_vllm_health("127.0.0.1", port, self.process, timeout_s=60)
        limit = RestartLimit(max_restarts=max_restarts, within_s=600, delay_s=0.05)
        self.watch = ServerWatch(self.process, Restarts(limit), hung_after_s=HUNG_AFTER_S, start_s=start_s)
        self.restored: list[int] = []
        """Starts whose weights were restored."""

    def restore(self) -> bool:
        self.restored.append(self.number())
        return True

    def number(self) -> int:
        return int(get_without_loop(f"{self.process.url}/number", 60))

    @property
    def pids(self) -> list[int]:
        return [int(line) for line in self._pids.read_text().split()]

    def until_ready(self) -> int:
        """Waits as a completion does, from when the watch has seen what happened."""
        return asyncio.run(asyncio.wait_for(self.watch.ready(), 60))

    def until_restarted(self, num_starts: int = 1) -> None:
        until(lambda: self.watch.num_starts >= num_starts)
        self.until_ready()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path):
    made: list[Server] = []

    def server(*ways: str, begin: bool = True, **options) -> Server:
        made.append(Server(tmp_path, *ways, **options))
        if begin:
            made[-1].watch.begin(made[-1].restore)
        return made[-1]

    yield server
    for one in made:
        for pid in one.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)  # so that SIGTERM is not waited for
        one.watch.close()
        assert not any(is_running(pid) for pid in one.pids)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_server_is_restarted_and_ready_once_it_has_its_weights(start, number, caplog):
    server = start("ok")
    is_held = threading.Event()
    server.watch._restore = lambda: is_held.is_set() and server.restore()
    os.kill(server.process.pid, number)
    with caplog.at_level(logging.WARNING):
        until(lambda: server.watch.num_starts == 1 and is_healthy("127.0.0.1", server.process.command.port))
        with pytest.raises(TimeoutError):
            asyncio.run(asyncio.wait_for(server.watch.ready(), 0.3))
        is_held.set()
        assert server.until_ready() == 1
    assert server.restored == [1] and len(server.pids) == 2 and not is_running(server.pids[0])
    reason = "was ended by SIGKILL" if number == signal.SIGKILL else "hangs: it accepts connections"
    assert reason in caplog.text and "restart 1 of at most 3" in caplog.text and "server.log" in caplog.text


def test_a_request_that_fails_makes_the_watch_look_at_once(start):
    server = start("ok")
    server.watch._health.every_s = 600
    time.sleep(0.1)
    os.kill(server.process.pid, signal.SIGKILL)
    server.process.wait(60)
    server.watch.require_alive()
    server.until_restarted()


def test_a_server_that_starts_slowly_is_not_hung(start):
    server = start("ok", "slow")
    os.kill(server.process.pid, signal.SIGKILL)
    server.until_restarted()
    assert server.watch.num_starts == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_a_server_that_fails_again_while_it_gets_its_weights_is_restarted_again(start, number):
    server = start("ok", begin=False)
    has_failed = threading.Event()

    def restore() -> bool:
        if server.number() == 1:
            has_failed.set()
            os.kill(server.process.pid, number)
            server.number()  # fails, or waits until the watch has killed the server
        return server.restore()

    server.watch.begin(restore)
    os.kill(server.process.pid, signal.SIGKILL)
    until(has_failed.is_set)
    server.until_restarted(2)
    assert server.restored == [2] and server.watch.num_starts == 2


def test_a_server_that_dies_in_every_start_is_given_up_with_its_words_and_its_log(start):
    server = start("ok", "dies", max_restarts=2)
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(PolicyGone) as gone:
        server.until_restarted(2)
    text = str(gone.value)
    assert "ended with exit code 1, and has died 3 times within 600 s, more than max_restarts = 2 allows" in text
    assert f"All it wrote is in {server.process.log}" in text and "first error: ValueError: no memory" in text
    assert len(server.pids) == 3 and server.restored == []
    with pytest.raises(PolicyGone):
        server.watch.require_alive()


def test_a_start_that_takes_too_long_counts_as_a_death(start):
    server = start("ok", "sick", max_restarts=1, start_s=0.5)
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(PolicyGone, match=r"was not ready within 0.5 s, and has died 2 times"):
        server.until_restarted(1)


def test_weights_that_cannot_be_restored_count_as_a_death(start):
    server = start("ok", begin=False, max_restarts=1)

    def restore() -> bool:
        raise OSError("no shared memory")

    server.watch.begin(restore)
    os.kill(server.process.pid, signal.SIGKILL)
    with pytest.raises(PolicyGone, match="could not be given its weights: no shared memory, and has died 2 times"):
        server.until_restarted(1)


def test_close_during_a_restart_leaves_no_process(start):
    server = start("ok", "slow")
    os.kill(server.process.pid, signal.SIGKILL)
    until(lambda: len(server.pids) == 2)
    server.watch.close()
    assert not any(is_running(pid) for pid in server.pids)


def test_a_check_that_is_missed_once_or_twice_is_no_hang(start):
    check = HealthCheck(f"http://127.0.0.1:{free_port()}", hung_after_s=0.0)
    assert [(check.ask(), check.is_hung) for _ in range(3)] == [(False, False), (False, False), (False, True)]
    check.begin()
    assert not check.is_hung
    patient = HealthCheck(f"http://127.0.0.1:{free_port()}", hung_after_s=60)
    assert not any(patient.ask() or patient.is_hung for _ in range(10)), "refused connections come quickly"


class RestartedMeanwhile:
    """A watch whose server is restarted while the first request is under way."""

    num_starts = 0

    async def ready(self) -> int:
        return self.num_starts

    def require_alive(self) -> None:
        return


async def test_an_answer_of_a_server_that_was_restarted_meanwhile_is_discarded():
    fake = await FakeVLLM().start()
    watch, answer = RestartedMeanwhile(), fake._answer

    async def restarting(request, body, prompt, sampling):
        if len(prompt) == 3 and len(fake.requests) == 0:
            watch.num_starts += 1
        return await answer(request, body, prompt, sampling)

    fake._answer = restarting
    try:
        async with client_of(fake, watch=watch) as client:
            await client.complete_tokens(a_request())
    finally:
        await fake.stop()
    assert len(fake.requests) == 2, "asked again"
