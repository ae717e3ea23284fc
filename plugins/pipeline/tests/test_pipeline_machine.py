"""Any order of pushes, batches, steps, checkpoints, crashes and resumes: nothing is lost, nothing is applied twice.

The test counts items in a scan of Redis, not with the code that it tests. `applied` lists the items that the weights have
learned from; a resume resets it to its value at the checkpoint. Rules have no preconditions, because what there is to do depends
on how fast Redis answers; a rule with nothing to do returns.
"""

import asyncio
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from ludic_pipeline.queue import PipelineBatchSource
from ludic_pipeline.queue.queue import MAX_TRIES, ExperienceQueue
from plugins.pipeline.tests.queue_parts import (
    Pusher,
    crash,
    kill_connections,
    let_lease_run_out,
    payload,
    raw_client,
    tags_of,
)
from tests.redis_fixtures import RedisServer

pytestmark = pytest.mark.slow

_numbers = count()
MAX_LAG = 2


class Pipeline(RuleBasedStateMachine):
    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.key = f"machine-{next(_numbers)}"
        self.stream = f"{{{self.key}}}"
        self.redis = raw_client(self.server)
        self.queue = ExperienceQueue(self.server.url, self.key, max_waiting=12)
        self.pusher = Pusher(self.queue)
        self.last_push: tuple[int, bytes, int, int] | None = None
        self.step = 0
        self.applied: list[int] = []
        self.given: set[int] = set()
        """In this life."""
        self.out: list[int] = []
        self.checkpoint: tuple[int, list[int], dict] | None = None
        self.source = self.make_source()

    def make_source(self, batch_size: int = 3) -> PipelineBatchSource:
        source = PipelineBatchSource(self.server.url, self.key, batch_size, poll_timeout=0.02, max_lag=MAX_LAG)
        if self.checkpoint is not None:
            source.load_state_dict(self.checkpoint[2])
        source.notify_version(self.step)
        return source

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    # --- actors ---

    @rule(size=st.integers(1, 4), age=st.integers(0, 4))
    def push(self, size: int, age: int) -> None:
        version = max(0, self.step - age)
        number, first = self.pusher.num_pushed + 1, self.pusher.num_items
        if self.run(self.pusher.push(size, version)):
            self.last_push = (number, payload(list(range(first, first + size)), version), size, version)

    @rule()
    def push_the_same_again(self) -> None:
        if self.last_push is None:
            return
        number, data, size, version = self.last_push
        pushed = self.queue.push(self.pusher.actor, number, data, num_items=size, oldest_version=version)
        assert self.run(pushed)

    @rule()
    def push_what_cannot_be_read(self) -> None:
        number = self.pusher.num_pushed + 1
        pushed = self.queue.push(self.pusher.actor, number, b"junk", num_items=2, oldest_version=self.step)
        self.pusher.num_pushed += self.run(pushed)

    @rule()
    def another_program_writes(self) -> None:
        self.redis.xadd(self.stream, {"n": "1", "junk": "x"})

    # --- the learner ---

    @rule(patience_s=st.sampled_from([0.0, 0.002, 0.01, 0.1]))
    def ask_for_a_batch(self, patience_s: float) -> None:
        """It may be cancelled at any moment, or there may be nothing."""
        batch = self.run(self.batch_within(patience_s))
        if batch is None:
            return
        tags = tags_of(batch)
        assert len(tags) >= 3 or self.is_last_try(batch)
        assert not self.given & set(tags), "given twice in one life"
        assert all(self.step - item.oldest_version <= MAX_LAG for item in batch.items)
        self.given |= set(tags)
        self.out += tags

    def is_last_try(self, batch) -> bool:
        """The batch is one group that two crashes have interrupted. Such a group gets a batch to itself, however small."""
        tries = [int(value.split()[0]) for value in self.redis.hvals(f"{self.stream}:tries")]
        return batch.meta["num_groups"] == 1 and MAX_TRIES in tries

    async def batch_within(self, patience_s: float):
        try:
            async with asyncio.timeout(patience_s):
                return await self.source.next_batch()
        except TimeoutError:
            return None

    @rule(share=st.floats(0, 1))
    def train(self, share: float) -> None:
        if not self.out:
            return
        self.step += 1
        self.source.notify_trained(self.step, round(share * len(self.out)))
        self.applied += self.out
        self.out = []
        assert len(self.applied) == len(set(self.applied)), "the weights have learned twice from one item"

    @rule(is_told=st.booleans())
    def save(self, is_told: bool) -> None:
        self.checkpoint = (self.step, list(self.applied), self.source.state_dict())
        if is_told:
            self.source.notify_saved(self.step)

    @rule()
    def acknowledge(self) -> None:
        if self.source._has_begun:
            self.run(self.source.flush())

    @rule(is_clean=st.booleans())
    def end_and_resume(self, is_clean: bool) -> None:
        self.run(self.source.close() if is_clean else crash(self.source))
        if not is_clean:
            let_lease_run_out(self.server, self.key)
        self.resume(batch_size=3)

    def resume(self, batch_size: int) -> None:
        self.step, applied, _ = self.checkpoint or (0, [], {})
        self.applied, self.out, self.given = list(applied), [], set()
        self.source = self.make_source(batch_size)

    @rule()
    def cut_connections(self) -> None:
        kill_connections(self.server)

    # --- what always holds ---

    @invariant()
    def the_account_is_right(self) -> None:
        """One transaction reads everything: the heartbeat's thread may acknowledge groups at any moment."""
        with self.redis.pipeline(transaction=True) as transaction:
            transaction.xrange(self.stream).hgetall(f"{self.stream}:counts").keys(f"{self.stream}:*:*")
            entries, counts, keys = transaction.execute()
        ours = [(id_, int(fields[b"n"])) for id_, fields in entries if b"p" in fields]
        ended = sum(int(counts.get(name, 0)) for name in (b"trained", b"stale", b"filtered", b"dead"))
        assert int(counts.get(b"produced", 0)) - ended == sum(n for _, n in ours)
        assert set(keys) == {f"{self.stream}:payload:".encode() + id_ for id_, _ in ours}

    def teardown(self) -> None:
        try:
            self.run(self.source.close())
            self.resume(batch_size=1)
            self.run(self.train_on_the_rest())
            self.the_account_is_right()
            # Of all that was pushed, what is not in the weights was counted as something else.
            trained, filtered = self.redis.hmget(f"{self.stream}:counts", "trained", "filtered")
            assert len(set(self.applied)) == len(self.applied) == int(trained or 0) + int(filtered or 0)
        finally:
            self.run(self.source.close())
            self.run(self.queue.close())
            self.redis.close()
            self.loop.close()

    async def train_on_the_rest(self) -> None:
        """Until the queue is empty, which it must become. The patience doubles: a slow machine may need longer for one batch."""
        patience_s = 0.1
        async with asyncio.timeout(120):
            while self.redis.xlen(self.stream):
                batch = await self.batch_within(patience_s)
                patience_s *= 2
                if batch is not None:
                    self.step += 1
                    self.applied += tags_of(batch)
                    self.source.notify_trained(self.step, len(batch))
                    self.source.notify_saved(self.step)
                if self.source._has_begun:
                    await self.source.flush()


def test_nothing_is_lost_and_nothing_is_applied_twice(shared_redis):
    machine = type("PipelineHere", (Pipeline,), {"server": shared_redis})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=15, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
