"""The rollout engine scores episodes and groups, and turns a scorer's error into a failed episode."""

import pytest

from ludic.batch_gen import RolloutBatchSource, TooManyFailures
from ludic.rewards import FunctionScorer, Rewards
from ludic.training import RLAlgorithm, TrainerConfig
from ludic.training.learner.batches import NothingToTrainOn, fetch
from ludic.training.losses import MaskedCausalLMCrossEntropyLoss
from ludic.types import ConfigError, PolicyGone, StopReason, load_rollouts
from ludic_pipeline.queue.actor import GroupRunner, RecentFailures
from ludic_pipeline.queue.wire import decode_group, encode_group
from tests.unit.batch_gen.parts import TotalReward, make_engine, request

ALGORITHM = RLAlgorithm(name="total", credit_assigner=TotalReward(), loss=MaskedCausalLMCrossEntropyLoss())


def half(rollout):
    return 0.5


def rank(rollouts):
    return [float(number) for number, _ in enumerate(rollouts)]


def group(name, num=3, **fields):
    return request(num_episodes=num, meta={"group_id": name}, sampling_seed=1, env_seed=1, **fields)


async def test_episodes_are_scored_before_they_are_written(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    engine = make_engine(jsonl_path=path, rewards=Rewards([FunctionScorer(half)], {"half": 2.0}))
    rollouts = await engine.generate_rollouts([request(), request()], max_steps=1)
    assert [rollout.reward_components["half"] for rollout in rollouts] == [1.0, 1.0]
    stored = {rollout.id: rollout for rollout in load_rollouts(path)}
    assert {r.id: r.reward_components for r in rollouts} == {i: r.reward_components for i, r in stored.items()}
    assert all(r.env_steps[-1].info["scores"] == {"half": 0.5} for r in stored.values())


@pytest.mark.parametrize("concurrency", [1, 8])
async def test_siblings_are_scored_when_their_group_is_complete(tmp_path, concurrency):
    path = tmp_path / "rollouts.jsonl"
    engine = make_engine(jsonl_path=path, rewards=Rewards([FunctionScorer(rank), FunctionScorer(half)]))
    requests = [group("a"), request(), group("b", 2)]
    rollouts = await engine.generate_rollouts(requests, max_steps=1, concurrency=concurrency)
    by_group = {}
    for rollout in rollouts:
        by_group.setdefault(rollout.group_id, []).append(rollout.reward_components["rank"])
    assert {name: sorted(ranks) for name, ranks in by_group.items()} == {"a": [0, 1, 2], None: [0], "b": [0, 1]}
    assert all(rollout.reward_components["half"] == 0.5 for rollout in rollouts)
    stored = {rollout.id: rollout.reward_components for rollout in load_rollouts(path)}
    assert stored == {rollout.id: rollout.reward_components for rollout in rollouts}


async def test_a_resumed_run_takes_over_scored_episodes_and_completes_their_groups(tmp_path):
    path, seen = tmp_path / "rollouts.jsonl", []

    def counted(rollouts):
        seen.append(len(rollouts))
        return rank(rollouts)

    def engine(resume, weights=None):
        return make_engine(
            jsonl_path=path, resume=resume, rewards=Rewards([FunctionScorer(counted, "rank")], weights or {})
        )

    first = await engine(False).generate_rollouts([group("a")], max_steps=1)
    lines = path.read_text().splitlines(keepends=True)
    again = await engine(True).generate_rollouts([group("a")], max_steps=1)
    assert [r.reward_components for r in again] == [r.reward_components for r in first] and seen == [3]

    path.write_text("".join(lines[:2]))
    completed = await engine(True).generate_rollouts([group("a")], max_steps=1)
    assert sorted(r.reward_components["rank"] for r in completed) == [0, 1, 2] and seen == [3, 3]
    assert len(list(load_rollouts(path))) == 3

    await engine(True, {"rank": 0.5}).generate_rollouts([group("a")], max_steps=1)
    assert seen == [3, 3, 3], "episodes that were scored with other weights are not taken over"


# --- failures ---


class Breaks:
    def __init__(self, on, error=RuntimeError, *, by_group=False):
        self.name, self.by_group, self.on, self.error, self.num_calls = "judge", by_group, on, error, 0

    async def score(self, rollouts):
        self.num_calls += 1
        if self.num_calls in self.on:
            raise self.error("no verdict")
        return [{"judge": 1.0} for _ in rollouts]


async def test_a_scorer_that_raises_fails_its_episode_as_data_and_is_not_retried(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    scorer = Breaks({2})
    engine = make_engine(jsonl_path=path, rewards=Rewards([scorer]), max_retries=3)
    rollouts = await engine.generate_rollouts([request() for _ in range(4)], max_steps=1, concurrency=1)
    assert [rollout.failure is None for rollout in rollouts] == [True, False, True, True]
    broken = rollouts[1]
    assert broken.stop is StopReason.FAILED and broken.failure.summary == "RuntimeError: no verdict"
    assert "Raised by the scorer 'judge'." in broken.failure.traceback
    assert scorer.num_calls == 4 and "judge" not in broken.reward_components
    assert [r.failure is None for r in load_rollouts(path)] == [True, False, True, True]


async def test_a_scorer_of_groups_that_raises_fails_the_episodes_of_that_group(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    engine = make_engine(jsonl_path=path, rewards=Rewards([Breaks({1}, by_group=True)]))
    rollouts = await engine.generate_rollouts([group("a", 2), group("b", 3)], max_steps=1, concurrency=1)
    assert [(rollout.group_id, rollout.failure is None) for rollout in rollouts] == [
        ("a", False), ("a", False), ("b", True), ("b", True), ("b", True),
    ]  # fmt: skip
    assert len(list(load_rollouts(path))) == 5


async def test_episodes_that_could_not_be_scored_are_left_out_and_do_not_count_against_the_share_of_failures():
    seen = []
    engine = make_engine(rewards=Rewards([Breaks({1, 2, 3})]), max_failed_share=0, on_progress=seen.append)
    batch = await engine.generate_batch([request() for _ in range(4)], max_steps=1, credit_assigner=TotalReward())
    assert len(batch.items) == 1 and seen[-1].num_failed == 3
    metrics = batch.meta["rollout_metrics"]
    assert (metrics["num_failed"], metrics["num_unscored"], metrics["num_rollouts"]) == (3, 3, 1)


async def test_scorers_have_a_limit_of_failures_for_themselves():
    """In an evaluation an episode without a score counts as not solved, so an outage would look like a collapse."""
    engine = make_engine(rewards=Rewards([Breaks({1, 2, 3})]), max_failed_share=1, max_unscored_share=0.5)
    with pytest.raises(
        TooManyFailures, match=r"failed on 3 of 4 episodes, more than max_unscored_share=0.5.*no verdict"
    ):
        await engine.generate_rollouts([request() for _ in range(4)], max_steps=1, concurrency=1)


@pytest.mark.parametrize("by_group", [False, True])
async def test_a_batch_that_could_not_be_scored_is_skipped_with_a_warning(caplog, by_group):
    rewards = Rewards([Breaks({1, 2}, by_group=by_group)])
    source = RolloutBatchSource(
        make_engine(rewards=rewards),
        requests_fn=lambda: [request(), request()],
        algorithm=ALGORITHM,
        max_steps=1,
        concurrency=1,
    )
    prepared = await fetch(source, ALGORITHM, TrainerConfig(), step=1)
    assert len(prepared.items) == 2 and prepared.meta["batch_index"] == 1
    assert "failed on 2 episodes" in caplog.text and "1 of max_empty_batches=8" in caplog.text


async def test_a_judge_that_never_answers_ends_the_run_after_the_limit_of_empty_batches():
    engine = make_engine(rewards=Rewards([Breaks(range(100))]))
    source = RolloutBatchSource(engine, requests_fn=lambda: [request()], algorithm=ALGORITHM, max_steps=1)
    with pytest.raises(NothingToTrainOn, match=r"3 batches in a row.*num_unscored 3.*RuntimeError: no verdict"):
        await fetch(source, ALGORITHM, TrainerConfig(max_empty_batches=3), step=1)


async def test_a_scorer_that_raises_in_every_call_ends_the_run_at_the_first_batch_with_its_cause():
    scorer = Breaks(range(100))
    engine = make_engine(rewards=Rewards([scorer]))
    source = RolloutBatchSource(engine, requests_fn=lambda: [request()] * 2, algorithm=ALGORITHM, max_steps=1)
    with pytest.raises(
        NothingToTrainOn, match=r"all 2 episodes of the first batch: RuntimeError: no verdict \(at .*\)$"
    ):
        await fetch(source, ALGORITHM, TrainerConfig(), step=0)
    assert scorer.num_calls == 2


async def test_a_judge_whose_server_is_gone_fails_episodes_and_a_wrong_set_up_stops_the_run():
    engine = make_engine(rewards=Rewards([Breaks({1}, PolicyGone)]))
    first, second = await engine.generate_rollouts([request(), request()], max_steps=1, concurrency=1)
    assert first.failure.error == "PolicyGone" and second.failure is None
    engine = make_engine(rewards=Rewards([Breaks({1}, ConfigError)]))
    with pytest.raises(ConfigError, match="no verdict"):
        await engine.generate_rollouts([request()], max_steps=1)


async def test_an_episode_that_failed_before_is_not_scored_and_its_siblings_are():
    scorer = Breaks(set(), by_group=True)
    engine = make_engine(rewards=Rewards([scorer]))
    requests = [group("a", 2), group("a", 1, env={"fail_on": 1})]
    rollouts = await engine.generate_rollouts(requests, max_steps=1)
    assert [rollout.reward_components.get("judge") for rollout in rollouts] == [1.0, 1.0, None]


# --- pipeline actors ---


async def test_a_pipeline_actor_scores_episodes_and_groups_and_reports_a_failed_scorer(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    engine = make_engine(jsonl_path=path, rewards=Rewards([FunctionScorer(rank), FunctionScorer(half)]))
    done = await GroupRunner(engine, max_steps=1, concurrency=2).run([group("a")])
    rollouts = [rollout for episode in done.episodes for rollout in episode.rollouts]
    assert [rollout.reward_components["rank"] for rollout in rollouts] == [0, 1, 2]
    assert all(rollout.reward_components["half"] == 0.5 for rollout in rollouts) and done.is_whole
    assert len(list(load_rollouts(path))) == 3

    for by_group in (True, False):
        engine = make_engine(rewards=Rewards([Breaks({1}, by_group=by_group)]))
        done = await GroupRunner(engine, max_steps=1, concurrency=2).run([group("a")])
        assert not done.is_whole and done.is_unscored and "no verdict" in done.failures[0]
        assert len(done.failures) == (3 if by_group else 1)


def test_an_actor_outlives_its_judge_for_a_while_and_ends_when_no_group_can_be_scored():
    recent = RecentFailures(0, window=4)
    for _ in range(3):
        recent.count(["no verdict"], is_unscored=True)
    recent.count([])
    for _ in range(3):
        recent.count(["no verdict"], is_unscored=True)
    with pytest.raises(
        TooManyFailures, match=r"All of the last 4 groups failed, 4 of them because a judge.*no verdict"
    ):
        recent.count(["no verdict"], is_unscored=True)
    with pytest.raises(TooManyFailures, match=r"1 of the last 4 groups failed.*broken env"):
        recent.count(["broken env"])


# --- metrics and samples ---


async def test_a_batch_has_the_mean_of_each_component_and_its_samples_have_them_all():
    rewards = Rewards([FunctionScorer(rank), FunctionScorer(half)], {"rank": 0.5, "half": 0.0})
    batch = await make_engine(rewards=rewards).generate_batch(
        [group("a", 4)], max_steps=1, credit_assigner=TotalReward(), concurrency=1
    )
    metrics = batch.meta["rollout_metrics"]
    assert metrics["reward/rank"] == 0.75 and metrics["score/rank"] == 1.5
    assert metrics["reward/half"] == 0.0 and metrics["score/half"] == 0.5
    assert "score/env" not in metrics, "its weight is 1"
    total = sum(value for name, value in metrics.items() if name.startswith("reward/"))
    assert total == pytest.approx(metrics["avg_total_reward"])

    arrived = decode_group(encode_group(batch.items))
    assert [item.origin for item in arrived] == [item.origin for item in batch.items]
    assert [item.origin.reward_components["rank"] for item in arrived] == [0.0, 0.5, 1.0, 1.5]
    assert [item.origin.scores["half"] for item in arrived] == [0.5] * 4
    assert arrived[0].record()["reward_components"]["rank"] == 0.0
