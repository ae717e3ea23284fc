"""The learner's end against a real redis-server: batches, acknowledgement, resume, leases, and what goes wrong on the way."""

import asyncio
import shutil
import threading
import time
from itertools import count

import pytest

from ludic.training import TrainingLoop
from ludic.types import ConfigError
from ludic_pipeline.queue import (
    LeaseHeld,
    LeaseTimes,
    PipelineBatchSource,
    PipelineStats,
    RedisGone,
)
from ludic_pipeline.queue.lease import Lease
from ludic_pipeline.queue.queue import ExperienceQueue
from plugins.pipeline.tests.queue_parts import (
    ACTOR,
    SHORT,
    Pusher,
    crash,
    let_lease_run_out,
    raw_client,
    tags_of,
)
from tests.unit.training.test_training_loop import Recorder

pytestmark = pytest.mark.slow

_numbers = count()
ONLY_ON_REQUEST = {"batch_size": 4, "world_size": 2}
"""A rank with batches of two items, which fetches nothing ahead."""


@pytest.fixture
def key() -> str:
    return f"source-{next(_numbers)}"


@pytest.fixture
async def queue(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key) as made:
        yield made


@pytest.fixture
async def pusher(queue):
    return Pusher(queue)


@pytest.fixture
async def make_source(shared_redis, key):
    made = []

    def make(batch_size=4, **settings) -> PipelineBatchSource:
        made.append(PipelineBatchSource(shared_redis.url, key, batch_size, **settings))
        return made[-1]

    yield make
    for source in made:
        await source.close()


async def until(condition) -> None:
    """Wait for what another thread or task is about to do."""
    async with asyncio.timeout(20):
        while not await condition():
            await asyncio.sleep(0.01)


# --- batches ---


async def test_a_batch_has_whole_groups_and_enough_items(pusher, make_source):
    groups = [await pusher.push(size) for size in (3, 3, 3, 1)]
    source = make_source(batch_size=4)
    first, second = await source.next_batch(), await source.get_next_batch()
    assert tags_of(first) == groups[0] + groups[1]
    assert tags_of(second) == groups[2] + groups[3]
    assert first.meta["source"] == "pipeline_redis"
    assert (first.meta["num_groups"], first.meta["num_samples"], second.meta["batch_index"]) == (2, 6, 1)
    assert first.meta["rollout_metrics"]["queue_items"] == first.meta["queue_items"] == 10.0, "as of its beginning"


async def test_the_next_batch_is_fetched_while_this_one_is_trained_on(queue, pusher, make_source):
    for _ in range(3):
        await pusher.push()
    await make_source(batch_size=2).next_batch()

    async def is_ahead() -> bool:
        return (await queue.counts()).unacknowledged_groups == 2

    await until(is_ahead)
    assert (await queue.beat_actor(ACTOR, 0)).waiting_items == 4, "fetched ahead is not begun"


async def test_with_several_ranks_groups_are_taken_only_on_request(queue, pusher, make_source):
    """What one rank would fetch ahead, another waits for."""
    for _ in range(3):
        await pusher.push()
    await make_source(**ONLY_ON_REQUEST).next_batch()
    await asyncio.sleep(0.05)
    assert (await queue.counts()).unacknowledged_groups == 1


async def test_actors_see_whether_the_learner_waits(queue, pusher, make_source):
    source = make_source(**ONLY_ON_REQUEST, max_lag=3)
    source.notify_version(5)
    waiting = asyncio.create_task(source.next_batch())

    async def is_waiting() -> bool:
        return (await queue.beat_actor(ACTOR, 0)).is_waiting

    await until(is_waiting)
    await pusher.push(version=5)
    await waiting
    state = await queue.beat_actor(ACTOR, 0)
    assert (state.is_waiting, state.version, state.items_per_update, state.max_lag) == (False, 5, 4, 3)
    assert state.waiting_items == 0


# --- acknowledging items ---


async def test_the_heartbeat_acknowledges_while_the_trainer_is_busy(queue, pusher, make_source):
    source = make_source(batch_size=2, lease_times=SHORT)
    await pusher.push()
    await source.next_batch()
    source.notify_trained(1, 2)
    source.notify_saved(1)

    async def is_settled() -> bool:
        return (await queue.counts()).trained == 2

    await until(is_settled)

    async def is_shown() -> bool:
        return source.stats().trained == 2

    await until(is_shown)
    assert source.stats().balance == 0


async def test_a_heartbeat_that_arrives_late_does_not_set_the_version_back(shared_redis, queue, pusher, make_source):
    """The heartbeat's thread has built its status; before it sends it, the trainer finishes a step and the event loop calls."""
    source = make_source(**ONLY_ON_REQUEST)
    await pusher.push()
    source.notify_version(4)
    await source.next_batch()
    loop = asyncio.get_running_loop()
    versions = []

    async def see_version() -> None:
        versions.append((await queue.beat_actor(ACTOR, 0)).version)

    async def finish_a_step() -> None:
        source.notify_trained(5, 2)
        source.notify_saved(5)
        await source.flush()
        await see_version()

    with raw_client(shared_redis) as client:

        def send_late(script, args):
            if not versions:
                asyncio.run_coroutine_threadsafe(finish_a_step(), loop).result()
            answer = client.register_script(script)(keys=queue.keys.all, args=args)
            asyncio.run_coroutine_threadsafe(see_version(), loop).result()
            return answer

        await asyncio.to_thread(source._beat, send_late)
    assert len(versions) >= 3 and set(versions) == {5}


async def test_what_was_fetched_ahead_and_became_too_old_is_not_handed_out(queue, pusher, make_source):
    source = make_source(batch_size=2, max_lag=0)
    source.notify_version(0)
    await pusher.push(version=0)
    await source.next_batch()
    await pusher.push(version=0)

    async def is_ahead() -> bool:
        return (await queue.counts()).unacknowledged_groups == 2

    await until(is_ahead)
    source.notify_trained(1, 2)
    source.notify_version(1)
    fresh = await pusher.push(version=1)
    assert tags_of(await source.next_batch()) == fresh
    stats = await source.refresh_stats()
    assert (stats.stale, stats.dropped_lags, stats.balance) == (2, {1: 2}, 0)


# --- what cannot be read ---


# --- crashes and resumes ---


async def test_a_batch_that_was_trained_on_in_part_goes_on_from_the_checkpoint_and_not_from_the_queue(
    shared_redis, key, queue, pusher, make_source, tmp_path
):
    groups = [await pusher.push() for _ in range(6)]
    old, first = make_source(batch_size=4), Recorder(tmp_path, mini_batches=4)
    loop = TrainingLoop(first, old)
    await loop.train_step()
    checkpoint = loop._state()  # on disk by now, but Redis has not heard of it
    await loop.train_step()
    await crash(old)
    let_lease_run_out(shared_redis, key)
    new, second = make_source(batch_size=4), Recorder(tmp_path, mini_batches=4)
    second.saved = checkpoint
    resumed = TrainingLoop(second, new, resume_from="latest")
    seen = []
    plain = second.update
    second.update = lambda step, batch, on_step: seen.append(tags_of(batch)) or plain(step, batch, on_step)
    for _ in range(7):
        await resumed.train_step()
    own = {tag for group in groups[:2] for tag in group}
    assert all(set(part) <= own for part in seen[:3]) and len({tag for part in seen[:3] for tag in part}) == 3
    assert sorted(tag for part in seen[3:] for tag in part) == sorted(tag for group in groups[2:4] for tag in group)
    resumed.save_checkpoint()
    await new.flush()
    counts = await queue.counts()
    assert (counts.trained, counts.balance) == (8, 0)


async def test_actors_are_told_how_many_versions_a_batch_makes(queue, pusher, make_source):
    source = make_source(batch_size=2, versions_per_batch=4)
    await pusher.push()
    await source.next_batch()
    state = await queue.beat_actor(ACTOR, 0)
    assert (state.items_per_update, state.versions_per_batch) == (2, 4)
    with pytest.raises(ConfigError, match="versions_per_batch=0"):
        make_source(versions_per_batch=0)


async def test_what_redis_has_not_confirmed_is_still_in_the_state(redis_server):
    async with (
        ExperienceQueue(redis_server.url) as queue,
        PipelineBatchSource(redis_server.url, patience_s=0.1, **ONLY_ON_REQUEST) as source,
    ):
        await Pusher(queue).push()
        await source.next_batch()
        source.notify_trained(1, 2)
        source.notify_saved(1)
        redis_server.kill()
        with pytest.raises(RedisGone):
            await source.flush()
        assert [row[1:] for row in source.state_dict()["trained"]] == [[1, 2, 0]]
        redis_server.start()
        await source.flush()
        assert source.state_dict()["trained"] == []
        assert (await queue.counts()).trained == 2


async def test_groups_are_not_given_twice_after_redis_lost_its_last_writes(redis_server):
    """With everysec a kill -9 can undo takes and acknowledgements that were answered; here a copy of its file does."""
    async with (
        ExperienceQueue(redis_server.url) as queue,
        PipelineBatchSource(redis_server.url, **ONLY_ON_REQUEST) as source,
    ):
        pusher = Pusher(queue)
        groups = [await pusher.push() for _ in range(4)]
        before = redis_server.folder.with_suffix(".before")
        await queue.counts()
        shutil.copytree(redis_server.folder / "appendonlydir", before)
        seen = [tags_of(await source.next_batch()) for _ in range(2)]
        source.notify_trained(1, 4)
        source.notify_saved(1)
        seen.append(tags_of(await source.next_batch()))
        assert (await queue.counts()).trained == 4
        redis_server.kill()
        shutil.rmtree(redis_server.folder / "appendonlydir")
        before.rename(redis_server.folder / "appendonlydir")
        redis_server.start()
        assert (await queue.counts()).queue_items == 8, "Redis knows of nothing"
        seen.append(tags_of(await source.next_batch()))
        assert seen == groups
        source.notify_trained(2, 3)
        source.notify_saved(2)
        await source.flush()
        counts = await queue.counts()
        assert (counts.trained, counts.filtered, counts.in_queue, counts.balance) == (7, 1, 0, 0)


# --- leases ---


async def test_a_new_learner_waits_until_the_lease_of_a_dead_one_has_expired(pusher, make_source, caplog):
    tags = await pusher.push()
    old = make_source(batch_size=2, lease_times=SHORT)
    await old.next_batch()
    await crash(old)
    new = make_source(batch_size=2, lease_times=SHORT)
    assert tags_of(await new.next_batch()) == tags
    assert "for its lease to expire" in caplog.text


@pytest.mark.parametrize("set_back_s", [60, 3600, 10**9])
async def test_a_lease_is_taken_over_although_the_clock_of_redis_was_set_back(
    shared_redis, key, pusher, make_source, set_back_s
):
    """The dead learner's lease is of the future then; it runs out by the new one's own clock."""
    tags = await pusher.push()
    old = make_source(batch_size=2, lease_times=SHORT)
    await old.next_batch()
    await crash(old)
    with raw_client(shared_redis) as client:
        token, written_ms = client.hget(f"{{{key}}}:leases", "learner-0").split()
        client.hset(f"{{{key}}}:leases", "learner-0", b"%s %d" % (token, int(written_ms) + 1000 * set_back_s))
    new = make_source(batch_size=2, lease_times=SHORT)
    async with asyncio.timeout(20):
        assert tags_of(await new.next_batch()) == tags


async def test_a_live_learner_keeps_its_lease(pusher, make_source, monkeypatch):
    await pusher.push()
    times = LeaseTimes(holds_s=1.0, beat_s=0.05)  # a busy machine may be late with a heartbeat
    monkeypatch.setattr("ludic_pipeline.queue.queue._LEASES_TO_WAIT", 1.5)
    await make_source(batch_size=2, lease_times=times).next_batch()
    with pytest.raises(LeaseHeld, match="alive"):
        await make_source(batch_size=2, lease_times=times).next_batch()


async def test_a_blocked_event_loop_does_not_lose_the_lease(queue, pusher, make_source):
    groups = [await pusher.push() for _ in range(2)]
    times = LeaseTimes(holds_s=2.0, beat_s=0.1)  # a busy machine may be late with a heartbeat
    source = make_source(batch_size=2, lease_times=times)
    await source.next_batch()
    time.sleep(1.5 * times.holds_s)
    async with ExperienceQueue(queue.address.url, queue.keys.queue_key, lease_times=times) as other:
        holder, left_s, _ = await other.acquire(Lease("learner-0"))
    assert holder == source._lease.token
    assert left_s > 0
    assert tags_of(await source.next_batch()) == groups[1]


async def test_a_learner_stopped_during_its_start_releases_the_lease(queue, make_source):
    for moment in range(30):
        source = make_source(batch_size=2)
        task = asyncio.create_task(source.next_batch())
        for _ in range(moment):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task})
        await source.close()
    last = Lease("learner-0")
    assert (await queue.acquire(last))[0] == last.token


# --- threads and loops ---


async def test_the_trainer_may_notify_from_other_threads(queue, pusher, make_source):
    source = make_source(batch_size=2, lease_times=SHORT)
    is_over = threading.Event()

    def read_all_the_time() -> None:
        while not is_over.is_set():
            source.state_dict()
            source.stats()
            time.sleep(0)

    reader = threading.Thread(target=read_all_the_time)
    reader.start()
    try:
        for step in range(1, 21):
            await pusher.push()
            await source.next_batch()
            tellers = [
                threading.Thread(target=source.notify_trained, args=(step, 2)),
                threading.Thread(target=source.notify_saved, args=(step - 1,)),
                threading.Thread(target=source.notify_version, args=(step,)),
            ]
            for teller in tellers:
                teller.start()
            for teller in tellers:
                teller.join()
    finally:
        is_over.set()
        reader.join()
    source.notify_saved(20)
    await source.close()
    counts = await queue.counts()
    assert (counts.trained, counts.in_queue, counts.balance) == (40, 0, 0)


def test_a_source_outlives_its_event_loop(shared_redis, key):
    """`train_sync` twice: the second run goes on with what the first had fetched."""

    async def push_some() -> list[list[int]]:
        async with ExperienceQueue(shared_redis.url, key) as queue:
            pusher = Pusher(queue)
            return [await pusher.push() for _ in range(6)]

    groups = asyncio.run(push_some())
    source = PipelineBatchSource(shared_redis.url, key, batch_size=2)
    seen = [tags_of(asyncio.run(source.next_batch())) for _ in range(6)]
    assert seen == groups
    asyncio.run(source.close())


# --- settings, stats ---


async def test_loading_a_state_after_the_first_batch_is_refused(pusher, make_source):
    await pusher.push()
    source = make_source(batch_size=2)
    await source.next_batch()
    with pytest.raises(ConfigError, match="before the first next_batch"):
        source.load_state_dict({"num_batches": 0, "trained": []})


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 2, "world_size": 2},
        {"rank": -1},
        {"world_size": 0},
        {"batch_size": 0},
        {"batch_size": 1, "world_size": 2},
        {"poll_timeout": 0},
        {"max_lag": -1},
        {"acknowledge": "never"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        PipelineBatchSource("redis://localhost", **wrong)


def test_the_account_is_shown_in_one_line():
    """Samples that were trained on since the last checkpoint are fetched, and not acknowledged."""
    stats = PipelineStats(produced=1280, trained=1024, stale=16, queue_items=176, unacknowledged_items=64)
    assert (
        stats.identity()
        == "produced 1280 = 1024 acknowledged + 16 stale + 0 filtered + 0 dead + 64 fetched + 176 waiting"
    )
    assert stats.balance == 0
