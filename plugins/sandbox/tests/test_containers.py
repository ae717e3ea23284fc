"""Containers of a real podman: limits, faults of the engine's processes, and what is left afterwards.

plugins/sandbox/tests/test_sandbox.py runs the contract of all back ends on podman too.
"""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from ludic.batch_gen import RolloutEngine
from ludic.interaction import SingleAgentProtocol
from ludic.types import EnvSpec, ProtocolSpec, RolloutRequest
from ludic_sandbox import PodmanSandboxPool, RunStatus, SandboxLimits
from ludic_sandbox.code_exec import ProgrammingEnv
from ludic_sandbox.containers import PodmanFacts
from ludic_sandbox.process_sandbox import ProcessSandbox
from plugins.sandbox.tests.sandbox_pools import descendants, podman_config
from tests.fakes import make_agent

pytestmark = pytest.mark.integration
LIMITS = SandboxLimits(max_processes=16, workspace_mb=8)
SLEEPER = "import os, time\nprint('up', flush=True)\nos.fork()\ntime.sleep(60)"


def podman(*args: str) -> list[str]:
    return subprocess.run(["podman", *args], capture_output=True, text=True, check=True).stdout.split()


def containers(pid: int) -> list[str]:
    """Ids of the containers that a process has started."""
    return podman("ps", "--all", "--no-trunc", "--filter", f"name=ludic-{pid}-", "--format", "{{.ID}}")


async def nothing_is_left_of(ids: list[str]) -> bool:
    """Whether the cgroups and processes of these containers end; podman's own cleanup runs in the background."""
    for _ in range(500):
        if not left_of(ids):
            return True
        await asyncio.sleep(0.02)
    return False


def left_of(ids: list[str]) -> list[str]:
    """Cgroups and processes of these containers."""
    root = Path("/sys/fs/cgroup")
    groups = [str(path) for one in ids for path in root.glob(f"**/*{one}*")]
    return groups + [text.decode() for _, text in commands() if any(one.encode() in text for one in ids)]


def commands() -> Iterator[tuple[int, bytes]]:
    """Number and command line of each process of the machine."""
    for path in Path("/proc").glob("[0-9]*"):
        if command := command_of(int(path.name)):
            yield int(path.name), command


def command_of(pid: int) -> bytes:
    """Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@pytest.fixture
async def sandbox(tmp_path, monkeypatch):
    """A sandbox of a podman pool that leaves nothing behind, also in the folder that it was started in."""
    monkeypatch.chdir(tmp_path)
    before = set(descendants(os.getpid()))
    async with PodmanSandboxPool(podman_config(LIMITS), n_workers=1) as pool:
        yield await pool.checkout()
    assert not containers(os.getpid())
    assert set(descendants(os.getpid())) <= before
    assert not list(tmp_path.iterdir())


async def begin(sandbox: ProcessSandbox) -> tuple[asyncio.Task, str, dict[str, int]]:
    """A run in progress, the id of its container, and the numbers of the container's processes on the host."""
    run = asyncio.create_task(sandbox.execute(SLEEPER, timeout_s=15.0))
    while not (ids := containers(os.getpid())):
        await asyncio.sleep(0.02)
    (container,) = ids  # the next one is started after the run
    monitor, supervisor = map(int, podman("inspect", "--format", "{{.State.ConmonPid}} {{.State.Pid}}", container))
    while len(descendants(supervisor)) < 2:  # the program and its fork
        await asyncio.sleep(0.02)
    return run, container, {"monitor": monitor, "supervisor": supervisor}


async def test_a_killed_monitor_is_a_failure_of_the_sandbox_and_leaves_nothing(sandbox):
    run, container, pids = await begin(sandbox)
    os.kill(pids["monitor"], signal.SIGKILL)
    result = await run
    assert (result.run_status, result.succeeded) == (RunStatus.SANDBOX_ERROR, False)
    assert "conmon" in result.detail
    assert await nothing_is_left_of([container])
    assert (await sandbox.execute("print('next')")).stdout == "next\n"


@pytest.mark.extended(covered_by="test_a_killed_monitor_is_a_failure_of_the_sandbox_and_leaves_nothing")
async def test_a_killed_client_is_a_failure_of_the_sandbox_and_leaves_nothing(sandbox):
    run, container, _ = await begin(sandbox)
    (client,) = (
        pid for pid in descendants(os.getpid()) if b"podman\0run\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(client, signal.SIGKILL)
    result = await run
    assert result.run_status is RunStatus.SANDBOX_ERROR and "podman run" in result.detail
    assert await nothing_is_left_of([container])
    assert (await sandbox.execute("print('next')")).stdout == "next\n"


async def test_a_program_that_ends_its_supervisor_is_killed(sandbox):
    result = await sandbox.execute("import os, signal, time\nos.kill(1, signal.SIGINT)\ntime.sleep(60)")
    assert result.run_status is RunStatus.KILLED and "ended the whole sandbox" in result.detail


async def test_a_full_disk_is_the_programs_own_error(sandbox):
    fill = "open('a', 'wb').write(bytes(6 << 20))\nopen('b', 'wb').write(bytes(6 << 20))"
    result = await sandbox.execute(fill)
    assert result.run_status is RunStatus.RUNTIME_ERROR and "No space left on device" in result.stderr
    result = await sandbox.execute("import os\nopen('c', 'wb').write(bytes(6 << 20))\nprint(sorted(os.listdir()))")
    assert result.stdout == "['c', 'main.py']\n", "the next run has an empty workspace"


async def test_the_process_limit_and_the_memory_limit_hold_for_the_whole_container(sandbox):
    if not PodmanFacts.read("podman").has_limits:
        pytest.skip("podman without root needs cgroups v2 for these limits")
    forks = """
import os, time
children = 0
try:
    while True:
        if os.fork() == 0:
            time.sleep(30)
        children += 1
except OSError:
    print(children)
"""
    assert int((await sandbox.execute(forks)).stdout) <= LIMITS.max_processes
    swarm = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(1)
raise SystemExit(any([os.wait()[1] for _ in range(8)]))
"""
    result = await sandbox.execute(swarm, timeout_s=60.0)
    assert result.run_status is RunStatus.MEMORY_EXCEEDED, result


HARNESS = """
import asyncio
from ludic_sandbox import PodmanSandboxPool
from plugins.sandbox.tests.sandbox_pools import podman_config

async def main():
    async with PodmanSandboxPool(podman_config(), n_workers=2) as pool:
        sandbox = await pool.checkout()
        print("running", flush=True)
        await sandbox.execute("import time; time.sleep(600)", timeout_s=600)

asyncio.run(main())
"""


async def test_the_next_pool_removes_the_containers_of_a_killed_harness():
    podman_config()
    harness = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HARNESS,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert harness.stdout is not None and await harness.stdout.readline() == b"running\n"
    ids = containers(harness.pid)
    assert len(ids) == 2
    harness.kill()
    await harness.wait()
    async with PodmanSandboxPool(podman_config(), n_workers=1):
        assert not containers(harness.pid)
    assert await nothing_is_left_of(ids)


@pytest.mark.extended(covered_by="test_the_next_pool_removes_the_containers_of_a_killed_harness")
async def test_a_pool_that_is_shut_down_in_the_middle_of_its_start_leaves_nothing():
    config, before = podman_config(), set(descendants(os.getpid()))
    for wait_s in (0.1, 0.2, 0.4):
        pool = PodmanSandboxPool(config, n_workers=2)
        starting = asyncio.create_task(pool.start())
        await asyncio.sleep(wait_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await pool.shutdown()
        assert not containers(os.getpid())
    assert set(descendants(os.getpid())) <= before


# --- a whole run ---

DOOMED = {3: "monitor", 5: "client", 7: "supervisor"}
"""Episode -> the process of its container that is killed while its program sleeps."""


async def kill_the_container_of(number: int, seen: set[str]) -> None:
    """SIGKILL for one process of the container in which this episode's program sleeps. Adds the ids of all containers to `seen`."""
    async with asyncio.timeout(120):
        while True:
            for container in containers(os.getpid()):
                seen.add(container)
                shown = "{{.State.ConmonPid}} {{.State.Pid}} {{.Name}}"
                found = subprocess.run(
                    ["podman", "inspect", "--format", shown, container], capture_output=True, text=True
                )
                monitor, supervisor, name = found.stdout.split() or ("0", "0", "")  # it may have been removed meanwhile
                if b"sleep\0%d\0" % (600 + number) in map(command_of, descendants(int(supervisor))):
                    clients = [pid for pid, text in commands() if b"podman\0run\0" in text and name.encode() in text]
                    pids = {"monitor": int(monitor), "client": clients[0], "supervisor": int(supervisor)}
                    os.kill(pids[DOOMED[number]], signal.SIGKILL)
                    return
            await asyncio.sleep(0.02)


def program_of(number: int) -> str:
    sleeps = f"import os\nos.execlp('sleep', 'sleep', '{600 + number}')"
    return f"<a>{sleeps if number in DOOMED else f'print({number})'}</a>"


@pytest.mark.extended(covered_by="test_a_killed_monitor_is_a_failure_of_the_sandbox_and_leaves_nothing")
async def test_a_run_whose_containers_are_killed_goes_on_and_leaves_nothing(tmp_path, monkeypatch):
    """Episodes whose monitor or client is killed fail and are not graded. A supervisor that is killed is a program that ended it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    config, before, seen = podman_config(LIMITS), set(descendants(os.getpid())), set[str]()
    async with PodmanSandboxPool(config, n_workers=2) as pool:
        engine = RolloutEngine(
            env_registry={"task": partial(ProgrammingEnv, sandbox_pool=pool, config={"timeout_per_test_s": 60})},
            protocol_registry={"play": lambda says: SingleAgentProtocol(make_agent([says]))},
            max_retries=0,
        )
        requests = [
            RolloutRequest(
                env=EnvSpec("task", {"sample": {"question": "?", "tests": [{"input": "", "expected": str(number)}]}}),
                protocol=ProtocolSpec("play", {"says": program_of(number)}),
            )
            for number in range(10)
        ]
        killers = [asyncio.create_task(kill_the_container_of(number, seen)) for number in DOOMED]
        rollouts = await engine.generate_rollouts(requests, max_steps=1, concurrency=4)
        await asyncio.gather(*killers)
        seen |= set(containers(os.getpid()))
    failed = {number: rollout.failure for number, rollout in enumerate(rollouts) if rollout.failure is not None}
    assert {number: failure.error for number, failure in failed.items()} == {3: "SandboxError", 5: "SandboxError"}
    assert "conmon" in failed[3].message and "podman run" in failed[5].message
    graded = {number: rollout.env_steps[-1] for number, rollout in enumerate(rollouts) if number not in failed}
    assert {number: step.info["tests"][0]["status"] for number, step in graded.items() if number in DOOMED} == {
        7: "killed"
    }
    assert [number for number, step in graded.items() if step.reward_components["env"] == 1.0] == [0, 1, 2, 4, 6, 8, 9]
    assert len(seen) >= 5, "two at a time, and another in the place of each that was killed"
    assert not containers(os.getpid()) and await nothing_is_left_of(sorted(seen))
    assert set(descendants(os.getpid())) <= before
    assert not list(tmp_path.iterdir())
