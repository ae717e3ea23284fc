"""Turns of a sandbox server's clients, and its messages."""

import asyncio
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.http.errors import RequestRefused
from ludic.types import ConfigError
from ludic_sandbox import CommandResult, CompileResult, CompileStatus, ExecutionResult, RunStatus, SandboxError
from ludic_sandbox.backends import check_backend
from ludic_sandbox.remote.server import RunLimits, RunQueue, SandboxServer
from ludic_sandbox.requests import Command, Compile, Execute, decode, decode_request, encode

# --- turns ---


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Clients:
    """Starts runs by name and notes the order in which they get their turns."""

    def __init__(self, queue: RunQueue) -> None:
        self.queue, self.turns = queue, queue.turns
        self.order: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def ask(self, client: str, name: str, wait_s: float = 60.0) -> None:
        self.ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._run(client, name, wait_s))
        await settled()

    async def _run(self, client: str, name: str, wait_s: float) -> None:
        async with self.queue.turn(client, wait_s):
            self.order.append(name)
            await self.ends[name].wait()

    async def end(self, name: str) -> None:
        self.ends[name].set()
        await settled()


async def test_clients_take_turns_and_each_keeps_its_order():
    clients = Clients(RunQueue(1, RunLimits()))
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await clients.ask(name[0], name)
    assert clients.turns.num_waiting == 5 and clients.turns.num_running == 1
    for _ in range(6):
        await clients.end(clients.order[-1])
    assert clients.order == ["a1", "a2", "b1", "c1", "a3", "b2"]
    assert clients.turns.num_waiting == clients.turns.num_running == 0


async def test_limits_of_a_client_and_of_the_queue():
    clients = Clients(RunQueue(1, RunLimits(max_waiting=2, max_per_client=2)))
    await clients.ask("a", "a1")
    await clients.ask("a", "a2")
    await clients.ask("a", "a3")
    with pytest.raises(RequestRefused, match="2 runs here already") as refused:
        await clients.tasks["a3"]
    assert refused.value.status == 429
    await clients.ask("b", "b1")
    await clients.ask("c", "c1")
    with pytest.raises(RequestRefused, match="2 runs are waiting already"):
        await clients.tasks["c1"]
    await clients.ask("b", "b2", wait_s=0.01)  # refused like c1: the queue is still full
    with pytest.raises(RequestRefused):
        await clients.tasks["b2"]
    for name in ("a1", "a2", "b1"):
        await clients.end(name)
    assert clients.order == ["a1", "a2", "b1"]


async def test_a_run_that_waits_too_long_is_refused_and_leaves_the_queue():
    clients = Clients(RunQueue(1, RunLimits()))
    await clients.ask("a", "a1")
    await clients.ask("b", "b1", wait_s=0.01)
    with pytest.raises(RequestRefused, match="No sandbox came free within 0.01 s") as refused:
        await clients.tasks["b1"]
    assert refused.value.status == 503 and clients.turns.num_waiting == 0


async def test_run_that_is_cancelled_while_another_ends_takes_no_place():
    """Its task has not run yet when the place comes free."""
    clients = Clients(RunQueue(1, RunLimits()))
    for name in ("a1", "b1", "b2", "c1"):
        await clients.ask(name[0], name)
    clients.ends["a1"].set()
    clients.tasks["b1"].cancel()
    await settled()
    await clients.tasks["a1"]
    assert clients.order == ["a1", "b2"] and clients.turns.num_running == 1 and clients.turns.num_waiting == 1
    await clients.end("b2")
    await clients.end("c1")
    assert clients.order == ["a1", "b2", "c1"] and clients.turns.num_running == 0


async def test_no_place_is_lost_or_lent_twice_whatever_is_cancelled():
    chance, queue, most = random.Random(0), RunQueue(3, RunLimits(max_waiting=1000)), 0
    turns = queue.turns

    async def run(client: str) -> None:
        nonlocal most
        async with queue.turn(client, wait_s=60.0):
            most = max(most, turns.num_running)
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)

    tasks = []
    for _ in range(500):
        tasks.append(asyncio.create_task(run(chance.choice("abc"))))
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            chance.choice(tasks).cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert most == 3 and turns.num_running == turns.num_waiting == 0
    clients = Clients(queue)
    for name in ("x1", "x2", "x3", "x4"):
        await clients.ask("x", name)
    assert clients.order == ["x1", "x2", "x3"], "three places are left, as in the beginning"
    for name in ("x1", "x2", "x3", "x4"):
        await clients.end(name)


# --- messages ---

plain = st.text(max_size=20)


@settings(max_examples=30)
@given(
    code=st.binary(max_size=50), files=st.dictionaries(plain, st.binary(max_size=20)), argv=st.lists(plain, max_size=3)
)
def test_messages_survive(code, files, argv):
    run = Execute(code=code, stdin=code, skip_compile=True, timeout_s=1.5, memory_limit_mb=None, env_vars={"a": "b"})
    command = Command(
        argv=argv, files=files, outputs=argv, stdin=code, timeout_s=2, memory_limit_mb=64, max_processes=None,
        workspace_mb=3, env_vars={},
    )  # fmt: skip
    for message in (Compile(code=code, timeout_s=1.0), run, command):
        assert decode_request(encode(message)) == message


@settings(max_examples=30)
@given(stdout=plain, outputs=st.dictionaries(plain, st.binary(max_size=20)), status=st.sampled_from(RunStatus))
def test_results_survive(stdout, outputs, status):
    compiled = CompileResult(status=CompileStatus.SYNTAX_ERROR, error_message=stdout, error_line=3, duration_ms=0.1)
    result = CommandResult(
        compile_result=compiled, run_status=status, stdout=stdout, outputs=outputs, signal=9, cpu_time_ms=1.25
    )
    assert decode(encode(result), CommandResult) == result


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_other_bytes_are_no_result_and_no_message(data):
    with pytest.raises(SandboxError):
        decode(data, ExecutionResult)
    with pytest.raises(ConfigError):
        decode_request(data)


def test_a_result_that_lacks_its_status_or_has_another_one_is_refused():
    whole = msgspec.to_builtins(ExecutionResult(compile_result=CompileResult(status=CompileStatus.SUCCESS)))
    for change in ({"run_status": "passed"}, {"compile_result": None}, {"stdout": 3}):
        with pytest.raises(SandboxError, match="no ExecutionResult"):
            decode(msgspec.msgpack.encode({**whole, **change}), ExecutionResult)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="max_waiting=0"):
        RunLimits(max_waiting=0)
    with pytest.raises(ConfigError, match="needs a token"):
        SandboxServer(None, token="")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="no address of a sandbox server"):
        check_backend("ftp://host")
    check_backend("http://host:8002")
