"""The queue against a real redis-server: delivery, repetition, back-pressure, leases, burial, and the account."""

import asyncio
import logging
import shutil
import subprocess
from itertools import count
from types import SimpleNamespace

import pytest
import redis

from ludic.http.address import free_port
from ludic.types import ConfigError
from ludic_pipeline.queue import queue as queues
from ludic_pipeline.queue.connection import RedisGone
from ludic_pipeline.queue.lease import LearnerStatus, Lease, LeaseLost, LeaseTimes
from ludic_pipeline.queue.queue import ActorId, ExperienceQueue, Settlement
from plugins.pipeline.tests.queue_parts import (
    ACTOR,
    Learner,
    Packed,
    let_lease_run_out,
    payload,
    payload_keys,
    push_many,
    raw_client,
)
from tests.redis_fixtures import end_redis, start_redis

pytestmark = pytest.mark.slow

_numbers = count()


@pytest.fixture
def key() -> str:
    return f"queue-{next(_numbers)}"


@pytest.fixture
async def queue(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key) as made:
        yield made


# --- pushing ---


async def test_redis_may_forget_the_scripts_at_any_time(shared_redis, queue):
    learner = Learner(queue)
    for number in (1, 2):
        with raw_client(shared_redis) as client:
            client.script_flush()
        assert await queue.push(ACTOR, number, b"x", num_items=1, oldest_version=0)
        with raw_client(shared_redis) as client:
            client.script_flush()
        assert len((await learner.take()).groups) == 1


async def test_a_full_queue_refuses_and_takes_the_same_number_later(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key, max_waiting=2) as queue:
        assert await push_many(queue, [Packed(n) for n in (1, 2, 3, 4)]) == 2
        assert not await queue.push(ACTOR, 3, b"x", num_items=1, oldest_version=0)
        assert (await queue.counts()).produced == 2, "what was refused is not counted"
        with raw_client(shared_redis) as client:
            assert len(payload_keys(client, key)) == 2, "nor kept"
        await Learner(queue).take()
        assert await push_many(queue, [Packed(3), Packed(4)]) == 1
        assert (await queue.counts()).produced == 3


async def test_groups_that_wait_for_a_checkpoint_only_do_not_hold_up_actors(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key, max_waiting=2) as queue:
        learner = Learner(queue)
        for start in range(1, 21, 2):
            assert await push_many(queue, [Packed(start), Packed(start + 1)]) == 2
            assert len((await learner.take(2)).groups) == 2
        assert (await queue.counts()).unacknowledged_groups == 20


async def test_a_group_above_the_limit_is_refused_where_it_is_made(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key, max_bytes=10) as queue:
        with pytest.raises(ConfigError, match="11 bytes, the limit is 10"):
            await queue.push(ACTOR, 1, b"x" * 11, num_items=1, oldest_version=0)


@pytest.mark.parametrize(
    "wrong",
    [{"sequence": 0}, {"num_items": 0}, {"num_items": 1_000_000}, {"data": b""}]
    + [{"version": version} for version in (-1, 10**15, 1.5, float("nan"), "7", True)],
)
async def test_a_group_that_cannot_be_counted_is_refused(queue, wrong):
    with pytest.raises(ConfigError):
        await push_many(queue, [Packed(**{"sequence": 1, **wrong})])


# --- taking and settling ---


async def test_a_group_with_a_version_after_the_resumed_step_is_stale(queue):
    """The learner died at version 57 and begins again at 40."""
    for number, version in enumerate((40, 41, 42, 57), start=1):
        await queue.push(ACTOR, number, b"x", num_items=1, oldest_version=version)
    taken = await Learner(queue, version=40, max_lag=1).take(100)
    assert [g.oldest_version for g in taken.groups] == [40, 41, 42]
    assert taken.stale == {-17: 1}


# --- what is not ours ---

HOSTILE = {
    "other fields": {"uid": "1", "data": "x" * 100},
    "a huge field": {"n": "1", "v": "0", "p": "1" * 2_000_000},
    "a huge number": {"n": "9" * 400, "v": "0", "p": "1"},
    "no items": {"n": "0", "v": "0", "p": "1"},
    "minus one item": {"n": "-1", "v": "0", "p": "1"},
    "half an item": {"n": "0.5", "v": "0", "p": "1"},
    "not a version": {"n": "1", "v": "nan", "p": "1"},
    "a negative version": {"n": "1", "v": "-1", "p": "1"},
    "half a version": {"n": "1", "v": "1.5", "p": "1"},
    "a huge version": {"n": "1", "v": "9" * 16, "p": "1"},
    "one field more": {"n": "1", "v": "0", "p": "1", "q": "1"},
    "what push would write": {"n": "999999", "v": "0", "p": "1"},
    "binary": {b"\xff\x00": b"\x00\xff"},
}


@pytest.mark.parametrize("fields", HOSTILE.values(), ids=HOSTILE)
async def test_a_foreign_entry_becomes_a_dead_letter_and_the_next_is_taken(shared_redis, queue, key, fields):
    await queue.counts()
    with raw_client(shared_redis) as client:
        client.xadd(f"{{{key}}}", fields)
    before = await queue.counts()
    assert (before.num_foreign, before.in_queue, before.balance) == (1, 0, 0)
    await queue.push(ACTOR, 1, b"x", num_items=4, oldest_version=0)
    taken = await Learner(queue).take()
    assert [g.num_items for g in taken.groups] == [4]
    assert list(taken.dead_letters.values()) == [1]
    after = await queue.counts()
    assert (after.produced, after.dead, after.num_foreign, after.num_dead_letters, after.balance) == (5, 1, 0, 1, 0)


async def test_a_group_without_payload_becomes_a_dead_letter(shared_redis, queue, key):
    await queue.push(ACTOR, 1, b"x", num_items=4, oldest_version=0)
    with raw_client(shared_redis) as client:
        client.delete(*payload_keys(client, key))
    assert "the payload is missing" in next(iter((await Learner(queue).take()).dead_letters))
    counts = await queue.counts()
    assert (counts.produced, counts.dead, counts.balance) == (4, 4, 0)


async def test_a_payload_above_the_limit_is_never_fetched(shared_redis, key):
    async with (
        ExperienceQueue(shared_redis.url, key) as actors,
        ExperienceQueue(shared_redis.url, key, max_bytes=1000) as learners,
    ):
        await push_many(actors, [Packed(1, data=b"x" * 1001), Packed(2, data=b"y" * 1000)])
        taken = await Learner(learners).take()
        assert [g.payload for g in taken.groups] == [b"y" * 1000]
        assert (await learners.counts()).dead == 1
        with raw_client(shared_redis) as client:
            ((_, letter),) = client.xrange(f"{{{key}}}:dead")
        assert letter[b"reason"] == b"the payload has 1001 bytes, the limit is 1000"


async def test_a_dead_letter_says_what_it_was_and_keeps_a_small_payload_only(shared_redis, queue, key):
    await push_many(queue, [Packed(1, data=b"small", num_items=2), Packed(2, data=b"x" * 70_000)])
    learner = Learner(queue)
    small, large = (await learner.take(3)).groups
    assert (
        await queue.move_to_dead_letters(learner.lease, learner.status, {small.id: "no sense", large.id: "r" * 5000})
        == 3
    )
    assert await queue.move_to_dead_letters(learner.lease, learner.status, {small.id: "once more"}) == 0
    with raw_client(shared_redis) as client:
        letters = [letter for _, letter in client.xrange(f"{{{key}}}:dead")]
    assert letters[0] == {
        b"reason": b"no sense", b"id": small.id.encode(), b"items": b"2", b"bytes": b"5", b"payload": b"small"
    }  # fmt: skip
    assert (letters[1][b"payload"], letters[1][b"bytes"], len(letters[1][b"reason"])) == (b"", b"70000", 1000)


async def test_dead_letters_are_bounded(shared_redis, queue, key):
    await queue.counts()
    with raw_client(shared_redis) as client, client.pipeline() as pipe:
        for _ in range(3000):
            pipe.xadd(f"{{{key}}}", {"junk": "1"})
        pipe.execute()
    learner = Learner(queue)
    while not (await learner.take()).is_empty:
        pass
    counts = await queue.counts()
    assert counts.dead == 3000
    assert counts.num_dead_letters < 1200
    assert counts.balance == 0


async def test_a_deleted_entry_does_not_come_again(shared_redis, queue, key):
    await push_many(queue, [Packed(1, data=b"1"), Packed(2, data=b"2")])
    learner = Learner(queue)
    first, _ = (await learner.take(2)).groups
    with raw_client(shared_redis) as client:
        client.xdel(f"{{{key}}}", first.id)
    assert [g.payload for g in (await learner.take_again(2)).groups] == [b"2"]
    assert (await queue.counts()).balance == 1, "what was taken out of the account is missing in it"


async def test_actors_do_not_wait_for_deleted_items(shared_redis, queue, key):
    await push_many(queue, [Packed(1, num_items=8), Packed(2, num_items=3)])
    with raw_client(shared_redis) as client:
        client.xtrim(f"{{{key}}}", maxlen=1, approximate=False)
    assert (await queue.counts()).balance == 8
    assert (await queue.beat_actor(ACTOR, 0)).waiting_items == 3


async def test_a_payload_replaced_after_the_size_check_is_read_up_to_the_limit_only(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key, max_bytes=100) as queue:
        await queue.push(ACTOR, 1, b"x", num_items=1, oldest_version=0)
        (taken,) = (await Learner(queue).take()).groups
        with raw_client(shared_redis) as client:
            client.set(queue.keys.payload(taken.id), b"y" * 1_000_000)
            assert await queue._payloads([taken.id]) == [b"y" * 100]
            client.delete(queue.keys.payload(taken.id))
            client.rpush(queue.keys.payload(taken.id), "not bytes")
        assert await queue._payloads([taken.id]) == [b""]


# --- leases ---


async def test_a_learner_without_its_lease_cannot_take_settle_or_dead_letter(shared_redis, queue, key):
    await push_many(queue, [Packed(1), Packed(2)])
    old, new = Learner(queue), Learner(queue)
    await queue.acquire(old.lease)
    (taken,) = (await old.take()).groups
    let_lease_run_out(shared_redis, key)
    await queue.acquire(new.lease)
    with pytest.raises(LeaseLost, match=new.lease.token):
        await old.take()
    with pytest.raises(LeaseLost):
        await old.settle(Settlement(id=taken.id, trained=1))
    with pytest.raises(LeaseLost):
        await queue.move_to_dead_letters(old.lease, old.status, {taken.id: "x"})
    with pytest.raises(LeaseLost):
        await queue.announce(old.lease, old.status)
    assert [g.id for g in (await new.take_again()).groups] == [taken.id]
    assert (await queue.counts()).trained == 0


async def finished_after(queue: ExperienceQueue) -> int | None:
    return (await queue.beat_actor(ACTOR, 0)).finished_after


async def test_a_run_is_not_marked_as_finished_while_another_learner_works(queue, monkeypatch):
    learner = Learner(queue)
    await queue.acquire(learner.lease)
    monkeypatch.setattr(queues, "_LEASE_MARGIN_S", 0.001)
    monkeypatch.setattr(
        queues, "time", SimpleNamespace(monotonic=count(step=10.0).__next__)
    )  # the lease is renewed meanwhile
    assert not await queue.finish(5) and await finished_after(queue) is None
    await queue.release(learner.lease)
    assert await queue.finish(5) and await finished_after(queue) == 5
    await queue.reopen()
    assert await finished_after(queue) is None


async def test_the_lease_of_a_learner_that_died_does_not_keep_its_run_from_being_finished(shared_redis, queue, key):
    await queue.acquire(Lease("learner-0"))
    finishing = asyncio.create_task(queue.finish(5))
    await asyncio.sleep(0.05)
    assert not finishing.done() and await finished_after(queue) is None
    let_lease_run_out(shared_redis, key)
    assert await finishing and await finished_after(queue) == 5


async def test_groups_of_a_rank_that_this_world_does_not_have_are_reclaimed(shared_redis, key):
    times = LeaseTimes(holds_s=0.03, beat_s=0.01)
    async with ExperienceQueue(shared_redis.url, key, lease_times=times) as queue:
        await push_many(queue, [Packed(n, data=str(n).encode()) for n in (1, 2, 3)])
        ranks = [Learner(queue, rank) for rank in range(3)]
        for learner in ranks:
            await learner.take()
        await asyncio.sleep(0.05)
        first = ranks[0]
        assert await queue.reclaim(first.lease, first.status, num_learners=2) == 1
        assert [g.payload for g in (await first.take_again(9)).groups] == [b"1", b"3"], "rank 1 is left alone"
        with pytest.raises(LeaseLost, match="reclaimed"):
            await ranks[2].take()
        assert (await queue.acquire(Lease("learner-2")))[1] == 0, "a world that grows again has the name again"


async def test_groups_of_a_live_rank_are_not_reclaimed(queue):
    await queue.push(ACTOR, 1, b"x", num_items=1, oldest_version=0)
    away, here = Learner(queue, rank=5), Learner(queue)
    await away.take()
    assert await queue.reclaim(here.lease, here.status, num_learners=1) == 0


async def test_groups_taken_by_a_foreign_consumer_are_reclaimed(shared_redis, key):
    times = LeaseTimes(holds_s=0.03, beat_s=0.01)
    async with ExperienceQueue(shared_redis.url, key, lease_times=times) as queue:
        await queue.push(ACTOR, 1, b"x", num_items=1, oldest_version=0)
        with raw_client(shared_redis) as client:
            client.xreadgroup("learners", "another", {f"{{{key}}}": ">"})
        await asyncio.sleep(0.05)
        learner = Learner(queue)
        assert await queue.reclaim(learner.lease, learner.status, num_learners=1) == 1
        assert len((await learner.take_again()).groups) == 1


# --- what actors hear ---


async def test_items_in_progress_are_those_of_all_living_actors(shared_redis, key):
    async with ExperienceQueue(shared_redis.url, key) as queue:
        await queue.beat_actor(ActorId("a"), 3)
        await queue.beat_actor(ActorId("b"), 4)
        with raw_client(shared_redis) as client:
            client.hset(f"{{{key}}}:beats", "dead", "1000 99")
        assert (await queue.beat_actor(ActorId("a"), 5)).in_progress_items == 9


async def test_what_a_learner_has_fetched_but_not_begun_still_waits(queue):
    """Pacing counts it: it is trained on before anything that is begun now."""
    await push_many(queue, [Packed(n, num_items=4) for n in (1, 2, 3)])
    learner = Learner(queue)
    await learner.take(8)
    assert (await queue.beat_actor(ACTOR, 0)).waiting_items == 12
    begun = Learner(queue, items_in_hand=4)
    begun.lease = learner.lease
    await queue.announce(begun.lease, begun.status)
    assert (await queue.beat_actor(ACTOR, 0)).waiting_items == 8


async def test_actors_without_heartbeat_for_a_day_are_removed(shared_redis, queue, key):
    with raw_client(shared_redis) as client:
        client.hset(f"{{{key}}}:beats", "old", "1000 1")
        client.hset(f"{{{key}}}:actors", "old", "17")
        await queue.beat_actor(ACTOR, 0)
        assert client.hkeys(f"{{{key}}}:actors") == client.hkeys(f"{{{key}}}:beats")[1:] == []


async def test_clear_empties_the_queue_and_its_counts(shared_redis, queue, key):
    await push_many(queue, [Packed(number) for number in range(5, 1205)])
    await Learner(queue).take()
    await queue.clear()
    with raw_client(shared_redis) as client:
        assert not client.keys(f"{{{key}}}*")
    counts = await queue.counts()
    assert (counts.produced, counts.in_queue, counts.version) == (0, 0, None)
    assert await queue.push(ACTOR, 1, b"x", num_items=1, oldest_version=0)
    assert (await queue.counts()).produced == 1


# --- reaching Redis ---


async def test_passwords_work_and_are_never_shown(caplog):
    server = start_redis("--requirepass", "right-secret")
    caplog.set_level(logging.DEBUG)
    try:
        async with ExperienceQueue(f"unix://:right-secret@{server.socket}") as queue:
            assert (await queue.counts()).produced == 0
            assert "secret" not in repr(queue) + str(queue.address) + repr(queue.address)
        async with ExperienceQueue(f"unix://:wrong-secret@{server.socket}") as queue:
            with pytest.raises(ConfigError, match="refuses the login") as failure:
                await queue.counts()
    finally:
        end_redis(server)
    chain = [failure.value, failure.value.__cause__]
    assert "secret" not in "".join(map(repr, chain)) + caplog.text


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
async def test_a_server_with_tls_is_reached(tmp_path):
    key_file, certificate, port = tmp_path / "key.pem", tmp_path / "cert.pem", free_port()
    make_certificate = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", str(key_file), "-out", str(certificate),
    ]  # fmt: skip
    subprocess.run(make_certificate, check=True, capture_output=True)
    server = start_redis(
        "--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key_file),
        "--tls-ca-cert-file", str(certificate), "--tls-auth-clients", "no", "--requirepass", "secret",
    )  # fmt: skip
    try:
        url = f"rediss://:secret@127.0.0.1:{port}/0?ssl_ca_certs={certificate}"
        async with ExperienceQueue(url, patience_s=1) as queue:
            assert await queue.push(ACTOR, 1, b"x", num_items=1, oldest_version=0)
            assert (await queue.counts()).produced == 1
        async with ExperienceQueue(f"rediss://:secret@127.0.0.1:{port}/0", patience_s=0.1) as queue:
            with pytest.raises(RedisGone, match="certificate"):
                await queue.counts()
    finally:
        end_redis(server)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:port/0",
        "redis://:hunter2/@host:6379",
        "redis://[hunter2/0",
        "http://:hunter2@host",
        "hunter2",
    ],
)
def test_an_address_that_cannot_be_read_is_named_without_its_password(url):
    with pytest.raises(ConfigError) as failure:
        ExperienceQueue(url)
    shown_chain = f"{failure.value!r} {failure.value.__cause__!r} {failure.value.__suppress_context__}"
    assert "hunter2" not in shown_chain


@pytest.mark.parametrize("queue_key", ["", "a{b", "a}b"])
def test_a_queue_key_that_would_spread_over_a_cluster_is_refused(queue_key):
    with pytest.raises(ConfigError, match="queue_key"):
        ExperienceQueue("redis://localhost", queue_key)


@pytest.mark.parametrize("ending", ["an answer", redis.ConnectionError("lost")])
async def test_a_cancellation_that_the_client_swallows_is_kept(queue, ending):
    """As asyncio.wait_for does in Python 3.11 when the answer comes in the same turn."""

    async def swallow(client):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if isinstance(ending, Exception):
                raise ending from None
            return ending

    task = asyncio.create_task(queue._patiently(swallow))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


def test_a_beat_that_is_too_slow_for_its_lease_is_refused():
    with pytest.raises(ConfigError, match="at most a third"):
        LeaseTimes(holds_s=5, beat_s=3)


# --- Redis refuses ---


async def use_everything(queue: ExperienceQueue) -> None:
    """What actors and learners ask of Redis, one after the other."""
    learner = Learner(queue, version=1)
    assert await queue.push(ACTOR, 1, payload([1]), num_items=1, oldest_version=0)
    await queue.beat_actor(ACTOR, 1)
    await queue.acquire(learner.lease)
    taken = await learner.take()
    await queue.hand_out(learner.lease, learner.status, begun=[group.id for group in taken.groups], over=[])
    await queue.move_to_dead_letters(learner.lease, learner.status, {group.id: "as a test" for group in taken.groups})
    await queue.counts()


@pytest.mark.parametrize("name", ["", ":counts", ":actors", ":beats", ":learner", ":leases", ":tries", ":dead"])
async def test_a_key_that_holds_something_else_is_named(shared_redis, queue, key, name):
    with raw_client(shared_redis) as client:
        client.set(f"{{{key}}}{name}", "something else")
        kind = "stream" if name in ("", ":dead") else "hash"
        with pytest.raises(
            ConfigError, match=rf"'\{{{key}\}}{name}' holds a string, the queue keeps a {kind} there.*queue_key"
        ):
            await use_everything(queue)
        await queue.clear()
        await use_everything(queue)


async def test_payloads_of_another_type_become_dead_letters(shared_redis, queue, key):
    await queue.push(ACTOR, 1, payload([1]), num_items=1, oldest_version=0)
    with raw_client(shared_redis) as client:
        [name] = payload_keys(client, key)
        client.delete(name)
        client.lpush(name, "something else")
    assert list((await Learner(queue).take()).dead_letters) == [
        "the payload is missing; if Redis evicts keys, set its maxmemory-policy to noeviction"
    ]


@pytest.mark.parametrize("version", ["-3", "nan", "text", "", "9" * 30, "1e9"])
async def test_a_forged_learner_version_is_overwritten_by_the_next_call(shared_redis, queue, key, version):
    learner = Learner(queue, version=3, items_per_update=8)
    await queue.announce(learner.lease, learner.status)
    with raw_client(shared_redis) as client:
        client.hset(f"{{{key}}}:learner", "version", version)
    await queue.beat_actor(ACTOR, 0)
    await queue.counts()
    await queue.announce(learner.lease, learner.status)
    assert (await queue.beat_actor(ACTOR, 0)).version == 3


async def test_an_older_state_of_the_same_process_is_ignored_and_a_new_process_starts_again(queue):
    lease, successor = Lease("learner-0"), Lease("learner-0")

    async def seen_after(lease: Lease, **status) -> tuple[int | None, bool]:
        await queue.announce(lease, LearnerStatus(**status))
        state = await queue.beat_actor(ACTOR, 0)
        return state.version, state.is_waiting

    assert await seen_after(lease, sequence=9, version=5, is_waiting=True) == (5, True)
    assert await seen_after(lease, sequence=8, version=4) == (5, True), "it was sent first and arrives last"
    assert await seen_after(lease, sequence=9, version=5, is_waiting=True) == (5, True), "a repeated call"
    assert await seen_after(lease, sequence=10, version=4) == (4, False), "the number decides, not the version"
    await queue.release(lease)
    assert await seen_after(successor, sequence=1, version=3) == (3, False)


@pytest.mark.parametrize("forged", ["", "text", "{token}", "{token} -1", "{token} nan", "another 99"])
async def test_a_forged_number_of_the_last_state_is_overwritten_by_the_next_call(shared_redis, queue, key, forged):
    lease = Lease("learner-0")
    await queue.announce(lease, LearnerStatus(sequence=1, version=3))
    with raw_client(shared_redis) as client:
        client.hset(f"{{{key}}}:learner", "status:learner-0", forged.format(token=lease.token))
    await queue.announce(lease, LearnerStatus(sequence=2, version=4))
    assert (await queue.beat_actor(ACTOR, 0)).version == 4


async def test_counts_that_another_program_overwrote_stop_nothing(shared_redis, queue, key):
    with raw_client(shared_redis) as client:
        client.hset(f"{{{key}}}:counts", "produced", "many")
        client.hset(f"{{{key}}}:actors", ACTOR, "the last one")
        client.hset(f"{{{key}}}:tries", "0-1", "often")
    assert (await queue.counts()).produced == 0
    await use_everything(queue)
    counts = await queue.counts()
    assert (counts.produced, counts.dead, counts.balance) == (1, 1, 0)


async def test_at_maxmemory_pushes_wait_and_the_learner_makes_room(redis_server, caplog):
    """Calls that free memory, and signs of life, get through; a push waits without a limit, and happens once."""
    async with ExperienceQueue(redis_server.url, patience_s=0.1) as queue, ExperienceQueue(redis_server.url) as other:
        learner = Learner(other, version=1)
        assert await queue.push(ACTOR, 1, payload([1]), num_items=1, oldest_version=0)
        with raw_client(redis_server) as client:
            client.config_set("maxmemory", 1)
            pushing = asyncio.create_task(queue.push(ACTOR, 2, payload([2]), num_items=1, oldest_version=0))
            await other.beat_actor(ACTOR, 1)
            assert (await other.acquire(learner.lease))[0] == learner.lease.token
            [taken] = (await learner.take()).groups
            await other.hand_out(learner.lease, learner.status, begun=[taken.id], over=[])
            assert await learner.settle(Settlement(id=taken.id, trained=1)) == 1
            counts = await other.counts()
            assert (counts.balance, counts.trained) == (0, 1)
            await other.release(learner.lease)
            await asyncio.sleep(0.3)
            assert not pushing.done(), "beyond its patience"
            client.config_set("maxmemory", 0)
        assert await pushing
        counts = await other.counts()
    assert (counts.produced, counts.queue_groups, counts.balance) == (2, 1, 0)
    assert "no memory left (maxmemory)" in caplog.text and "checkpoint_every" in caplog.text
    assert caplog.text.count("no memory left") == 1, "not at every try"


async def test_a_push_that_fills_the_memory_leaves_nothing_half_done(redis_server):
    """There was room when its payloads came, and none for its entries."""
    async with ExperienceQueue(redis_server.url, max_waiting=10**6) as queue:
        with raw_client(redis_server) as client:
            client.config_set("maxmemory", client.info("memory")["used_memory"] + (3 << 20))
            groups = [Packed(n, data=bytes(1 << 20)) for n in (1, 2)]
            pushing = asyncio.create_task(push_many(queue, groups))
            await asyncio.wait([pushing], timeout=1)
            names = payload_keys(client, "ludic_queue")
            assert len(names) == client.xlen("{ludic_queue}") and not any(b"arriving" in name for name in names)
            client.config_set("maxmemory", 0)
        assert await pushing == 2
        counts = await queue.counts()
    assert (counts.produced, counts.queue_groups, counts.balance) == (2, 2, 0)


REFUSALS = [
    redis.exceptions.BusyLoadingError("Redis is loading the dataset in memory"),
    redis.ResponseError("BUSY Redis is busy running a script. You can only call SCRIPT KILL or SHUTDOWN NOSAVE."),
    redis.ResponseError("MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'."),
    redis.ResponseError("CLUSTERDOWN The cluster is down"),
    redis.ResponseError("TRYAGAIN Multiple keys request during rehashing of slot"),
    redis.ResponseError("NOREPLICAS Not enough good replicas to write."),
    redis.ResponseError(
        "MISCONF Redis is configured to save RDB snapshots, but it's currently unable to persist to disk."
    ),
    redis.ResponseError(
        "ERR Error running script (call to f_1): @user_script:1: -OOM command not allowed when used memory > x"
    ),
    redis.exceptions.ExecAbortError(
        "Transaction discarded because of: OOM command not allowed when used memory > 'maxmemory'."
    ),
    redis.exceptions.ReadOnlyError("You can't write against a read only replica."),
    redis.exceptions.MaxConnectionsError("max number of clients reached"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal)[:20])
async def test_a_temporary_refusal_of_redis_is_retried(queue, refusal, caplog):
    answers = [refusal, refusal, "an answer"]

    async def ask(client):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await queue._patiently(ask) == "an answer"
    assert "trying again" in caplog.text

    async def refuse(client):
        raise refusal

    queue.patience_s = 0.05
    with pytest.raises(RedisGone, match="Nothing is lost"):
        await queue._patiently(refuse)


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (redis.exceptions.NoPermissionError("NOPERM this user has no permissions to run the 'eval' command"), "refuses the login"),
        (redis.exceptions.AuthenticationError("NOAUTH Authentication required."), "refuses the login"),
        (redis.ResponseError("WRONGPASS invalid username-password pair or user is disabled."), "refuses the login"),
        (redis.ResponseError("unknown command 'XREADGROUP'"), "Redis 6.2 or newer"),
    ],
)  # fmt: skip
async def test_a_permanent_refusal_of_redis_raises_at_once(queue, refusal, message):
    async def refuse(client):
        raise refusal

    with pytest.raises(ConfigError, match=message):
        await queue._patiently(refuse)


# --- clocks ---


@pytest.mark.parametrize("ahead_s", [60, 3600, 10**9])
async def test_what_was_written_before_the_clock_was_set_back_counts_for_nothing(shared_redis, queue, key, ahead_s):
    """A dead actor is not waited for, and a dead learner of another world is reclaimed."""
    gone = Learner(queue, rank=1)
    await queue.push(ACTOR, 1, payload([1]), num_items=1, oldest_version=0)
    await queue.acquire(gone.lease)
    await gone.take()
    with raw_client(shared_redis) as client:
        future = (client.time()[0] + ahead_s) * 1000
        client.hset(f"{{{key}}}:beats", "dead", f"{future} 99")
        client.hset(f"{{{key}}}:leases", "learner-1", f"{gone.lease.token} {future}")
    state = await queue.beat_actor(ACTOR, 5)
    assert (state.in_progress_items, state.num_actors, state.num_learners) == (5, 1, 0)
    learner = Learner(queue)
    assert await queue.reclaim(learner.lease, learner.status, num_learners=1) == 1
