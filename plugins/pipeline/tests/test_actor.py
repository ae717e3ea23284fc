"""An actor against a real Redis: what it pushes, when it begins, what it gives up, and how it ends."""

import asyncio
import dataclasses
import itertools
import uuid

import pytest

pytest.importorskip("redis", reason="the pipeline extra is not installed")

from ludic.batch_gen import GRPORequestStrategy, TooManyFailures
from ludic.http.client import Unreachable
from ludic.types import ConfigError, PolicyGone, RequestsExhausted
from ludic_pipeline.queue.actor import ActorSettings, run_pipeline_actor
from ludic_pipeline.queue.lease import LearnerStatus, Lease
from ludic_pipeline.queue.queue import ExperienceQueue, Settlement
from ludic_pipeline.queue.wire import decode_group
from tests.unit.batch_gen.parts import TotalReward, coin_client, make_engine, other_tasks, request

pytestmark = pytest.mark.slow

POLL_S = 0.005


class Learner:
    """One learner of a queue: it announces itself, and takes what a test tells it to take."""

    def __init__(self, url, key, **status):
        self.queue = ExperienceQueue(url, key)
        self.lease = Lease("learner-0")
        self.status = {"version": 0, "items_per_update": 8, "max_lag": 2, "is_waiting": True, **status}

    async def say(self, **status):
        self.status |= status
        await self.queue.announce(self.lease, LearnerStatus(**self.status))

    async def take(self, max_items=1):
        """Whole groups, decoded, and settled as trained."""
        taken = await self.queue.take(self.lease, LearnerStatus(**self.status), max_items=max_items)
        done = [Settlement(id=group.id, trained=group.num_items) for group in taken.groups]
        await self.queue.settle(self.lease, LearnerStatus(**self.status), done)
        return [decode_group(group.payload) for group in taken.groups]

    async def take_groups(self, num_groups):
        """So many, waiting for them."""
        groups = []
        async with asyncio.timeout(30):
            while len(groups) < num_groups:
                groups += await self.take()
                await asyncio.sleep(POLL_S)
        return groups

    async def until(self, condition):
        async with asyncio.timeout(30):
            while not condition(counts := await self.queue.counts()):
                await asyncio.sleep(POLL_S)
        return counts


@pytest.fixture
def key():
    return f"actor-{uuid.uuid4().hex}"


@pytest.fixture
async def learner(shared_redis, key):
    learner = Learner(shared_redis.url, key)
    await learner.queue.acquire(learner.lease)
    yield learner
    await learner.queue.close()


def endless(**fields):
    numbers = itertools.count()
    return lambda: [request(env_seed=number, **fields) for number in itertools.islice(numbers, 3)]


OF_SETTINGS = {field.name for field in dataclasses.fields(ActorSettings)}


async def actor(learner, *, engine=None, requests_fn=None, **given):
    whole = {
        "credit_assigner": TotalReward(),
        "redis_url": learner.queue.address.url,
        "queue_key": learner.queue.keys.queue_key,
        "strategy": GRPORequestStrategy(4),
        "concurrency": 8,
        "poll_s": POLL_S,
        **given,
    }
    settings = ActorSettings(**{name: whole.pop(name) for name in OF_SETTINGS & whole.keys()})
    return await run_pipeline_actor(engine or make_engine(), requests_fn or endless(), settings=settings, **whole)


class HeldClient:
    """Answers as the coin does, but only when it is told to; it can name a version."""

    def __init__(self, version=0):
        self.inner = coin_client()
        self.open = asyncio.Event()
        self.version = version
        self.num_running = self.most_running = self.num_asked = 0

    async def complete_tokens(self, request):
        self.num_running += 1
        self.num_asked += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            await self.open.wait()
        finally:
            self.num_running -= 1
        return await self.inner.complete_tokens(request)

    def sync_weights(self, params, *, timeout_s=600.0, version=None):
        raise RuntimeError("not served")

    async def get_policy_version(self):
        return self.version


# --- what is pushed ---


async def test_every_group_arrives_whole_with_its_credit_and_the_counts_agree(learner):
    await learner.say(max_lag=None)
    credit = TotalReward()
    report = await actor(learner, credit_assigner=credit, max_groups=5)
    assert (report.num_groups, report.num_items, report.num_failed, report.num_abandoned) == (5, 20, 0, 0)
    counts = await learner.queue.counts()
    assert (counts.produced, counts.queue_groups, counts.balance) == (20, 5, 0)
    groups = await learner.take(max_items=100)
    assert [len(items) for items in groups] == [4] * 5
    for items in groups:
        assert len({item.origin.group_id for item in items}) == 1
        assert len({item.origin.rollout_id for item in items}) == 4
    assert set(credit.seen) == {4}, "siblings are compared with each other only"
    assert {item.weight for items in groups for item in items} == {0.1, 1.1}, (
        "what the reply's form and its answer earned"
    )


async def test_groups_share_the_places_and_never_use_more(learner):
    await learner.say(max_lag=None)
    client = HeldClient()
    running = asyncio.create_task(actor(learner, engine=make_engine(client), concurrency=6, max_groups=4))
    await learner.until(lambda counts: client.num_running == 6)
    await learner.until(
        lambda counts: counts.in_progress_items == 8
    )  # two groups of four: the second one waits in part
    client.open.set()
    assert (await running).num_groups == 4
    assert client.most_running == 6


# --- pace ---


async def test_no_group_starts_before_the_first_learner(learner):
    client = HeldClient()
    client.open.set()
    running = asyncio.create_task(actor(learner, engine=make_engine(client), max_groups=1))
    await learner.until(lambda counts: counts.num_actors == 1)
    await asyncio.sleep(20 * POLL_S)
    assert client.most_running == 0
    await learner.say()
    assert (await running).num_groups == 1


@pytest.mark.parametrize(("is_waiting", "num_groups"), [(True, 6), (False, 4)])
async def test_actors_start_only_groups_that_will_be_within_max_lag(learner, is_waiting, num_groups):
    """8 items an update, 2 updates late at most: 3 batches for a learner that waits, 2 for one that is at work."""
    await learner.say(is_waiting=is_waiting)
    stop = asyncio.Event()
    running = asyncio.create_task(actor(learner, stop=stop))
    await learner.until(lambda counts: counts.queue_groups == num_groups)
    await asyncio.sleep(20 * POLL_S)
    assert (await learner.queue.counts()).produced == 4 * num_groups
    await learner.take(max_items=8)  # two groups less
    await learner.until(lambda counts: counts.produced == 4 * (num_groups + 2))
    stop.set()
    assert (await running).num_groups == num_groups + 2


async def test_many_actors_together_make_no_more_than_one_would(learner):
    await learner.say()
    stop = asyncio.Event()
    clients = [HeldClient() for _ in range(4)]
    running = [asyncio.create_task(actor(learner, engine=make_engine(client), stop=stop)) for client in clients]
    await learner.until(lambda counts: counts.in_progress_items == 24)
    await asyncio.sleep(20 * POLL_S)
    assert sum(client.num_running for client in clients) == 24
    for client in clients:
        client.open.set()
    await learner.until(lambda counts: counts.queue_items == 24 and counts.in_progress_items == 0)
    stop.set()
    assert sum(report.num_items for report in await asyncio.gather(*running)) == 24


async def test_a_policy_that_is_being_restarted_is_waited_for_and_that_is_said_once(learner, caplog):
    await learner.say(max_lag=None)
    client = HeldClient()
    client.open.set()
    tries = itertools.count()

    async def restarting():
        if next(tries) < 20:
            raise Unreachable("no connection")
        return 0

    client.get_policy_version = restarting
    assert (await actor(learner, engine=make_engine(client), client=client, max_groups=1)).num_groups == 1
    assert caplog.text.count("until the policy returns its version: no connection") == 1


# --- giving up ---


async def test_a_running_group_beyond_max_lag_is_cancelled(learner, monkeypatch):
    monkeypatch.setattr("ludic_pipeline.queue.actor._BEAT_S", POLL_S)
    await learner.say(items_per_update=4)
    client = HeldClient()
    running = asyncio.create_task(
        actor(learner, engine=make_engine(client), client=client, concurrency=4, max_groups=1)
    )
    await learner.until(lambda counts: client.num_running == 4)
    await learner.say(version=2)
    await asyncio.sleep(20 * POLL_S)
    assert client.num_running == 4, "two updates late is still good"
    client.version = 3
    asked = client.num_asked
    await learner.say(version=3)
    await learner.until(lambda counts: client.num_asked == asked + 4)
    client.open.set()
    report = await running
    assert (report.num_groups, report.num_abandoned) == (1, 1)
    assert (await learner.queue.counts()).produced == 4, "what was given up was never produced"


async def test_groups_sampled_after_the_resumed_step_are_dropped(learner, monkeypatch):
    monkeypatch.setattr("ludic_pipeline.queue.actor._BEAT_S", POLL_S)
    await learner.say(version=57)
    client = HeldClient(version=57)
    running = asyncio.create_task(
        actor(learner, engine=make_engine(client), client=client, concurrency=4, max_groups=1)
    )
    await learner.until(lambda counts: client.num_running == 4)
    await learner.say(version=40)
    await learner.until(lambda counts: client.num_running == 0)
    await asyncio.sleep(20 * POLL_S)
    assert client.num_running == 0, "the weights of version 57 play no more"
    client.version = 40
    client.open.set()
    assert (await running).num_abandoned == 1


# --- failures ---


async def test_a_failed_episode_costs_its_group_and_nothing_else(learner):
    await learner.say(max_lag=None)
    numbers = itertools.count()

    def requests_fn():
        number = next(numbers)
        return [request(env={"fail_on": 1} if number % 3 == 1 else {}, env_seed=number)]

    engine = make_engine(max_retries=0)
    report = await actor(learner, engine=engine, requests_fn=requests_fn, max_groups=6, max_failed_share=0.9)
    assert report.num_groups == 6 and report.num_failed >= 2
    assert all(len(items) == 4 for items in await learner.take(max_items=100))


async def test_an_actor_whose_groups_mostly_fail_ends_and_says_why(learner):
    await learner.say(max_lag=None)
    with pytest.raises(TooManyFailures, match=r"17 of the last 17 groups failed.*broken env 7"):
        await actor(learner, engine=make_engine(max_retries=0), requests_fn=endless(env={"fail_on": 7}))
    assert other_tasks() == set()


@pytest.mark.parametrize(
    ("error", "message"), [(ConfigError("wrong model"), "wrong model"), (PolicyGone("the engine died"), "engine died")]
)
async def test_a_wrong_set_up_or_a_lost_policy_ends_the_actor(learner, error, message):
    await learner.say(max_lag=None)

    class Refuses:
        async def complete_tokens(self, request):
            raise error

        def sync_weights(self, params, *, timeout_s=600.0, version=None):
            raise RuntimeError("not served")

    with pytest.raises(type(error), match=message):
        await actor(learner, engine=make_engine(Refuses()))
    assert other_tasks() == set()


async def test_what_runs_beside_the_actor_ends_it_when_it_fails(learner):
    async def follow():
        raise ConfigError("these weights are of another model")

    with pytest.raises(ConfigError, match="of another model"):
        await actor(learner, follow=follow)
    assert other_tasks() == set()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"concurrency": 0}, "concurrency=0"),
        ({"max_steps": 0}, "max_steps=0"),
        ({"max_groups": 0}, "max_groups=0"),
        ({"max_failed_share": 2.0}, "max_failed_share=2.0"),
        ({"credit_assigner": None}, "neither was given"),
        ({"redis_url": "http://here"}, "redis://"),
    ],
    ids=str,
)
async def test_a_wrong_setting_is_named_before_anything_is_played(learner, settings, message):
    with pytest.raises(ConfigError, match=message):
        await actor(learner, **settings)


# --- the end ---


async def test_a_stopped_actor_cancels_its_episodes_and_has_no_items_in_progress(learner):
    await learner.say()
    client, stop = HeldClient(), asyncio.Event()
    running = asyncio.create_task(actor(learner, engine=make_engine(client), stop=stop))
    await learner.until(lambda counts: client.num_running == 8)
    stop.set()
    report = await running
    assert (report.num_groups, report.num_abandoned, client.num_running) == (0, 2, 0)
    assert (await learner.queue.counts()).in_progress_items == 0
    assert other_tasks() == set()


async def test_an_actor_that_is_cancelled_leaves_nothing_running(learner):
    await learner.say()
    client = HeldClient()
    running = asyncio.create_task(actor(learner, engine=make_engine(client)))
    await learner.until(lambda counts: client.num_running == 8)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert client.num_running == 0 and other_tasks() == set()
    assert (await learner.queue.counts()).in_progress_items == 0


async def test_requests_that_are_used_up_end_the_actor_when_all_is_pushed(learner):
    await learner.say(max_lag=None)
    draws = iter([[request(env_seed=1), request(env_seed=2)], []])

    def requests_fn():
        for draw in draws:
            return draw
        raise RequestsExhausted("that was all")

    report = await actor(learner, requests_fn=requests_fn, concurrency=1)
    assert report.num_groups == 2


# --- Redis goes away ---


async def test_an_actor_can_be_stopped_while_redis_is_away(redis_server, key, monkeypatch):
    monkeypatch.setattr("ludic_pipeline.queue.actor._STOP_S", POLL_S)
    monkeypatch.setattr("ludic_pipeline.queue.actor._LEAVE_S", POLL_S)
    learner = Learner(redis_server.url, key)
    await learner.queue.acquire(learner.lease)
    await learner.say()
    client, stop = HeldClient(), asyncio.Event()
    running = asyncio.create_task(actor(learner, engine=make_engine(client), stop=stop))
    await learner.until(lambda counts: client.num_running == 8)
    await learner.queue.close()
    await asyncio.to_thread(redis_server.kill)
    stop.set()
    report = await asyncio.wait_for(running, 30)
    assert (report.num_groups, report.num_abandoned, client.num_running) == (0, 2, 0)
    assert other_tasks() == set()


# --- the end of the run ---


async def test_a_finished_run_ends_its_actors_and_what_they_play(learner):
    await learner.say()
    client = HeldClient()
    playing = asyncio.create_task(actor(learner, engine=make_engine(client), num_updates=5))
    async with asyncio.timeout(60):
        while not client.num_running:
            await asyncio.sleep(POLL_S)
        await learner.queue.release(learner.lease)
        await learner.queue.finish(5)
        report = await playing
    assert report.is_run_finished and report.num_abandoned and not client.num_running
    late = await actor(learner, num_updates=5)
    assert late.is_run_finished and not late.num_groups


async def test_a_learner_that_leaves_or_is_lost_ends_no_actor(learner):
    await learner.say(max_lag=None)
    playing = asyncio.create_task(actor(learner, max_groups=6))
    await learner.take_groups(2)
    await learner.queue.release(learner.lease)
    await learner.queue.acquire(learner.lease)
    await learner.say(version=0)
    await learner.take_groups(2)
    report = await asyncio.wait_for(playing, 60)
    assert not report.is_run_finished and report.num_groups == 6


async def test_actors_of_a_run_that_goes_on_do_not_end(learner):
    await learner.queue.release(learner.lease)
    await learner.queue.finish(5)
    await learner.say(max_lag=None)
    longer = await asyncio.wait_for(actor(learner, num_updates=10, max_groups=2), 60)
    assert not longer.is_run_finished and longer.num_groups == 2
    await learner.queue.acquire(learner.lease)  # as every learner that starts
    again = await asyncio.wait_for(actor(learner, num_updates=5, max_groups=2), 60)
    assert not again.is_run_finished and again.num_groups == 2
