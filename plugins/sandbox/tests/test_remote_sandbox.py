"""A sandbox server and its clients: the same results as here, and no grade from a run that was lost.

plugins/sandbox/tests/test_sandbox.py runs the contract of all back ends on a remote pool too.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

import ludic.run
from ludic.types import ConfigError
from ludic_sandbox import (
    Bind,
    BubblewrapSandboxPool,
    CommandResult,
    ExecutionResult,
    RunStatus,
    SandboxError,
    SandboxPoolExhaustedError,
    create_sandbox_pool,
    is_bubblewrap_available,
    shared_pool,
)
from ludic_sandbox.code_exec import ProgrammingEnv
from ludic_sandbox.python_tool import python
from ludic_sandbox.remote import client
from ludic_sandbox.remote.client import RemoteSandboxPool
from ludic_sandbox.remote.server import RunLimits, SandboxServer
from ludic_sandbox.requests import TOKEN_HEADER, Compile, encode
from plugins.sandbox.tests.sandbox_pools import descendants, remote_pool
from tests.fakes import status_with_header

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
]
ROOT = Path(__file__).parents[3]
TOKEN = "the-token"
SLEEPER = "import os, time\nos.fork()\ntime.sleep(600)"


@contextlib.asynccontextmanager
async def serving(n_workers: int = 1, limits: RunLimits | None = None) -> AsyncIterator[SandboxServer]:
    server = SandboxServer(BubblewrapSandboxPool(n_workers=n_workers), token=TOKEN, limits=limits)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


async def load_of(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return await answer.json()


async def until(url: str, **expected: int) -> None:
    """Wait until the server's load is as expected."""
    while not expected.items() <= (await load_of(url)).items():
        await asyncio.sleep(0.02)


# --- results ---

PROGRAMS = {
    "success": "print(int(input()) + 1)",
    "exit code": "import sys\nprint('ü', file=sys.stderr)\nraise SystemExit(3)",
    "exception": "def f():\n    return 1 / 0\nf()",
    "signal": "import os\nos.kill(os.getpid(), 11)",
    "timeout": "print('a', flush=True)\nwhile True: pass",
    "memory": "x = bytearray(1 << 30)",
    "too much output": "while True: print('x' * 100_000)",
    "syntax error": "x = (",
    "missing module": "import no_such_module",
    "lone surrogate": "x = '\ud800'",
    "binary output": "import sys\nsys.stdout.buffer.write(bytes(range(256)))",
    "ends its supervisor": "import os, time\nos.kill(1, 2)\ntime.sleep(60)",
}


def comparable(result: ExecutionResult) -> ExecutionResult:
    """Without what differs between two runs of one program."""
    same = {"total_duration_ms": 0.0, "run_duration_ms": 0.0, "compile_duration_ms": 0.0}
    compiled = replace(result.compile_result, duration_ms=0.0)
    return replace(result, compile_result=compiled, peak_memory_bytes=None, cpu_time_ms=None, **same)


async def test_results_are_those_of_a_local_sandbox():
    async with BubblewrapSandboxPool(n_workers=1) as here, remote_pool(n_workers=1) as there:
        assert here.python_version == there.python_version
        near, far = await here.checkout(), await there.checkout()
        for name, code in PROGRAMS.items():
            how = {"stdin": "41\n", "timeout_s": 1.0, "memory_limit_mb": 128}
            local, remote = await near.execute(code, **how), await far.execute(code, **how)
            if name == "too much output":  # how much of it was read before the end differs
                local, remote = (replace(result, stdout="") for result in (local, remote))
            assert comparable(local) == comparable(remote), name
            compiled = [replace(await sandbox.compile(code), duration_ms=0.0) for sandbox in (near, far)]
            assert compiled[0] == compiled[1], name
        command = {
            "argv": ["sh", "-c", "cat; ./tool > made; exit 4"],
            "files": {"tool": "#!/bin/sh\nprintf '\\001\\377'\n", "data": b"\xff\x00"},
            "outputs": ["made", "data", "missing"],
            "stdin": b"\xfe in\n",
            "env_vars": {"A": "b"},
        }
        local, remote = await near.run_command(**command), await far.run_command(**command)
        assert isinstance(remote, CommandResult) and remote.outputs == {"made": b"\x01\xff", "data": b"\xff\x00"}
        assert comparable(local) == comparable(remote)


async def test_a_callers_mistakes_are_the_same_errors_as_here(tmp_path):
    async with remote_pool(n_workers=1) as pool:
        sandbox = await pool.checkout()
        with pytest.raises(ConfigError, match="timeout_s=-1"):
            await sandbox.execute("1", timeout_s=-1)
        with pytest.raises(ConfigError, match="no path inside the workspace"):
            await sandbox.run_command(["true"], outputs=["../secret"])
        with pytest.raises(ConfigError, match="empty argv"):
            await sandbox.run_command([])
        with pytest.raises(ConfigError, match="cannot show .* of this machine"):
            await sandbox.run_command(["true"], binds=[Bind(source=str(tmp_path), target="/x")])
        with pytest.raises(ConfigError, match="asks for timeout_s=1e.06, and this sandbox server allows 120"):
            await sandbox.execute("1", timeout_s=1e6)
        with pytest.raises(ConfigError, match="memory_mb=100000, and this sandbox server allows 2048 .--max-memory-mb"):
            await sandbox.execute("1", memory_limit_mb=100_000)
        assert (await sandbox.execute("print('still there')")).stdout == "still there\n"


async def test_code_envs_and_the_python_tool_use_the_server_that_the_environment_names(monkeypatch):
    sample = {"question": "Add one.", "tests": [{"input": "41", "expected": "42"}]}
    async with serving() as server:
        monkeypatch.setenv("LUDIC_SANDBOX", server.url)
        monkeypatch.setenv("LUDIC_SANDBOX_TOKEN", TOKEN)
        assert isinstance(await shared_pool(), RemoteSandboxPool)
        env = ProgrammingEnv(sample)
        env.reset(seed=0)
        outcome = await env.async_env_step("print(int(input()) + 1)")
        assert outcome.reward == 1.0
        env.reset(seed=0)
        assert (await env.async_env_step("print(0)")).reward == 0.0
        assert (await python("print(6 * 7)")).content == "42"


# --- refusals and limits ---


async def test_a_wrong_token_is_named():
    async with serving() as server:
        with pytest.raises(SandboxError, match="refuses the token.*LUDIC_SANDBOX_TOKEN"):
            await create_sandbox_pool(backend=server.url, token="another")
        with pytest.raises(SandboxError, match="wants a token"):
            await RemoteSandboxPool(server.url).start()
        async with aiohttp.ClientSession() as session, session.post(f"{server.url}/run", data=b"") as answer:
            assert answer.status == 401
        assert await status_with_header(f"{server.url}/info", TOKEN_HEADER, b"s\xe9cret") == 401


async def test_a_run_with_a_wrong_token_ends_before_its_first_episode(monkeypatch, tmp_path):
    (tmp_path / "problems.jsonl").write_text('{"question": "Add one.", "tests": [{"input": "41", "expected": "42"}]}\n')
    settings = {"env": "code_exec", "data": str(tmp_path / "problems.jsonl"), "model": "tiny", "max_tokens": 4}
    async with serving() as server:
        monkeypatch.setenv("LUDIC_SANDBOX", "")  # the run sets it
        monkeypatch.setenv("LUDIC_SANDBOX_TOKEN", "another")
        run = ludic.run.build(**settings, runs=tmp_path, sandbox=server.url, logger=())
        with pytest.raises(ConfigError, match="refuses the token"):
            await asyncio.to_thread(run.train, steps=1)
        assert not list(tmp_path.rglob("*.jsonl.gz"))


@pytest.mark.parametrize("url", ["localhost:8002", "http://user:secret@localhost:8002"])
async def test_a_wrong_address_is_named(url):
    with pytest.raises(ConfigError, match="no address of a sandbox server|user, a password") as caught:
        RemoteSandboxPool(url)
    assert "secret@" not in str(caught.value)


async def test_a_body_that_is_no_run_is_refused():
    async with serving(limits=RunLimits(max_body_mb=1)) as server, aiohttp.ClientSession() as session:
        for body, status in ((b"", 400), (b"\x81\xa4type\xa4Evil", 400), (b"{}", 400), (bytes(2 << 20), 413)):
            headers = {"X-Ludic-Control-Token": TOKEN}
            async with session.post(f"{server.url}/run", data=body, headers=headers) as answer:
                assert answer.status == status, body[:20]
        assert (await load_of(server.url))["running"] == 0


async def test_a_client_over_its_limit_waits_and_then_fails_while_another_is_served():
    async with (
        serving(n_workers=2, limits=RunLimits(max_per_client=1)) as server,
        RemoteSandboxPool(server.url, token=TOKEN, wait_s=0.5) as pool,
    ):
        first, second = await pool.checkout(), await pool.checkout()
        run = asyncio.create_task(first.execute(SLEEPER, timeout_s=60))
        await until(server.url, running=1)
        result = await second.execute("print(1)")
        assert result.run_status is RunStatus.SANDBOX_ERROR and "1 runs here already" in result.detail
        connector = aiohttp.TCPConnector(local_addr=("127.0.0.2", 0))  # another client
        async with aiohttp.ClientSession(connector=connector) as session:
            body = encode(Compile(code=b"1", timeout_s=5.0))
            headers = {"X-Ludic-Control-Token": TOKEN}
            async with session.post(f"{server.url}/run", data=body, headers=headers) as answer:
                assert answer.status == 200
        run.cancel()


async def test_a_full_queue_refuses_and_the_client_tries_again():
    async with (
        serving(limits=RunLimits(max_waiting=1)) as server,
        RemoteSandboxPool(server.url, token=TOKEN, n_workers=8) as pool,
    ):
        sandbox = await pool.checkout()
        results = await asyncio.gather(*(sandbox.execute(f"print({n})") for n in range(8)))
        assert [result.stdout for result in results] == [f"{n}\n" for n in range(8)]


# --- faults ---


async def test_a_client_that_gives_up_ends_its_run_on_the_server():
    before = set(descendants(os.getpid()))
    async with serving() as server, RemoteSandboxPool(server.url, token=TOKEN) as pool:
        sandbox = await pool.checkout()
        idle = set(descendants(os.getpid()))
        run = asyncio.create_task(sandbox.execute(SLEEPER, timeout_s=60))
        await until(server.url, running=1)
        waiting = asyncio.create_task(sandbox.execute("print(1)"))
        await until(server.url, waiting=1)
        for task in (waiting, run):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(server.url, running=0, waiting=0)
        assert (await sandbox.execute("print('next')")).stdout == "next\n"
        assert not (idle - before) & set(descendants(os.getpid())), "the processes of the run are gone"
    assert set(descendants(os.getpid())) <= before


async def start_server(port: int = 0) -> tuple[asyncio.subprocess.Process, str]:
    """The process of a `ludic sandbox-server`, and its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "ludic.cli.main", "sandbox-server", "--port", str(port), "--workers", "1",
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "LUDIC_SANDBOX_TOKEN": TOKEN},
    )  # fmt: skip
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    return process, line.removeprefix("Sandbox server at ").partition(": ")[0]


async def gone(pids: set[int]) -> bool:
    for _ in range(1000):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_a_killed_server_gives_no_grade_and_the_pool_goes_on_when_it_is_back(monkeypatch):
    server, url = await start_server()
    try:
        async with RemoteSandboxPool(url, token=TOKEN) as pool:
            sandbox = await pool.checkout()
            run = asyncio.create_task(sandbox.execute("print('done', flush=True)\n" + SLEEPER, timeout_s=60))
            await until(url, running=1)
            below = set(descendants(server.pid))
            server.kill()
            result = await run
            assert (result.run_status, result.stdout) == (RunStatus.SANDBOX_ERROR, "")
            assert "was lost during the run" in result.detail
            assert await gone(below), "the server's sandboxes end with it"
            await server.wait()
            await pool.release(sandbox)
            server, _ = await start_server(int(url.rpartition(":")[2]))
            sandbox = await pool.checkout()
            assert (await sandbox.execute("print('again')")).stdout == "again\n"
            # A hung server: no grade either.
            monkeypatch.setattr(client, "_GRACE_S", 0.1)
            pool._server.wait_s = 0.5
            server.send_signal(signal.SIGSTOP)
            result = await sandbox.execute("print(1)", timeout_s=0.2)
            server.send_signal(signal.SIGCONT)
            assert result.run_status is RunStatus.SANDBOX_ERROR and "did not answer within" in result.detail
            below = set(descendants(server.pid))
            server.terminate()
            assert await server.wait() == 0
            assert await gone(below)
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        await server.wait()


async def test_a_server_that_stays_away_is_given_up_with_its_address():
    async with serving() as server:
        pool = RemoteSandboxPool(server.url, token=TOKEN, wait_s=0.2, max_consecutive_failures=2)
        await pool.start()
        sandbox = await pool.checkout()
    result = await sandbox.execute("print(1)")
    assert result.run_status is RunStatus.SANDBOX_ERROR and "cannot be reached" in result.detail
    await pool.release(sandbox)
    with pytest.raises(SandboxPoolExhaustedError, match="cannot be reached"):
        await pool.checkout()
    await pool.shutdown()


@pytest.mark.parametrize("answer", [b"", b"<html>a proxy</html>", b"\x80", b"\x81\xaarun_status\xa7success"])
async def test_an_answer_of_something_else_is_no_grade(answer):
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (len(answer), answer))
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with listener:
        port = listener.sockets[0].getsockname()[1]
        connection = client.ServerConnection(f"http://127.0.0.1:{port}", TOKEN, wait_s=5.0)
        result = await client.RemoteSandbox(connection).execute("print(1)")
        await connection.close()
    assert result.run_status is RunStatus.SANDBOX_ERROR and not result.succeeded


async def test_eighty_concurrent_runs_are_right_and_leave_nothing():
    before, files = set(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
    async with serving(n_workers=2) as server, RemoteSandboxPool(server.url, token=TOKEN) as pool:
        sandbox = await pool.checkout()
        hang = "import time\ntime.sleep(60)"
        programs = [hang if n % 40 == 0 else f"print({n} + int(input()))" for n in range(80)]
        results = await asyncio.gather(*(sandbox.execute(code, stdin="1", timeout_s=5.0) for code in programs))
        for n, result in enumerate(results):
            expected = (RunStatus.TIMEOUT, "") if n % 40 == 0 else (RunStatus.SUCCESS, f"{n + 1}\n")
            assert (result.run_status, result.stdout) == expected, n
        assert await load_of(server.url) == {"status": "ok", "sandboxes": 2, "running": 0, "waiting": 0}
    assert set(descendants(os.getpid())) <= before
    assert len(os.listdir("/proc/self/fd")) <= files + 2
    groups = Path("/sys/fs/cgroup/memory/ludic-sandbox").glob(f"{os.getpid()}-*/cgroup.procs")
    assert not [procs for procs in groups if procs.read_text()]
