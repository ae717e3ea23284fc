"""What scorers of actors count reaches the learner's metrics under the names that a run in one process has."""

import asyncio
import json

import pytest

pytest.importorskip("redis", reason="the pipeline extra is not installed")

from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource
from ludic.rewards import Rewards
from ludic_judges import LLMJudge, PairwiseJudge
from ludic_pipeline.queue.actor import ActorSettings, run_pipeline_actor
from ludic_pipeline.queue.queue import ActorId
from ludic_pipeline.queue.source import PipelineBatchSource
from ludic_pipeline.queue.stats import scorer_report
from plugins.judges.tests.cases import judge_model
from plugins.pipeline.tests.queue_parts import raw_client
from plugins.pipeline.tests.test_actor import POLL_S, endless, key, learner
from tests.unit.batch_gen.parts import TotalReward, make_engine

__all__ = ["key", "learner"]  # fixtures


def judge(kind=LLMJudge, score=7):
    if kind is LLMJudge:
        return LLMJudge(judge_model(lambda _: f'{{"mark": "MARK", "reason": "so", "score": {score}}}'), "Is it right?")
    return PairwiseJudge(judge_model(lambda _: '{"mark": "MARK", "reason": "so", "winner": "A"}'), "Which is better?")


def act(learner, engine, groups=2):
    return run_pipeline_actor(
        engine, endless(), TotalReward(), learner.queue.address.url, learner.queue.keys.queue_key,
        settings=ActorSettings(strategy=GRPORequestStrategy(4), max_groups=groups, poll_s=POLL_S),
    )  # fmt: skip


@pytest.mark.parametrize("kind", [LLMJudge, PairwiseJudge])
async def test_cost_of_all_actors_is_in_the_learners_metrics(learner, kind):
    await learner.say(max_lag=None)
    judges = [judge(kind) for _ in range(2)]
    for number, own in enumerate(judges):
        await act(learner, make_engine(rewards=Rewards([own]), seed=number))
    counts = await learner.queue.counts()
    costs = [own.asking.cost for own in judges]
    assert min(cost.calls for cost in costs) > 0
    for name in ("verdicts", "calls", "prompt_tokens", "completion_tokens", "cache_hits", "unreadable", "failed"):
        assert counts.scorers[f"judge/{name}"] == sum(getattr(cost, name) for cost in costs), name
    if kind is PairwiseJudge:
        biases = [own.bias for own in judges]
        whole = sum(bias.first - bias.last for bias in biases) / sum(bias.num_orders for bias in biases)
        assert counts.scorers["judge/position_bias"] == pytest.approx(whole), "a mean over all verdicts, not a sum"
    await learner.queue.release(learner.lease)
    source = PipelineBatchSource(learner.queue.address.url, learner.queue.keys.queue_key, batch_size=8)
    async with source:
        batch = await source.next_batch()
    alone = RolloutBatchSource(
        make_engine(rewards=Rewards([judge(kind)])),
        requests_fn=endless(),
        strategy=GRPORequestStrategy(4),
        credit_assigner=TotalReward(),
    )
    in_one_process = (await alone.next_batch()).meta["rollout_metrics"]
    names = {name for name in in_one_process if name.startswith("judge/")}
    assert names == {name for name in batch.meta["rollout_metrics"] if name.startswith("judge/")} != set()
    assert batch.meta["rollout_metrics"]["judge/calls"] == sum(cost.calls for cost in costs)


async def test_cost_of_an_actor_that_is_cancelled_stays(learner):
    await learner.say(max_lag=None)
    own = judge()
    running = asyncio.create_task(act(learner, make_engine(rewards=Rewards([own])), groups=50))
    await learner.until(lambda counts: counts.scorers.get("judge/calls", 0) > 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert (await learner.queue.counts()).scorers["judge/calls"] == own.asking.cost.calls, "its last heartbeat tells"
    await learner.queue.clear()
    assert (await learner.queue.counts()).scorers == {}


async def test_a_killed_actor_leaves_its_last_report_and_its_successor_adds_to_it(learner):
    first, second = ActorId("actor-0:one"), ActorId("actor-0:two")
    for calls in (3, 5):
        await learner.queue.beat_actor(first, 0, scorer_report({"judge/calls": calls}, {}))
    await learner.queue.beat_actor(second, 0, scorer_report({"judge/calls": 2}, {}))
    await learner.queue.beat_actor(second, 0)
    assert (await learner.queue.counts()).scorers == {"judge/calls": 7.0}


@pytest.mark.parametrize(
    "foreign",
    [b"", b"\xff", b"[]", b"{", b'{"a": 1}', b'{"a": ["b", null]}', b'{"a": [NaN, null]}', b'{"a": [1, Infinity]}', b"[" * 9999,
     b'{"a": [1, null, 2]}', b'{"' + b"a" * 70_000 + b'": [1, null]}'],
    ids=lambda report: repr(report[:20]),
)  # fmt: skip
async def test_what_another_program_writes_is_left_out(foreign, learner, shared_redis):
    with raw_client(shared_redis) as client:
        client.hset(f"{learner.queue.keys.stream}:scorers", "foreign", foreign)
    await learner.queue.beat_actor(ActorId("own"), 0, json.dumps({"judge/calls": [2, None]}))
    assert (await learner.queue.counts()).scorers == {"judge/calls": 2.0}
