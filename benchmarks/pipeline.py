"""Samples per second from an actor to a learner through a local Redis, and how long a learner waits for them.

Samples of 2,000 tokens (500 of prompt, 1,500 sampled, with log-probs), in groups of 8. An actor process encodes and pushes,
a learner process pops, decodes and acknowledges at the same time, with a separate redis-server: three processes on the
available cores. Compared in the same run with the reference design: a dataclass of lists, pickled, RPUSH and BLPOP item by
item. Then the speed of each part alone, and the share of time that a learner waits for actors of about its own speed
(real actor, real source; the model and the training are sleeps).

    .venv/bin/python benchmarks/pipeline.py [--items 32000] [--repeats 3] [--only speed|parts|idle]
"""

import argparse
import asyncio
import itertools
import multiprocessing
import os
import pickle
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import redis

from ludic.agents import Agent
from ludic.batch_gen import GRPORequestStrategy, RolloutEngine
from ludic.context import FullDialog
from ludic.envs import SingleAgentEnv
from ludic.inference import ByteTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import xml_tag_parser
from ludic.types import (
    ActorTokenLogps,
    ChatResponse,
    EnvSpec,
    Info,
    ProtocolSpec,
    Rollout,
    RolloutRequest,
    RolloutStepKey,
    SampleAttachments,
    SampleOrigin,
    SAWItem,
    StepOutcome,
    StopReason,
    TokenCompletionRequest,
    VersionRun,
)
from ludic_pipeline.queue import ActorSettings, PipelineBatchSource, run_pipeline_actor
from ludic_pipeline.queue.lease import LearnerStatus, Lease
from ludic_pipeline.queue.queue import ExperienceQueue, Settlement, new_actor_id
from ludic_pipeline.queue.wire import decode_group, encode_group

NUM_PROMPT, NUM_SAMPLED = 500, 1500
GROUP_SIZE = 8
VOCAB = 151_936  # Qwen's vocabulary: ids take four bytes
NUM_DIFFERENT = 16
"""Groups that are made beforehand and sent repeatedly; each send encodes them again."""
TAKE_ITEMS = 256
VERSION = 7


# --- samples ---


def make_item(rng: np.random.Generator) -> SAWItem:
    """A sample like stitching's of an episode with one turn."""
    length = NUM_PROMPT + NUM_SAMPLED
    rewards = np.zeros(NUM_SAMPLED, dtype=np.float32)
    rewards[-1] = 1.0
    group_id = rng.bytes(16).hex()
    return SAWItem(
        rng.integers(0, VOCAB, length).astype(np.int32),
        None,
        np.arange(length) >= NUM_PROMPT,
        float(rng.normal()),
        {"correct": True, "request_meta": {"group_id": group_id, "task": int(rng.integers(7000))}},
        SampleAttachments(
            actor_logps=ActorTokenLogps(-rng.exponential(0.5, NUM_SAMPLED).astype(np.float32)),
            token_rewards=rewards,
            temperature=1.0,
            version_runs=(VersionRun(VERSION, NUM_SAMPLED),),
        ),
        make_origin(rng, group_id),
    )


def make_origin(rng: np.random.Generator, group_id: str) -> SampleOrigin:
    return SampleOrigin(
        rollout_id=rng.bytes(16).hex(), group_id=group_id, agent_id="agent_0", env_name="gsm8k", step_index=1, step_kind="env",
        num_turns=1, reward=1.0, total_reward=1.0, terminated=True, stop=StopReason.TERMINATED, finish_reason="stop",
        num_parse_errors=0,
    )  # fmt: skip


def make_groups() -> list[list[SAWItem]]:
    rng = np.random.default_rng(0)
    return [[make_item(rng) for _ in range(GROUP_SIZE)] for _ in range(NUM_DIFFERENT)]


@dataclass
class ReferenceItem:
    """A sample of the reference design: lists of numbers."""

    input_ids: list[int]
    attention_mask: list[int]
    action_mask: list[int]
    weight: float
    meta: dict[str, Any]
    token_logps: list[float]


def reference_item(item: SAWItem) -> ReferenceItem:
    assert item.attention_mask is not None and item.actor_logps is not None
    return ReferenceItem(
        input_ids=item.input_ids.tolist(),
        attention_mask=item.attention_mask.astype(int).tolist(),
        action_mask=item.action_mask.astype(int).tolist(),
        weight=item.weight,
        meta=item.record(),
        token_logps=item.actor_logps.tolist(),
    )


# --- a separate redis-server ---


@contextmanager
def redis_server(*, appendonly: bool) -> Iterator[str]:
    """Its address; the server is stopped and its files removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="ludic-bench-"))
    socket = folder / "redis.sock"
    command = [
        "redis-server", "--port", "0", "--unixsocket", str(socket), "--dir", str(folder), "--save", "",
        "--appendonly", "yes" if appendonly else "no", "--auto-aof-rewrite-min-size", "1gb",
    ]  # fmt: skip
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            assert server.poll() is None, "redis-server did not start; is it installed?"
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def redis_cpu_s(url: str) -> float:
    with redis.Redis.from_url(url) as client:
        used = client.info("cpu")
    return used["used_cpu_user"] + used["used_cpu_sys"]


# --- the two ends: ours ---


class Countdown:
    """Number of groups still to send, shared by the senders."""

    def __init__(self, left: int) -> None:
        self.left = left

    def take(self, wanted: int) -> int:
        taken = min(wanted, self.left)
        self.left -= taken
        return taken


async def push_all(url: str, next_payload: Callable[[], bytes], num_groups: int, barrier: Barrier) -> None:
    todo = Countdown(num_groups)
    async with ExperienceQueue(url, max_waiting=256) as queue:
        await queue.counts()  # everything is imported and connected
        barrier.wait()
        # Two at a time: one encodes while the other sends.
        await asyncio.gather(*(push_share(queue, next_payload, todo) for _ in range(2)))


async def push_share(queue: ExperienceQueue, next_payload: Callable[[], bytes], todo: Countdown) -> None:
    actor, numbers = new_actor_id(), itertools.count(1)
    while todo.take(1):
        number, payload = next(numbers), next_payload()
        while not await queue.push(actor, number, payload, num_items=GROUP_SIZE, oldest_version=VERSION):
            await asyncio.sleep(0.001)


async def pop_all(url: str, read: Callable[[bytes], Any], num_groups: int, barrier: Barrier) -> None:
    todo, lease = Countdown(num_groups), Lease("learner-0")
    async with ExperienceQueue(url) as queue:
        await queue.acquire(lease)
        barrier.wait()
        await asyncio.gather(*(pop_share(queue, lease, read, todo) for _ in range(2)))


async def pop_share(queue: ExperienceQueue, lease: Lease, read: Callable[[bytes], Any], todo: Countdown) -> None:
    status = LearnerStatus(version=VERSION, items_per_update=TAKE_ITEMS)
    while todo.left:
        taken = await queue.take(lease, status, max_items=TAKE_ITEMS)
        for group in taken.groups:
            read(group.payload)
        todo.take(len(taken.groups))
        if taken.groups:
            await queue.settle(lease, status, [Settlement(id=g.id, trained=g.num_items) for g in taken.groups])
        else:
            await asyncio.sleep(0.001)


def our_actor(url: str, num_items: int, barrier: Barrier) -> None:
    groups = itertools.cycle(make_groups())
    asyncio.run(push_all(url, lambda: encode_group(next(groups)), num_items // GROUP_SIZE, barrier))


def our_learner(url: str, num_items: int, barrier: Barrier) -> None:
    asyncio.run(pop_all(url, decode_group, num_items // GROUP_SIZE, barrier))


def bytes_actor(url: str, num_items: int, barrier: Barrier) -> None:
    payloads = itertools.cycle([encode_group(group) for group in make_groups()])
    asyncio.run(push_all(url, lambda: next(payloads), num_items // GROUP_SIZE, barrier))


def bytes_learner(url: str, num_items: int, barrier: Barrier) -> None:
    asyncio.run(pop_all(url, len, num_items // GROUP_SIZE, barrier))


# --- the two ends: the reference design ---


def reference_actor(url: str, num_items: int, barrier: Barrier) -> None:
    push_pickles(url, num_items, barrier, [reference_item(item) for group in make_groups() for item in group])


def arrays_actor(url: str, num_items: int, barrier: Barrier) -> None:
    push_pickles(url, num_items, barrier, [item for group in make_groups() for item in group])


def push_pickles(url: str, num_items: int, barrier: Barrier, items: list[Any]) -> None:
    client = redis.Redis.from_url(url)
    client.ping()
    barrier.wait()
    for item in itertools.islice(itertools.cycle(items), num_items):
        client.rpush("baseline", pickle.dumps(item))


def pickle_learner(url: str, num_items: int, barrier: Barrier) -> None:
    client = redis.Redis.from_url(url)
    client.ping()
    barrier.wait()
    for _ in range(num_items):
        _, data = client.blpop(["baseline"])  # type: ignore[misc]
        pickle.loads(data)


# --- throughput ---

Role = Callable[[str, int, Barrier], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One transport from actor to learner."""

    items_per_s: float
    cpu_us: dict[str, float]
    """Microseconds of processor time per item, by process. Unlike the rate, it does not depend on other processes."""

    @property
    def items_per_s_of_two_cores(self) -> float:
        """Throughput of two cores if no process ever waited for another."""
        return 2e6 / sum(self.cpu_us.values())


def with_cpu(role: Role, url: str, num_items: int, barrier: Barrier, used_s: "Synchronized[float]") -> None:
    class Started:
        """The barrier, and the processor time when it was passed."""

        def wait(self) -> None:
            barrier.wait()
            self.at = time.process_time()

    started = Started()
    role(url, num_items, started)  # type: ignore[arg-type]
    used_s.value = time.process_time() - started.at


def measure(actor: Role, learner: Role, num_items: int, *, appendonly: bool) -> Measured:
    """Seconds from when both are ready to the learner's last item."""
    spawn = multiprocessing.get_context("spawn")
    with redis_server(appendonly=appendonly) as url:
        barrier, used = spawn.Barrier(3), [spawn.Value("d") for _ in range(2)]
        processes = [
            spawn.Process(target=with_cpu, args=(role, url, num_items, barrier, value))
            for role, value in zip((actor, learner), used, strict=True)
        ]
        for process in processes:
            process.start()
        barrier.wait()
        started, redis_before = time.perf_counter(), redis_cpu_s(url)
        for process in reversed(processes):
            process.join()
        seconds, redis_s = time.perf_counter() - started, redis_cpu_s(url) - redis_before
    assert all(process.exitcode == 0 for process in processes)
    spent = {"actor": used[0].value, "redis": redis_s, "learner": used[1].value}
    return Measured(
        items_per_s=num_items / seconds, cpu_us={name: 1e6 * cpu_s / num_items for name, cpu_s in spent.items()}
    )


OURS, REFERENCE = "ours", "reference: pickled lists, RPUSH/BLPOP"


def speed(num_items: int, repeats: int, *, appendonly: bool) -> None:
    ways: dict[str, tuple[Role, Role, int]] = {
        OURS: (our_actor, our_learner, num_items),
        REFERENCE: (reference_actor, pickle_learner, num_items // 8),
        "pickled arrays, RPUSH/BLPOP": (arrays_actor, pickle_learner, num_items // 4),
        "Redis alone: our bytes, not read": (bytes_actor, bytes_learner, num_items),
    }
    tries: dict[str, list[Measured]] = {name: [] for name in ways}
    for _ in range(repeats):  # alternating, so that a disturbance does not hit one row only
        for name, (actor, learner, count) in ways.items():
            tries[name].append(measure(actor, learner, count, appendonly=appendonly))
    best = {name: max(found, key=lambda found: found.items_per_s) for name, found in tries.items()}
    print(f"\nappendonly {'yes' if appendonly else 'no'}; {os.cpu_count()} cores; best of {repeats}")
    print(f"{'actor -> Redis -> learner':38} {'items/s':>9} {'ours is':>8}   CPU µs per item: {'actor':>6} {'redis':>6} "
          f"{'learner':>7}   two free cores: items/s")  # fmt: skip
    for name, found in best.items():
        cpu = found.cpu_us
        print(f"{name:38} {found.items_per_s:9,.0f} {best[OURS].items_per_s / found.items_per_s:7.1f}x {'':19}"
              f"{cpu['actor']:6.0f} {cpu['redis']:6.0f} {cpu['learner']:7.0f} {found.items_per_s_of_two_cores:25,.0f}")  # fmt: skip


def parts() -> None:
    group = make_groups()[0]
    data, packed = encode_group(group), encode_group(group, compress=True)
    lists = [reference_item(item) for item in group]
    pickled = [pickle.dumps(item) for item in lists]
    works: dict[str, tuple[int, Callable[[], Any]]] = {
        "encode": (len(data), lambda: encode_group(group)),
        "decode": (len(data), lambda: decode_group(data)),
        "encode with zstd": (len(packed), lambda: encode_group(group, compress=True)),
        "decode with zstd": (len(packed), lambda: decode_group(packed)),
        "pickle.dumps of lists": (len(b"".join(pickled)), lambda: [pickle.dumps(item) for item in lists]),
        "pickle.loads of lists": (len(b"".join(pickled)), lambda: [pickle.loads(item) for item in pickled]),
    }
    print(f"\n{'one part alone':38} {'items/s of one core':>20} {'bytes per item':>15}")
    for name, (num_bytes, work) in works.items():
        print(f"{name:38} {items_per_cpu_second(work):20,.0f} {num_bytes / GROUP_SIZE:15,.0f}")


def items_per_cpu_second(work: Callable[[], Any], seconds: float = 1.0) -> float:
    """Processor time per item of handling a group, independent of other processes."""
    work()
    started, num_groups = time.process_time(), 0
    while (used := time.process_time() - started) < seconds:
        work()
        num_groups += 1
    return num_groups * GROUP_SIZE / used


# --- learner idle time ---

ITEMS_PER_UPDATE, UPDATE_S, MAX_LAG = 64, 0.25, 4
CONCURRENCY = 96
"""Concurrent episodes of one actor: a batch and a half."""


class Riddle(SingleAgentEnv):
    """One question, one answer."""

    def env_reset(self, *, seed: int | None = None) -> tuple[str, Info]:
        return "?" * (NUM_PROMPT - 50), {}

    def env_step(self, action: str) -> StepOutcome:
        return StepOutcome("", float(random.random() < 0.5), terminated=True)


class TakesItsTime:
    """A policy whose answers have 1,500 tokens and take between half and one and a half times `mean_s`."""

    _IDS = np.arange(NUM_SAMPLED, dtype=np.int32)
    _LOGPROBS = np.full(NUM_SAMPLED, -0.5, dtype=np.float32)

    def __init__(self, url: str, mean_s: float) -> None:
        self._url, self._mean_s = url, mean_s
        self._version = 0

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        begun_with = self._version
        share = random.random()
        seconds = self._mean_s * (0.5 + share)
        await asyncio.sleep(seconds)
        runs = [VersionRun(begun_with, NUM_SAMPLED // 2), VersionRun(self._version, NUM_SAMPLED - NUM_SAMPLED // 2)]
        response = ChatResponse(
            text="<answer>yes</answer>",
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=self._IDS,
            completion_logprobs=self._LOGPROBS,
            finish_reason="stop",
            version_runs=tuple(runs),
        )
        return response, {}

    async def get_policy_version(self) -> int:
        return self._version

    def sync_weights(self, params: Any, *, timeout_s: float = 600.0, version: Any = None) -> str:
        raise RuntimeError("no weights")

    async def follow(self) -> None:
        """New weights arrive at once: the version is the learner's own."""
        async with ExperienceQueue(self._url) as queue:
            while True:
                self._version = (await queue.counts()).version or 0
                await asyncio.sleep(0.05)


class TotalReward:
    def compute(self, rollouts: Sequence[Rollout]) -> dict[RolloutStepKey, float]:
        return {(rollout.id, step.index): rollout.total_reward for rollout in rollouts for step in rollout.steps}


def balanced_actor(url: str, speed_ratio: float) -> None:
    """Makes `speed_ratio` times as many items as the learner can train on."""
    client = TakesItsTime(url, CONCURRENCY * UPDATE_S / ITEMS_PER_UPDATE / speed_ratio)

    def protocol(**settings: Any) -> SingleAgentProtocol:
        parser, template = xml_tag_parser("answer"), ByteTemplate()
        agent = Agent(client=client, model="none", ctx=FullDialog(), parser=parser, chat_template=template)
        return SingleAgentProtocol(agent, **settings)

    seeds = itertools.count()
    engine = RolloutEngine(env_registry={"riddle": Riddle}, protocol_registry={"single": protocol})
    asyncio.run(
        run_pipeline_actor(
            engine,
            lambda: [RolloutRequest(env=EnvSpec("riddle"), protocol=ProtocolSpec("single"), env_seed=next(seeds))],
            TotalReward(),
            url,
            concurrency=CONCURRENCY,
            client=client,
            settings=ActorSettings(strategy=GRPORequestStrategy(GROUP_SIZE), follow=client.follow),
        )
    )


async def train_on(url: str, num_updates: int, *, num_warm: int = 8) -> tuple[float, str]:
    """Share of time that a warmed-up learner waits, and the queue's counters."""
    source = PipelineBatchSource(url, batch_size=ITEMS_PER_UPDATE, max_lag=MAX_LAG, acknowledge="trained")
    waited_s = 0.0
    begun = time.perf_counter()
    async with source:
        source.notify_version(0)
        for step in range(1, num_updates + num_warm + 1):
            if step == num_warm + 1:
                waited_s, begun = 0.0, time.perf_counter()
            asked = time.perf_counter()
            batch = await source.next_batch()
            waited_s += time.perf_counter() - asked
            await asyncio.to_thread(time.sleep, UPDATE_S)  # a GPU at work: the processor is free
            source.notify_trained(step, len(batch))
        total_s = time.perf_counter() - begun
        await source.flush()
        stats = await source.refresh_stats()
    return waited_s / total_s, stats.identity()


def idle(num_updates: int) -> None:
    print(f"\nlearner: {ITEMS_PER_UPDATE} items per update of {UPDATE_S} s, max_lag {MAX_LAG}; one actor, {CONCURRENCY} "
          f"episodes at a time, in groups of {GROUP_SIZE}; {num_updates} updates")  # fmt: skip
    print(f"{'actor / learner speed':>22} {'learner waits':>14}   account")
    spawn = multiprocessing.get_context("spawn")
    for ratio in (0.8, 1.0, 1.05, 1.2, 2.0):
        with redis_server(appendonly=True) as url:
            actor = spawn.Process(target=balanced_actor, args=(url, ratio))
            actor.start()
            share, account = asyncio.run(train_on(url, num_updates))
            actor.terminate()
            actor.join()
        print(f"{ratio:22.2f} {share:14.1%}   {account}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--items", type=int, default=32_000)
    arguments.add_argument("--repeats", type=int, default=3)
    arguments.add_argument("--updates", type=int, default=40, help="of the learner that waits")
    arguments.add_argument("--only", choices=["speed", "parts", "idle"])
    options = arguments.parse_args()
    if options.only in (None, "speed"):
        for appendonly in (False, True):
            speed(options.items, options.repeats, appendonly=appendonly)
    if options.only in (None, "parts"):
        parts()
    if options.only in (None, "idle"):
        idle(options.updates)


if __name__ == "__main__":
    main()
