"""Faults of env workers and of the env server, with real processes: episodes fail as data, the run goes on, nothing is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from ludic.batch_gen import RolloutEngine
from ludic.inference import ScriptedClient
from ludic.interaction import SingleAgentProtocol
from ludic.types import ConfigError, EnvCrashed, EnvSpec, EnvWorkerError, ProtocolSpec, RolloutRequest, UnknownName
from ludic_envs.workers import EnvPool, EnvServer, supervisor, wire
from plugins.envs.tests.workers import parts
from tests.fakes import make_agent
from tests.unit.batch_gen.parts import RL

pytestmark = pytest.mark.integration

ACT = {"agent_0": "a"}


def children(parent: int | None = None) -> set[int]:
    """Running processes below `parent`; below this one if not given."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid=,stat="], capture_output=True, text=True, check=True).stdout
    rows = [line.split() for line in found.splitlines()]
    known, mine = {parent or os.getpid()}, set[int]()
    for _ in range(4):
        mine |= {int(pid) for pid, above, _ in rows if int(above) in known}
        known |= mine
    return {pid for pid in mine if is_running(pid)}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def what_is_held() -> dict[str, int]:
    """Processes, open files and sockets, and temporary folders."""
    return {
        "processes": len(children()),
        "files": len(os.listdir("/proc/self/fd")),
        "folders": len(os.listdir(tempfile.gettempdir())),
    }


@pytest.fixture
def nothing_left():
    """Counts before and after; the test closes its pools and servers."""
    before = what_is_held()
    yield
    after = what_is_held()
    assert after["processes"] <= before["processes"] and after["files"] <= before["files"], (before, after)
    assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("ludic-env")]


async def until(is_true) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


async def started(pool: EnvPool, **kwargs):
    env = await pool.make(**kwargs)
    await env.async_reset(seed=0)
    return env


# --- workers ---


async def test_kill_9_of_a_worker_fails_its_episodes_and_another_takes_its_place(tmp_path, nothing_left):
    async with EnvPool(parts.Faulty, workers=2) as pool:
        first, second = await started(pool), await started(pool)
        mark = tmp_path / "pid"
        step = asyncio.create_task(first.async_step({"agent_0": f"hang {mark}"}))
        await until(mark.exists)  # it is inside the step
        os.kill(int(mark.read_text()), signal.SIGKILL)
        with pytest.raises(EnvCrashed, match=r"Env worker 0 .* was ended by SIGKILL"):
            await step
        with pytest.raises(EnvCrashed):
            await first.async_step(ACT)
        await first.async_close()
        assert (await second.async_step(ACT))["agent_0"].obs == "1: a"  # the other worker has noticed nothing
        third = await started(pool)
        assert third.worker == 0 and (await third.async_step(ACT))["agent_0"].obs == "1: a"
        await third.async_close()
        await second.async_close()
        assert (pool.num_envs, pool.num_restarts) == (0, 1)


async def test_a_step_that_hangs_in_its_thread_costs_one_episode(nothing_left):
    async with EnvPool(parts.Faulty, workers=1) as pool:
        spins, waits, other = await started(pool), await started(pool), await started(pool)
        for env, fault in ((spins, "spin"), (waits, "hang")):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await env.async_step({"agent_0": fault})
        await asyncio.gather(spins.async_close(), waits.async_close())
        assert (await other.async_step(ACT))["agent_0"].obs == "1: a"
        assert pool.num_restarts == 0


async def test_a_worker_whose_event_loop_hangs_is_ended_and_its_successor_uses_threads(nothing_left):
    async with EnvPool(parts.FaultyOnLoop, workers=1, timeout_s=3.0) as pool:
        hangs, beside = await started(pool), await started(pool)
        with pytest.raises(EnvCrashed, match=r"stood still for 3 s.* It was at parts.py:\d+ in hang"):
            await hangs.async_step({"agent_0": "hang"})
        with pytest.raises(EnvCrashed):
            await beside.async_step(ACT)  # it was in the same process
        hangs, beside = await started(pool), await started(pool)
        step = asyncio.create_task(hangs.async_step({"agent_0": "hang"}))
        for _ in range(3):
            await beside.async_step(ACT)  # now a hanging env has its own thread
        step.cancel()
        await asyncio.gather(step, hangs.async_close(), return_exceptions=True)
        assert pool.num_restarts == 1


async def test_a_stopped_worker_is_killed_after_its_time_limit(monkeypatch, nothing_left):
    monkeypatch.setattr(supervisor, "_SILENT_S", 0.5)
    async with EnvPool(parts.Faulty, workers=1, timeout_s=3.0) as pool:
        env = await started(pool)
        os.kill(pool.processes[0], signal.SIGSTOP)
        with pytest.raises(EnvCrashed, match="no sign of life"):
            await env.async_step(ACT)


async def test_an_env_that_eats_memory_gets_an_error_and_its_worker_is_replaced(nothing_left):
    async with EnvPool(parts.Faulty, workers=1, memory_mb=200) as pool:
        eater, other = await started(pool), await started(pool)
        with pytest.raises(EnvWorkerError, match="MemoryError"):
            await eater.async_step({"agent_0": "eat"})
        await eater.async_close()
        assert (await other.async_step(ACT))["agent_0"].obs == "1: a"  # it is finished where it began
        (first,) = {(await other.async_step(ACT))["agent_0"].info["pid"]}
        new = await started(pool)
        assert (await new.async_step(ACT))["agent_0"].info["pid"] != first
        await other.async_close()
        await until(lambda: not is_running(first))  # it ends when its last env is closed
        await new.async_close()


async def test_a_worker_that_retires_gets_no_new_env_where_its_supervisor_hears_late(nothing_left, monkeypatch):
    hear = supervisor.Supervisor._hear
    async with EnvPool(parts.Faulty, workers=1, memory_mb=200) as pool:
        eater, other = await started(pool), await started(pool)
        first = (await other.async_step(ACT))["agent_0"].info["pid"]
        monkeypatch.setattr(supervisor.Supervisor, "_hear", lambda self, worker: (time.sleep(0.3), hear(self, worker)))
        with pytest.raises(EnvWorkerError, match="MemoryError"):
            await eater.async_step({"agent_0": "eat"})
        new = await started(pool)
        assert (await new.async_step(ACT))["agent_0"].info["pid"] != first
        monkeypatch.undo()
        for env in (eater, other, new):
            await env.async_close()


async def test_what_an_env_has_started_ends_with_its_worker(nothing_left):
    async with EnvPool(parts.Faulty, workers=1) as pool:
        env = await started(pool)
        with pytest.raises(EnvWorkerError) as caught:
            await env.async_step({"agent_0": "child"})
        child = int(caught.value.failure.message)
        os.kill(pool.processes[0], signal.SIGKILL)
        await until(lambda: not is_running(child))


def test_workers_and_their_children_end_when_the_trainer_is_killed(tmp_path):
    program = textwrap.dedent("""
        import asyncio, os, signal, sys
        from ludic_envs.workers import EnvPool
        from plugins.envs.tests.workers import parts
        async def main():
            pool = EnvPool(parts.Faulty, workers=2)
            env = await pool.make()
            await env.async_reset(seed=0)
            try:
                await env.async_step({"agent_0": "child"})
            except Exception as error:
                print(*pool.processes, error.failure.message, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3
    asyncio.run(until(lambda: not any(map(is_running, pids))))


async def play_with_five_in_a_hundred_hanging(num: int, *, workers: int, env_timeout_s: float) -> int:
    """Plays `num` envs at a time. The hanging ones fail as data and the others finish. Returns how often a worker was replaced."""
    client = ScriptedClient(lambda request: "<a>end</a>")
    async with EnvPool(parts.some_env, workers=workers) as pool:
        engine = RolloutEngine(
            env_registry={"some": pool.make},
            protocol_registry={"play": lambda: SingleAgentProtocol(make_agent(client))},
            env_timeout_s=env_timeout_s,
            max_retries=0,
        )
        requests = [
            RolloutRequest(
                env=EnvSpec("some", {"is_hanging": number % 20 == 0}),
                protocol=ProtocolSpec("play"),
                inference=RL,
            )
            for number in range(num)
        ]
        rollouts = await engine.generate_rollouts(requests, max_steps=2, concurrency=num)
        failed = [number for number, rollout in enumerate(rollouts) if rollout.failure is not None]
        assert failed == list(range(0, num, 20))
        assert {rollouts[number].failure.error for number in failed} == {"TimeoutError"}
        assert all(r.env_steps[-1].reward_components["env"] == 1.0 for r in rollouts if r.failure is None)
        assert pool.num_envs == 0
        return pool.num_restarts


async def test_sixty_envs_of_which_five_in_a_hundred_hang(nothing_left):
    assert await play_with_five_in_a_hundred_hanging(60, workers=2, env_timeout_s=5.0) == 0


@pytest.mark.extended(covered_by="test_sixty_envs_of_which_five_in_a_hundred_hang")
async def test_a_thousand_envs_of_which_five_in_a_hundred_hang(nothing_left):
    """Workers with many hung threads are replaced meanwhile."""
    assert await play_with_five_in_a_hundred_hanging(1000, workers=4, env_timeout_s=30.0) >= 1


# --- the server ---


@contextlib.asynccontextmanager
async def serving(*envs: str, token: str = "secret", workers: int = 1):
    """host:port of a server in this event loop, whose workers are real."""
    ready = asyncio.get_running_loop().create_future()
    env_server = EnvServer(dict(zip(["faulty", "other"], envs, strict=False)), workers=workers, token=token)
    task = asyncio.create_task(env_server.serve("127.0.0.1", 0, on_ready=ready.set_result))
    try:
        yield await ready
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


FAULTY = f"{parts.__file__}:Faulty"


async def test_a_server_serves_pools_with_the_token_and_refuses_others_with_advice(nothing_left):
    async with serving(FAULTY, f"{parts.__file__}:Sends") as address:
        async with EnvPool("faulty", server=address, token="secret") as pool:
            env = await started(pool)
            assert (await env.async_step(ACT))["agent_0"].obs == "1: a"
            await env.async_close()
            assert pool.info.envs.keys() == {"faulty", "other"} and pool.num_envs == 0
        for token in ("", "wrong"):
            with pytest.raises(ConfigError, match=r"token is wrong. Set \$LUDIC_ENV_TOKEN"):
                await EnvPool("faulty", server=address, token=token).make()
        with pytest.raises(UnknownName, match="Known: faulty, other"):
            await EnvPool("os:system", server=address, token="secret").make()
        with pytest.raises(ConfigError, match="name one: faulty, other"):
            await EnvPool(server=address, token="secret").make()


async def test_a_server_of_another_version_is_named(nothing_left):
    async def greet(reader, writer):
        greeting = {"name": "ludic env-server", "protocol": 99, "version": "9.9", "challenge": b""}
        writer.write(wire.pack(greeting))
        await writer.drain()
        writer.close()

    listening = await asyncio.start_server(greet, "127.0.0.1", 0)
    async with listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=r"ludic 9.9\) speaks protocol 99, this Ludic .* Install the same version"
        ):
            await EnvPool("faulty", server=address).make()


async def test_what_is_no_env_server_is_named(nothing_left):
    async def speak(reader, writer):
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as listening:
        address = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        with pytest.raises(ConfigError, match="does not answer like an env server"):
            await EnvPool("faulty", server=address).make()
    with pytest.raises(ConfigError, match=f"no env server at {address}.*ludic env-server ENV --port"):
        await EnvPool("faulty", server=address).make()
    with pytest.raises(ConfigError, match="write host:port"):
        EnvPool("faulty", server="localhost")


def start_server(port: int = 0, env: str = FAULTY) -> tuple["subprocess.Popen[str]", str]:
    """The command, and the address that it prints."""
    command = [sys.executable, "-m", "ludic.cli.main", "env-server", env, "--workers", "1", "--port", str(port)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LUDIC_ENV_TOKEN": "x"})
    said = program.stdout.readline()
    assert said.startswith("Serving"), said
    return program, said.split(" at ")[1].split(",")[0]


async def test_kill_9_of_the_server_fails_episodes_and_a_new_one_is_found(nothing_left):
    program, address = await asyncio.to_thread(start_server)
    async with EnvPool(FAULTY, server=address, token="x") as pool:
        env = await started(pool)
        step = asyncio.create_task(env.async_step({"agent_0": "hang"}))
        await asyncio.sleep(0)
        held = children(program.pid)
        program.kill()
        with pytest.raises(EnvCrashed, match=f"env server at {address} was lost"):
            await step
        await env.async_close()
        program.wait()
        program.stdout.close()
        await until(lambda: not any(map(is_running, held)))  # its workers have ended with it
        program, _ = await asyncio.to_thread(start_server, int(address.rpartition(":")[2]))
        again = await started(pool)
        assert (await again.async_step(ACT))["agent_0"].obs == "1: a"
        await again.async_close()
    program.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(program.wait, 60) == 0
    assert program.stdout.read() == "Stopped.\n"
    program.stdout.close()


async def test_episodes_that_wait_for_a_server_that_stays_away_fail_together(nothing_left):
    async with serving(FAULTY) as address:
        pool = EnvPool("faulty", server=address, token="secret", reconnect_s=1.0)
        env = await started(pool)
        await env.async_close()
    async with asyncio.timeout(60):  # one after the other they would take 200 s
        waited = await asyncio.gather(*(pool.make() for _ in range(200)), return_exceptions=True)
    assert {type(each) for each in waited} == {EnvCrashed}
    assert {str(each).partition(": ")[0] for each in waited} == {
        f"There is no connection to the env server at {address}"
    }
    assert pool.num_envs == 0
    pool.close()


@pytest.mark.extended(covered_by="test_kill_9_of_a_worker_fails_its_episodes_and_another_takes_its_place")
async def test_kill_9_of_a_servers_worker_fails_its_episodes_and_the_next_is_played(nothing_left):
    async with serving(FAULTY) as address, EnvPool("faulty", server=address, token="secret") as pool:
        env = await started(pool)
        with pytest.raises(EnvCrashed, match="connection to worker 0 of the env server"):
            await env.async_step({"agent_0": "die"})
        await env.async_close()
        again = await started(pool)
        assert (await again.async_step(ACT))["agent_0"].obs == "1: a"
