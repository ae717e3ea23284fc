"""Who ends whom: nothing of a sandbox outlives its pool, its event loop or its harness, however those end."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ludic_sandbox import (
    BubblewrapConfig,
    BubblewrapSandboxPool,
    RunStatus,
    SandboxLimits,
    is_bubblewrap_available,
    shared_pool,
)
from ludic_sandbox.bubblewrap import BubblewrapLauncher
from plugins.sandbox.tests.sandbox_pools import descendants

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not is_bubblewrap_available(), reason="bubblewrap cannot be used here"),
]
ROOT = Path(__file__).parents[3]

HARNESS = """
import asyncio, signal, sys
from ludic_sandbox import create_sandbox_pool

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell has put us into the background

async def main():
    pool = await create_sandbox_pool(n_workers=2, backend=sys.argv[1])
    sandbox = await pool.checkout()
    code = "import os, time\\nfor _ in range(3): os.fork()\\nprint('up', flush=True)\\ntime.sleep(600)"
    run = asyncio.create_task(sandbox.execute(code, timeout_s=600))
    await asyncio.sleep(0.5)
    print("running", flush=True)
    await run

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("backend", "number"),
    [("bubblewrap", signal.SIGKILL), ("bubblewrap", signal.SIGINT), ("subprocess", signal.SIGKILL)],
)
def test_nothing_outlives_the_harness(backend, number):
    harness = subprocess.Popen(
        [sys.executable, "-c", HARNESS, backend],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    assert harness.stdout is not None and harness.stdout.readline() == b"running\n"
    deadline = time.monotonic() + 30
    while len(below := descendants(harness.pid)) < 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(below) >= 10, "the program, its seven forks, and what is around them"
    harness.send_signal(number)
    harness.wait(timeout=60)
    if backend == "subprocess":
        below = below[:2]  # forks of a program without a sandbox may stay: that is what it is not
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in below) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = [pid for pid in below if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left
    harness.stdout.close()


async def test_a_pool_that_is_shut_down_in_the_middle_of_its_start_leaves_nothing():
    before = descendants(os.getpid())
    uid = 64_123
    for wait_s in (0.0, 0.005, 0.01, 0.02):
        pool = BubblewrapSandboxPool(BubblewrapConfig(uid=uid), n_workers=2)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(wait_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.shutdown()
    assert set(descendants(os.getpid())) <= set(before)
    assert not living(uid)


@pytest.mark.parametrize("num_cancels", [2, 4])
async def test_a_start_that_is_cancelled_again_and_again_leaves_nothing(num_cancels):
    """As when a loop ends: it cancels all tasks, and the pool that shuts down cancels those of its spares once more."""
    before, uid = set(descendants(os.getpid())), 64_125
    launcher = BubblewrapLauncher(BubblewrapConfig(uid=uid))
    for wait_s in (0.0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05):
        starts = [asyncio.create_task(launcher.start(SandboxLimits())) for _ in range(4)]
        await asyncio.sleep(wait_s)
        for _ in range(num_cancels):
            for start in starts:
                start.cancel()
            await asyncio.sleep(0)
        for found in await asyncio.gather(*starts, return_exceptions=True):
            if not isinstance(found, BaseException):
                await found.close()
    await launcher.close()
    assert set(descendants(os.getpid())) <= before
    assert not living(uid)
    assert not [*Path("/sys/fs/cgroup/memory/ludic-sandbox").glob(f"{os.getpid()}-*")]


@pytest.mark.parametrize("wait_s", [0.005, 0.01, 0.015, 0.02, 0.03])
def test_a_loop_that_ends_while_starts_are_being_cancelled_leaves_no_process(wait_s):
    before, uid = set(descendants(os.getpid())), 64_126

    async def main() -> None:
        launcher = BubblewrapLauncher(BubblewrapConfig(uid=uid))
        starts = [asyncio.create_task(launcher.start(SandboxLimits())) for _ in range(4)]
        await asyncio.sleep(wait_s)
        for start in starts:
            start.cancel()
        await asyncio.sleep(0)  # their ends have begun, in tasks that the loop cancels

    asyncio.run(main())
    deadline = time.monotonic() + 5
    while living(uid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not living(uid)
    assert set(descendants(os.getpid())) <= before
    for group in Path("/sys/fs/cgroup/memory/ludic-sandbox").glob(f"{os.getpid()}-*"):
        group.rmdir()  # nobody has closed the launcher


def living(uid: int) -> list[str]:
    """Processes of the user, but for those that only wait for their parent to notice their end."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text = status.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if f"Uid:\t{uid}\t" in text and "State:\tZ" not in text:
            found.append(text.partition("\n")[0])
    return found


def test_the_shared_pool_belongs_to_its_loop_and_ends_with_it():
    async def use() -> tuple[int, str]:
        first, second = await asyncio.gather(shared_pool(), shared_pool())
        assert first is second
        sandbox = await first.checkout()
        return id(first), (await sandbox.execute("print('shared')")).stdout

    before = descendants(os.getpid())
    for _ in range(2):
        _, said = asyncio.run(use())
        assert said == "shared\n"
        assert set(descendants(os.getpid())) <= set(before)


ORDINARY_USER = """
import asyncio, os, tempfile
import ludic_sandbox
from ludic_sandbox import BubblewrapSandboxPool, RunStatus

os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
FORGE = '''
import os
for path in ("/proc/1/fd/1", "/proc/1/fd/2", "/proc/1/mem"):
    try:
        open(path, "wb").write(b"forged"); print("open", path)
    except OSError:
        pass
print(os.getuid())
'''

async def main():
    async with BubblewrapSandboxPool(n_workers=1) as pool:
        sandbox = await pool.checkout()
        print((await sandbox.execute(FORGE)).stdout, end="")
        print((await sandbox.execute("x = bytearray(1 << 30)")).run_status)
        print((await sandbox.execute("while True: pass", timeout_s=0.3)).run_status)
        print((await sandbox.execute("print('fine')")).stdout, end="")

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests run as an ordinary user then")
def test_an_ordinary_user_has_the_same_sandbox():
    done = subprocess.run(
        [sys.executable, "-c", ORDINARY_USER],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "HOME": "/tmp"},
        cwd="/tmp",
        timeout=120,
    )
    assert done.stdout.splitlines() == ["65534", "memory_exceeded", "timeout", "fine"], done.stderr


async def test_a_killed_bwrap_is_a_failure_of_the_sandbox_and_a_full_pool_leaves_nothing():
    before, uid = set(descendants(os.getpid())), 64_124
    async with BubblewrapSandboxPool(BubblewrapConfig(uid=uid), n_workers=1) as pool:
        sandbox = await pool.checkout()
        own = set(descendants(os.getpid())) - before
        run = asyncio.create_task(sandbox.execute("import os, time\nos.fork()\ntime.sleep(60)", timeout_s=60))
        while len(set(descendants(os.getpid())) - before) < 4:  # bwrap, the supervisor, the program and its fork
            await asyncio.sleep(0.01)
        bwrap = min(pid for pid in own if Path(f"/proc/{pid}/comm").read_text() == "bwrap\n")
        os.kill(bwrap, signal.SIGKILL)
        result = await run
        assert (result.run_status, result.detail) == (RunStatus.SANDBOX_ERROR, "bwrap was killed from outside.")
        codes = [f"print({n})" if n % 10 else "open('f', 'wb').write(bytes(200 << 20))" for n in range(100)]
        results = await asyncio.gather(*(sandbox.execute(code) for code in codes))
        assert [r.stdout for r in results] == [f"{n}\n" if n % 10 else "" for n in range(100)]
        assert {r.run_status for r in results[::10]} == {RunStatus.RUNTIME_ERROR}, "the disk of a sandbox is full"
    assert set(descendants(os.getpid())) <= before
    assert not living(uid)
    assert not [*Path("/sys/fs/cgroup/memory/ludic-sandbox").glob(f"{os.getpid()}-*")]
