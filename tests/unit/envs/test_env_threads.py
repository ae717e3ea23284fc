"""Envs in separate threads: one that hangs, exits or raises costs its episode and nothing else."""

import asyncio
import contextvars
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import pytest

from ludic.envs import threads
from ludic.types import StepOutcome, StopReason
from tests.fakes import CountingEnv
from tests.unit.batch_gen.parts import SeededEnv, Threaded, make_engine, request, summary

pytestmark = pytest.mark.slow

ENOUGH = threading.Event()
"""Set at the end of a test: what hangs, ends. Each test has a new one, so no thread waits for an event that was cleared."""


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(threads, "_FINISH_S", 0.05)
    monkeypatch.setitem(globals(), "ENOUGH", threading.Event())
    threads._hung.clear()
    yield
    ENOUGH.set()


class Spins(SeededEnv):
    """Computes without end, in Python: an interruption ends it."""

    def env_step(self, action):
        while True:
            pass


class Waits(SeededEnv):
    """In a call into C, which no interruption ends."""

    def env_step(self, action):
        ENOUGH.wait()


class HangsInReset(SeededEnv):
    def env_reset(self, *, seed=None):
        ENOUGH.wait()


class HangsInConstructor(SeededEnv):
    def __init__(self) -> None:
        ENOUGH.wait()


class NeverAnswers(SeededEnv):
    async def async_env_step(self, action):
        await asyncio.Event().wait()


class HangsInClose(SeededEnv):
    async def async_close(self):
        await asyncio.Event().wait()


HANGS = [Spins, Waits, HangsInReset, HangsInConstructor, NeverAnswers]


async def play(cls, **settings):
    """Five honest episodes beside a broken one; all six, the broken one third."""
    engine = make_engine(env_registry={"odd": cls, "seeded": Threaded}, max_retries=0, **settings)
    requests = [request(env_seed=n, sampling_seed=n) for n in range(5)]
    return await engine.generate_rollouts(
        [*requests[:2], request("odd", env_seed=9, sampling_seed=9), *requests[2:]], max_steps=2
    )


CASES = [*((cls, "env_timeout_s") for cls in HANGS), (Waits, "episode_timeout_s"), (NeverAnswers, "episode_timeout_s")]


@pytest.fixture(scope="module")
def played():
    """What was played in each case: those that only wait at once, and without the one that computes."""

    async def play_all(cases):
        return dict(zip(cases, await asyncio.gather(*(play(cls, **{limit: 2.0}) for cls, limit in cases)), strict=True))

    computes = [case for case in CASES if case[0] is Spins]
    waits = [case for case in CASES if case not in computes]
    limits = {"_FINISH_S": 0.05, "_INTERRUPTED_S": 0.05}
    with mock.patch.multiple(threads, **limits), mock.patch.dict(globals(), ENOUGH=threading.Event()):
        found = asyncio.run(play_all(computes)) | asyncio.run(play_all(waits))
        ENOUGH.set()
    return found


@pytest.mark.parametrize(("cls", "limit"), CASES)
async def test_an_env_that_hangs_is_a_failed_episode_and_the_others_are_played(cls, limit, played):
    alone = await make_engine().generate_rollouts([request(env_seed=n, sampling_seed=n) for n in range(5)], max_steps=2)
    rollouts = list(played[cls, limit])
    failed = rollouts.pop(2)
    assert failed.stop is StopReason.FAILED and f"{limit}=2" in failed.failure.message
    assert failed.failure.error == "TimeoutError"
    assert [row[1:] for row in summary(rollouts)] == [row[1:] for row in summary(alone)]


async def play_alone(cls):
    engine = make_engine(env_registry={"odd": cls}, env_timeout_s=1.0, max_retries=0, max_failed_share=1)
    (rollout,) = await engine.generate_rollouts([request("odd")], max_steps=1)
    assert rollout.failure is not None


async def test_an_endless_computation_is_interrupted(caplog, monkeypatch):
    monkeypatch.setattr(threads, "_INTERRUPTED_S", 30.0)
    await play_alone(Spins)
    assert threads.num_hung() == 0 and not [r for r in caplog.records if "env thread" in r.getMessage()]


async def test_calls_that_go_on_are_counted_until_they_end(caplog, monkeypatch):
    monkeypatch.setattr(threads, "_INTERRUPTED_S", 0.05)
    for _ in range(2):
        await play_alone(Waits)
    told = [r.getMessage() for r in caplog.records if "env thread" in r.getMessage()]
    assert threads.num_hung() == 2 and [line[:14] for line in told] == ["1 env thread h", "2 env threads "]
    ENOUGH.set()
    for thread in list(threads._hung):
        thread.join(60)
    assert threads.num_hung() == 0


async def test_closing_an_env_has_a_time_limit(monkeypatch):
    monkeypatch.setattr(threads, "_CLOSE_S", 0.1)
    rollouts = await play(HangsInClose)
    assert "HangsInClose.async_close took longer than 0.1 s" in rollouts[2].failure.message


async def test_an_env_is_closed_after_its_last_call_has_ended():
    events = []

    class Slow(SeededEnv):
        def env_step(self, action):
            time.sleep(1.5)
            events.append("step")
            return super().env_step(action)

        async def async_close(self):
            events.append("close")

    monkey = threads._FINISH_S
    threads._FINISH_S = 20.0
    try:
        await play_alone(Slow)
    finally:
        threads._FINISH_S = monkey
    assert events == ["step", "close"]


async def test_an_env_made_while_its_episode_is_cancelled_is_closed():
    began, closed = threading.Event(), []

    class SlowToMake(SeededEnv):
        def __init__(self) -> None:
            began.set()
            time.sleep(0.3)
            super().__init__()

        async def async_close(self):
            closed.append(self)

    engine = make_engine(env_registry={"slow": SlowToMake})
    playing = asyncio.create_task(engine.generate_rollouts([request("slow")], max_steps=1))
    await asyncio.to_thread(began.wait)
    monkey, threads._FINISH_S = threads._FINISH_S, 20.0
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    threads._FINISH_S = monkey
    assert len(closed) == 1


async def test_all_calls_of_an_env_run_in_one_thread_and_one_context():
    number = contextvars.ContextVar("number", default=0)
    seen = []

    class Counts(CountingEnv):
        def __init__(self) -> None:
            super().__init__(3)
            self.note()

        def note(self):
            number.set(number.get() + 1)
            seen.append((threading.current_thread(), number.get()))

        def env_reset(self, *, seed=None):
            self.note()
            return super().env_reset(seed=seed)

        def env_step(self, action):
            self.note()
            return super().env_step("inc")

    await make_engine(env_registry={"counts": Counts}).generate_rollouts([request("counts")], max_steps=3)
    assert len({thread for thread, _ in seen}) == 1 and seen[0][0] is not threading.main_thread()
    assert [count for _, count in seen] == [1, 2, 3, 4, 5] and number.get() == 0


async def test_an_env_on_the_event_loop_that_exits_is_a_failed_episode_too():
    class Exits(SeededEnv):
        blocking = False

        def env_step(self, action):
            raise SystemExit(0)

    rollouts = await play(Exits)
    assert rollouts[2].failure.error == "SystemExit" and "raise SystemExit(0)" in rollouts[2].failure.user_traceback
    assert all(rollout.failure is None for rollout in rollouts[:2] + rollouts[3:])


async def test_an_env_that_catches_its_interruption_fails_its_episode_too():
    ended = threading.Event()

    class Stubborn(SeededEnv):
        def env_step(self, action):
            while not ended.is_set():
                try:
                    while not ended.is_set():
                        pass
                except BaseException:  # noqa: BLE001 - the point of the test
                    ended.set()
            return StepOutcome("late", 1.0, terminated=True)

    await play_alone(Stubborn)
    assert ended.wait(60)


SCRIPT = """
    import asyncio, logging, sys, time
    from tests.unit.batch_gen.parts import SeededEnv, Threaded, make_engine, request

    class Hangs(SeededEnv):
        def env_step(self, action):
            print("hangs", flush=True)
            {body}

    asyncio.run(make_engine(env_registry={{"odd": Hangs}}).generate_rollouts([request("odd")], max_steps=1))
"""


@pytest.mark.parametrize("body", ["time.sleep(600)", "while True: pass"])
def test_ctrl_c_ends_a_process_whose_env_hangs(body):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT).format(body=body)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a parent may ignore it
    )
    try:
        assert process.stdout.readline() == "hangs\n"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (130, -signal.SIGINT), errors
    assert "KeyboardInterrupt" in errors


async def test_threads_end_with_their_episodes():
    before = set(threading.enumerate())  # another test's env may still be in use
    await make_engine(env_registry={"seeded": Threaded}).generate_rollouts([request() for _ in range(20)], max_steps=1)
    for _ in range(100):
        left = [t for t in set(threading.enumerate()) - before if t.name == "ludic-env"]
        if not left:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(left)
