"""Whatever dies, pauses or misbehaves in a pipeline: training goes on, and every item is accounted for.

Real processes and a real Redis. Learners here have a list in the place of weights (pipeline_parts.py), so that it can be
compared, item by item, with what the actors sent; test_launch_process.py has the Trainer, and test_vllm_training.py `ludic launch`
with vLLM. The checks that every test ends with are in `Pipeline.check` (pipeline_harness.py).
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest

pytest.importorskip("redis", reason="the pipeline extra is not installed")

from ludic_pipeline.queue.queue import ExperienceQueue, new_actor_id
from ludic_pipeline.queue.wire import encode_group
from plugins.pipeline.tests.pipeline_harness import (
    COUNTS,
    QUEUE_KEY,
    Network,
    Pipeline,
    pipeline_on,
    skewed_clock,
)
from plugins.pipeline.tests.queue_parts import item
from tests.extended import cases
from tests.redis_fixtures import redis_server

pytestmark = pytest.mark.integration
__all__ = ["redis_server"]
STREAM = f"{{{QUEUE_KEY}}}"


@pytest.fixture
def pipeline(redis_server, tmp_path) -> Iterator[Pipeline]:
    yield from pipeline_on(redis_server, tmp_path)


# --- actors ---


def test_an_actor_that_is_killed_in_the_middle_of_its_episodes_leaves_nothing_half_done(pipeline):
    learner = pipeline.learner()
    killed = pipeline.actor(turns=4, turn_s=0.05)
    pipeline.until_pushed(killed, 3, learner)
    pipeline.kill(killed)
    step = learner.step
    other = pipeline.actor()
    pipeline.until_step(learner, step + 5, other)
    pipeline.stop(other, learner)
    account = pipeline.check()
    assert account.counts["stale"] == account.counts["dead"] == 0
    assert len(set(killed.ids("sent")) - set(killed.ids("kept"))) <= 4, "at most the push that was under way is open"


def test_clocks_of_actors_do_not_matter(pipeline, tmp_path):
    learner = pipeline.learner(max_lag=3)
    year_s = 365 * 24 * 3600.0
    fast = pipeline.actor(environment=skewed_clock(tmp_path, ahead_s=year_s))
    slow = pipeline.actor(environment=skewed_clock(tmp_path, ahead_s=-year_s, jumps_s=1e6))
    for actor in (fast, slow):
        pipeline.until_pushed(actor, 5, learner)
    with pipeline.redis() as client:
        now_ms = client.time()[0] * 1000
        beats = [int(beat.split()[0]) for beat in client.hvals(f"{STREAM}:beats")]
        ages_ms = [now_ms - int(id_.split(b"-")[0]) for id_, _ in client.xrange(STREAM)]
    assert len(beats) == 2 and all(abs(now_ms - beat) < 3600_000 for beat in beats), "only Redis says what time it is"
    assert all(abs(age) < 3600_000 for age in ages_ms)
    pipeline.until_step(learner, 10, fast, slow)
    pipeline.stop(fast, slow, learner)
    pipeline.check()


# --- learners ---


@pytest.mark.parametrize(
    ("hold_where", "num_resumed"),
    cases(
        [("in_step", 3), ("after_step", 3), ("after_checkpoint", 6)], default=[("in_step", 3), ("after_checkpoint", 6)]
    ),
)
def test_a_learner_that_is_killed_goes_on_from_its_checkpoint(pipeline, hold_where, num_resumed):
    """In the fifth step; after the fifth, before it is saved; or when the sixth is saved, and nothing is acknowledged."""
    actor = pipeline.actor()
    hold_at = 6 if hold_where == "after_checkpoint" else 5
    killed = pipeline.learner(filter_every=4, hold_where=hold_where, hold_at=hold_at)
    pipeline.until_held(killed)
    pipeline.kill(killed)
    resumed = pipeline.learner(filter_every=4)
    pipeline.until_step(resumed, 10, actor)
    pipeline.stop(actor, resumed)
    assert resumed.told("resumed") == [num_resumed]
    account = pipeline.check()
    assert account.counts["filtered"] > 0
    undone = [row for row in killed.rows() if row.get("applied", 0) > num_resumed]
    again = {*resumed.ids("trained"), *resumed.ids("filtered")}
    assert again >= {id_ for row in undone for id_ in row["trained"]}, "what the crash undid is trained on again"
    assert not again & {id_ for row in killed.rows() if row.get("applied", 99) <= num_resumed for id_ in row["trained"]}


def test_with_acknowledge_trained_no_group_is_trained_on_twice(pipeline):
    actor = pipeline.actor()
    killed = pipeline.learner(acknowledge="trained", hold_at=5)
    pipeline.until_held(killed)
    pipeline.kill(killed)
    resumed = pipeline.learner(acknowledge="trained")
    pipeline.until_step(resumed, 8, actor)
    pipeline.stop(actor, resumed)
    assert resumed.told("resumed") == [3]
    assert not set(killed.ids("trained")) & set(resumed.ids("trained"))
    account = pipeline.account()
    num_applied = len(killed.ids("trained")) + len(resumed.ids("trained"))
    assert account.counts["trained"] == num_applied == len(account.learned) + len(killed.told("trained")[3])
    assert account.counts["produced"] == num_applied + account.in_queue
    assert account.kept <= {*killed.ids("trained"), *resumed.ids("trained"), *account.queued}


def test_a_learner_that_lost_its_lease_changes_nothing(pipeline):
    """A paused machine: another learner goes on, and the first one wakes up."""
    actor = pipeline.actor()
    sleeper = pipeline.learner(step_s=0.2, save_every=1000)
    pipeline.until_step(sleeper, 2, actor)
    sleeper.process.send_signal(signal.SIGSTOP)
    successor = pipeline.learner()
    pipeline.until_step(successor, 3, actor)
    sleeper.process.send_signal(signal.SIGCONT)
    assert sleeper.process.wait(60) != 0
    assert "LeaseLost" in sleeper.log.read_text()
    pipeline.until_step(successor, successor.step + 3, actor)
    pipeline.stop(actor, successor)
    pipeline.check()


@pytest.mark.extended(covered_by="test_groups_of_a_removed_learner_go_to_the_others")
def test_one_of_two_learners_is_killed_and_resumes(pipeline):
    """Ranks 0 and 1 of one run: groups are shared out, and the dead one's wait for it."""
    actor = pipeline.actor(concurrency=16)
    ranks = [pipeline.learner(rank=rank, world_size=2, batch_size=16, step_s=0.05) for rank in range(2)]
    for learner in ranks:
        pipeline.until_step(learner, 4, actor)
    pipeline.kill(ranks[1])
    step = ranks[0].step
    pipeline.until_step(ranks[0], step + 3, actor)
    back = pipeline.learner(rank=1, world_size=2, batch_size=16)
    pipeline.until_step(back, ranks[1].step + 3, actor, ranks[0])
    pipeline.stop(actor, ranks[0], back)
    assert back.told("resumed") == [ranks[1].step // 3 * 3]
    assert "went back" not in actor.log.read_text(), "one rank speaks for all of the version"
    account = pipeline.check()
    assert account.counts["trained"] == len(set(account.learned)), "no item went to both"


def test_groups_of_a_removed_learner_go_to_the_others(pipeline):
    """A run of two ranks is resumed with one: what rank 1 had not saved is reclaimed, and comes in the order of the queue."""
    actor = pipeline.actor(concurrency=16)
    ranks = [pipeline.learner(rank=rank, world_size=2, batch_size=16, save_every=1000) for rank in range(2)]
    for learner in ranks:
        pipeline.until_step(learner, 3, actor)
    for learner in ranks:
        pipeline.kill(learner)
    alone = pipeline.learner(batch_size=16)
    for rank, learner in enumerate(ranks):
        had = set(learner.ids("trained"))
        pipeline.until(lambda had=had: had <= set(alone.ids("trained")), f"what rank {rank} had", alive=(alone, actor))
    pipeline.stop(actor, alone)
    pipeline.lives.remove(ranks[1])  # its weights belong to no rank
    pipeline.check()


# --- Redis and the way to it ---


def test_redis_is_killed_again_and_again_and_nothing_that_it_acknowledged_is_lost(pipeline):
    learner = pipeline.learner(step_s=0.005)
    actors = [pipeline.actor(turn_s=0.002), pipeline.actor(turn_s=0.002)]
    moments = random.Random(7)
    for _ in range(4):
        step = learner.step
        pipeline.until_step(learner, step + 5, *actors)
        time.sleep(moments.uniform(0, 0.3))
        pipeline.server.kill()
        time.sleep(moments.uniform(0, 0.5))
        pipeline.server.start()
    pipeline.until_step(learner, learner.step + 5, *actors)
    pipeline.stop(*actors)
    pipeline.until_drained(learner)
    pipeline.stop(learner)
    assert len(pipeline.check().learned) >= 25 * 8
    assert "is back after" in learner.log.read_text() + actors[0].log.read_text()


def test_lost_replies_apply_nothing_twice(pipeline):
    """Redis has done what it was asked to, and is asked again."""
    network = Network(pipeline.server)
    learner = pipeline.learner(redis_url=network.url, save_every=1, filter_every=4)
    actors = [pipeline.actor(redis_url=network.url), pipeline.actor()]
    pipeline.until_step(learner, 2, *actors)
    network.share_lost = 0.1
    pipeline.until(lambda: network.num_lost >= 40, "40 replies lost", alive=(learner, *actors))
    pipeline.until_step(learner, 20, *actors)
    network.share_lost = 0.0
    pipeline.stop(*actors)
    pipeline.until_drained(learner)
    pipeline.stop(learner)
    network.close()
    pipeline.check()


@pytest.mark.extended(covered_by="test_a_pause_of_redis_longer_than_the_lease_loses_nothing")
@pytest.mark.slow
def test_a_network_pause_of_ten_seconds_loses_nothing(pipeline):
    """The learner and one actor hear nothing; the other actor goes on. A lease of the usual length outlasts it."""
    network = Network(pipeline.server)
    learner = pipeline.learner(redis_url=network.url, lease_s=15.0)
    cut_off, near = pipeline.actor(redis_url=network.url, turn_s=0.1), pipeline.actor(turn_s=0.1)
    pipeline.until_step(learner, 3, cut_off, near)
    network.pause()
    step, num_near = learner.step, len(near.told("kept"))
    time.sleep(10)
    assert learner.step <= step + 2, "only what it had fetched already"
    assert len(near.told("kept")) > num_near
    num_cut_off = len(cut_off.told("kept"))
    network.resume()
    pipeline.until_pushed(cut_off, num_cut_off + 3, learner, near)
    pipeline.until_step(learner, step + 6, cut_off, near)
    pipeline.stop(cut_off, near, learner)
    network.close()
    pipeline.check()


def test_a_pause_of_redis_longer_than_the_lease_loses_nothing(pipeline):
    """A name that no other learner asks for stays with its learner."""
    learner, actor = pipeline.learner(lease_s=1.5), pipeline.actor()
    pipeline.until_step(learner, 3, actor)
    with pipeline.redis() as client:
        pid = client.info()["process_id"]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(4)
    os.kill(pid, signal.SIGCONT)
    pipeline.until_step(learner, learner.step + 5, actor)
    pipeline.stop(actor, learner)
    pipeline.check()


# --- what is in the queue ---


def test_poisoned_items_become_dead_letters_and_training_continues(pipeline):
    learner, actor = pipeline.learner(), pipeline.actor()
    pipeline.until_step(learner, 3, actor)
    whole = encode_group([item(1), item(2)])
    groups = {
        b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.": 1,  # a pickle
        random.Random(0).randbytes(1000): 2,
        whole[:-1]: 2,
        whole: 7,  # it lies about its size
    }
    asyncio.run(push_all(pipeline.server.url, groups))
    with pipeline.redis() as client:  # what was not written by push counts as one item each
        client.xadd(STREAM, {"what": "is this"})
        client.xadd(STREAM, {"n": "9" * 50, "v": "-1", "p": "1"})
    num_bad = sum(groups.values()) + 2
    pipeline.until(lambda: pipeline.count("dead") == num_bad, "all bad groups are dead letters", alive=(learner, actor))
    pipeline.until_step(learner, learner.step + 3, actor)
    pipeline.stop(actor, learner)
    account = pipeline.check()
    assert account.counts["dead"] == num_bad
    with pipeline.redis() as client:
        reasons = [fields[b"reason"].decode() for _, fields in client.xrange(f"{STREAM}:dead")]
    assert len(reasons) == 6 and all(reasons)
    assert any("7 items" in reason for reason in reasons) and any("not written by push" in reason for reason in reasons)


@pytest.mark.parametrize(
    "world_size",
    cases([1, 2], default=[1]),
)
def test_a_group_that_kills_its_learner_repeatedly_becomes_a_dead_letter(pipeline, world_size):
    """It passes every check and kills the process that trains on it, with one learner and with two."""
    ranks = range(world_size)
    settings = {"world_size": world_size, "batch_size": 8 * world_size, "fatal": "fatal", "save_every": 1}
    first = item(1).with_origin(rollout_id="fatal")
    asyncio.run(push_all(pipeline.server.url, {encode_group([first, item(2).with_origin(rollout_id="beside it")]): 2}))
    actor = pipeline.actor(concurrency=16)
    lives = {rank: pipeline.learner(rank=rank, **settings) for rank in ranks}
    deaths = 0
    deadline = time.monotonic() + 120
    while deaths < 3:
        assert time.monotonic() < deadline, "the fatal group is tried three times"
        for rank, life in lives.items():
            if life.process.poll() is not None:
                assert life.process.returncode == -signal.SIGKILL
                deaths += 1
                lives[rank] = pipeline.learner(rank=rank, **settings)
        time.sleep(0.05)
    pipeline.until(lambda: pipeline.count("dead") == 2, "it is a dead letter", alive=(*lives.values(), actor))
    for life in lives.values():
        pipeline.until_step(life, life.step + 3, actor)
    pipeline.stop(actor, *lives.values())
    counts = pipeline.account().counts
    assert counts["dead"] == 2
    assert counts["produced"] == sum(counts[name] for name in COUNTS[1:]) + pipeline.account().in_queue
    with pipeline.redis() as client:
        [(_, letter)] = client.xrange(f"{STREAM}:dead")
    assert b"when a learner died, 3 times" in letter[b"reason"]


async def push_all(url: str, groups: dict[bytes, int]) -> None:
    """A hostile actor's, or a broken one's: whatever they are, they come as any other group does."""
    async with ExperienceQueue(url, QUEUE_KEY) as queue:
        for number, (payload, num_items) in enumerate(groups.items(), start=1):
            assert await queue.push(new_actor_id("bad"), number, payload, num_items=num_items, oldest_version=0)


def test_a_full_queue_holds_actors_up_and_they_lose_nothing(pipeline):
    killed = pipeline.learner(save_every=1)
    actors = [pipeline.actor(max_waiting=3), pipeline.actor(max_waiting=3)]
    pipeline.until_step(killed, 3, *actors)
    pipeline.kill(killed)
    pipeline.until(lambda: pipeline.num_waiting_groups() == 3, "the queue is full", alive=tuple(actors))
    produced = pipeline.count("produced")
    time.sleep(1)
    assert pipeline.num_waiting_groups() == 3 and pipeline.count("produced") == produced
    full = [len(actor.told("kept")) for actor in actors]
    resumed = pipeline.learner()
    for actor, num_groups in zip(actors, full, strict=True):
        pipeline.until_pushed(actor, num_groups + 3, resumed)
    pipeline.stop(*actors, resumed)
    pipeline.check()


def test_groups_too_old_for_a_resumed_learner_are_dropped_and_counted(pipeline):
    actor = pipeline.actor()
    killed = pipeline.learner(hold_at=6)
    pipeline.until_held(killed)
    pipeline.until(lambda: pipeline.num_waiting_groups() >= 20, "groups of version 5", alive=(actor,))
    pipeline.kill(killed)
    resumed = pipeline.learner(max_lag=1)  # from step 3, with groups for ten steps and more
    pipeline.until_step(resumed, 15, actor)
    pipeline.stop(actor, resumed)
    account = pipeline.check()
    assert account.counts["stale"] >= 20, "of eight items for each step, no group of version 5 is used after step 7"
    assert all(int(lag) <= 1 for lags in resumed.told("lags") for lag in lags)


# --- everything at once ---


@pytest.mark.extended(covered_by="test_redis_is_killed_again_and_again_and_nothing_that_it_acknowledged_is_lost")
@pytest.mark.slow
def test_all_processes_are_killed_at_random_moments_for_a_while(pipeline):
    moments = random.Random(3)
    learner = pipeline.learner()
    actors = [pipeline.actor(turn_s=0.005), pipeline.actor(turn_s=0.005)]
    pipeline.until_step(learner, 2, *actors)
    for _ in range(6):
        time.sleep(moments.uniform(0.2, 0.8))
        match moments.choice(["actor", "learner", "redis"]):
            case "actor":
                pipeline.kill(actors.pop(0))
                actors.append(pipeline.actor(turn_s=0.005))
            case "learner":
                pipeline.kill(learner)
                learner = pipeline.learner()
            case "redis":
                pipeline.server.kill()
                time.sleep(moments.uniform(0, 0.3))
                pipeline.server.start()
    pipeline.until_step(learner, 30, *actors)
    pipeline.stop(*actors)
    pipeline.until_drained(learner)
    pipeline.stop(learner)
    pipeline.check()
