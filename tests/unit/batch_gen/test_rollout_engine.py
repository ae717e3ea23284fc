import asyncio
from contextlib import aclosing

import pytest

from ludic.batch_gen import Progress, RolloutEngine, TooManyFailures
from ludic.eval import Grading, evaluate
from ludic.inference import ScriptedClient
from ludic.interaction import InteractionProtocol
from ludic.tasks import as_finished
from ludic.types import (
    ConfigError,
    EnvironmentStep,
    EnvSpec,
    ProtocolSpec,
    Rollout,
    RolloutRequest,
    StopReason,
    TokenTrace,
)
from ludic_pipeline.queue.wire import decode_group, encode_group
from tests.unit.batch_gen.parts import SeededEnv, TotalReward, make_engine, other_tasks, request, summary


class Slow(ScriptedClient):
    """Notes how many calls are open at once; earlier calls take longer, so episodes finish out of order."""

    def __init__(self, delay: float = 0.002) -> None:
        super().__init__(lambda request: "<a>even</a>")
        self.delay, self.num_open, self.most_open, self.num_begun = delay, 0, 0, 0

    async def complete_tokens(self, request):
        self.num_open += 1
        self.num_begun += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await asyncio.sleep(self.delay * (1 + 3 * (self.num_begun % 3 == 0)))
            return await super().complete_tokens(request)
        finally:
            self.num_open -= 1


# --- order, seeds, meta ---


@pytest.mark.parametrize("concurrency", [1, 3, 64])
async def test_results_are_in_request_order_and_the_same_at_every_concurrency(concurrency):
    requests = [request() for _ in range(17)] + [request(num_episodes=3, sampling_seed=5), request(env_seed=1)]
    alone = await make_engine().generate_rollouts(requests, max_steps=1, concurrency=1)
    together = await make_engine().generate_rollouts(requests, max_steps=1, concurrency=concurrency)
    assert summary(together) == summary(alone)
    assert [r.meta["episode_idx"] for r in together] == list(range(21))


async def test_seeds_come_from_the_request_or_from_the_engines_seed_and_the_episodes_number():
    engine = make_engine(seed=1)
    first, forced = await engine.generate_rollouts([request(), request(env_seed=7, sampling_seed=8)], max_steps=1)
    (later,) = await engine.generate_rollouts([request()], max_steps=1)
    (other_seed,) = await make_engine(seed=2).generate_rollouts([request()], max_steps=1)
    assert (forced.meta["env_seed"], forced.meta["sampling_seed"]) == (7, 8)
    seeds = [(r.meta["env_seed"], r.meta["sampling_seed"]) for r in (first, later, other_seed)]
    assert len({seed for pair in seeds for seed in pair}) == 6
    assert forced.meta["engine"]["forced_env_seed"] == 7 and first.meta["engine"]["forced_env_seed"] is None


async def test_rollouts_say_which_request_they_answer_and_a_request_cannot_overwrite_that():
    meta = {"task": "t", "agent_id": "liar", "episode_idx": "liar", "engine": "liar"}
    (rollout,) = await make_engine().generate_rollouts([request(meta=meta)], max_steps=1, timeout_s=5)
    assert rollout.meta["task"] == "t" and rollout.meta["request_meta"] == meta
    assert rollout.meta["agent_id"] == "agent_0" and rollout.meta["episode_idx"] == 0
    facts = rollout.meta["engine"]
    assert (facts["max_steps"], facts["timeout_s"], facts["env_kind"], facts["protocol_kind"]) == (
        1,
        5,
        "seeded",
        "single",
    )
    assert facts["return_spec"]["return_chosen_logprobs"] is True


# --- factories ---


async def test_unknown_kinds_are_key_errors_that_name_what_there_is_before_anything_runs():
    client = Slow()
    engine = make_engine(client)
    with pytest.raises(KeyError, match="No env named 'seded'. Did you mean 'seeded'"):
        await engine.generate_rollouts([request(), request("seded")], max_steps=1)
    wrong = RolloutRequest(env=EnvSpec("seeded"), protocol=ProtocolSpec("singel"))
    with pytest.raises(KeyError, match="No protocol named 'singel'. Did you mean 'single'"):
        await engine.generate_rollouts([request(), wrong], max_steps=1)
    assert client.num_begun == 0


async def test_wrong_factory_arguments_stop_the_run_and_name_the_right_ones():
    with pytest.raises(ConfigError, match="'seeded' cannot be made from \\['sise'\\].*fail_on"):
        await make_engine().generate_rollouts([request(env={"sise": 3})], max_steps=1)


async def test_a_protocol_factory_that_makes_something_else_is_named():
    engine = RolloutEngine(env_registry={"seeded": SeededEnv}, protocol_registry={"single": dict})
    with pytest.raises(ConfigError, match="returned dict"):
        await engine.generate_rollouts([request()], max_steps=1)


@pytest.mark.parametrize(
    "wrong",
    [{"max_steps": 0}, {"max_steps": 1, "concurrency": 0}, {"max_steps": 1, "timeout_s": 0}],
)
async def test_impossible_limits_are_refused(wrong):
    with pytest.raises(ConfigError):
        await make_engine().generate_rollouts([request()], **wrong)


# --- concurrency and cancellation ---


async def test_at_most_that_many_episodes_run_and_only_as_many_tasks_exist():
    client = Slow()
    most_tasks = 0

    def watch(progress: Progress) -> None:
        nonlocal most_tasks
        most_tasks = max(most_tasks, len(other_tasks()))

    engine = make_engine(client, on_progress=watch)
    await engine.generate_rollouts([request() for _ in range(40)], max_steps=1, concurrency=5)
    assert client.most_open == 5 and most_tasks <= 5 and client.num_begun == 40


async def test_cancelling_half_way_leaves_no_task_and_no_open_env():
    client = Slow(0.05)
    before = SeededEnv.open_envs
    run = make_engine(client).generate_rollouts([request() for _ in range(50)], max_steps=1, concurrency=8)
    generating = asyncio.ensure_future(run)
    while client.num_begun < 12:
        await asyncio.sleep(0.005)
    generating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await generating
    assert not other_tasks() and client.num_open == 0 and SeededEnv.open_envs == before
    num_begun = client.num_begun
    await asyncio.sleep(0.1)
    assert client.num_begun == num_begun < 50


async def test_leaving_a_stream_ends_what_still_runs():
    client = Slow(0.02)
    before = SeededEnv.open_envs
    async with aclosing(make_engine(client).stream_rollouts([request() for _ in range(30)], max_steps=1)) as stream:
        async for _ in stream:
            break
    assert not other_tasks() and client.num_open == 0 and SeededEnv.open_envs == before


async def test_a_slow_reader_of_a_stream_holds_generation_up():
    client = Slow(0.0)
    async with aclosing(
        make_engine(client).stream_rollouts([request() for _ in range(50)], max_steps=1, concurrency=2)
    ) as stream:
        await anext(stream)
        await asyncio.sleep(0.05)
        assert client.num_begun <= 5


async def test_a_mistake_in_the_set_up_stops_the_run_at_once_and_ends_the_other_episodes():
    class Broken(Slow):
        async def complete_tokens(self, request):
            if self.num_begun == 9:
                raise ConfigError("the client is set up wrongly")
            return await super().complete_tokens(request)

    client = Broken()
    with pytest.raises(ConfigError, match="set up wrongly"):
        await make_engine(client).generate_rollouts([request() for _ in range(99)], max_steps=1, concurrency=4)
    assert client.num_begun < 15 and not other_tasks() and client.num_open == 0


async def test_bounded_jobs_pass_an_error_on_and_cancel_the_rest():
    ended = []

    async def job(number: int) -> int:
        try:
            await asyncio.sleep(0.001 if number == 2 else 5)
            raise OSError("disk full")
        finally:
            ended.append(number)

    with pytest.raises(OSError, match="disk full"):
        async for _ in as_finished([lambda n=n: job(n) for n in range(8)], limit=4):
            pass
    assert sorted(ended) == [0, 1, 2, 3] and not other_tasks()


# --- failures ---


async def test_a_failed_episode_is_data_and_its_siblings_live():
    before = SeededEnv.open_envs
    requests = [request(), request(env={"fail_on": 1}), request()]
    rollouts = await make_engine(max_retries=0).generate_rollouts(requests, max_steps=1)
    assert [r.stop for r in rollouts] == [StopReason.TERMINATED, StopReason.FAILED, StopReason.TERMINATED]
    failed = rollouts[1]
    assert failed.failure.message == "broken env 1" and failed.meta["episode_idx"] == 1
    assert len(failed.agent_steps) == 1, "what was sampled before the failure is kept"
    assert SeededEnv.open_envs == before


async def test_a_failed_episode_is_tried_again_with_the_same_seeds():
    seeds = []

    class Flaky(SeededEnv):
        def env_reset(self, *, seed=None):
            seeds.append(seed)
            if len(seeds) < 3:
                raise ConnectionError("try later")
            return super().env_reset(seed=seed)

    engine = make_engine(env_registry={"flaky": Flaky}, max_retries=2)
    batch = await engine.generate_batch([request("flaky")], max_steps=1, credit_assigner=TotalReward())
    assert len(seeds) == 3 and len(set(seeds)) == 1
    assert batch.meta["num_failed"] == 0 and batch.meta["num_retried"] == 1 and len(batch) == 1


async def test_an_episode_that_takes_too_long_fails_with_the_deadline_in_its_message():
    client = Slow(10)
    before = SeededEnv.open_envs
    engine = make_engine(client, episode_timeout_s=0.02, max_retries=0, max_failed_share=1)
    (rollout,) = await engine.generate_rollouts([request()], max_steps=1)
    assert rollout.failure.error == "TimeoutError" and "episode_timeout_s=0.02" in rollout.failure.message
    assert client.num_open == 0 and SeededEnv.open_envs == before


async def test_a_model_call_that_takes_too_long_is_told_from_the_episodes_deadline():
    engine = make_engine(Slow(10), episode_timeout_s=9, max_retries=0, max_failed_share=1)
    (rollout,) = await engine.generate_rollouts([request()], max_steps=1, timeout_s=0.01)
    assert rollout.failure.error == "TimeoutError" and "timeout_s=0.01" in rollout.failure.message


async def test_a_cancellation_that_escapes_from_a_client_is_that_episodes_failure():
    class Cancels(ScriptedClient):
        async def complete_tokens(self, request):
            raise asyncio.CancelledError

    engine = make_engine(Cancels([]), max_retries=0, max_failed_share=1)
    rollouts = await asyncio.wait_for(engine.generate_rollouts([request(), request()], max_steps=1), 5)
    assert [r.failure.error for r in rollouts] == ["RuntimeError", "RuntimeError"]


async def test_too_many_failures_stop_the_run_early_and_name_the_first():
    client = Slow(0)
    requests = [request(env={"fail_on": i} if i < 6 else {}) for i in range(20)]
    engine = make_engine(client, max_retries=0, max_failed_share=0.2)
    with pytest.raises(
        TooManyFailures,
        match=r"5 of 20 .* 5 x at parts\.py:\d+ in env_step, first in episode 0 \(env seed \d+.*: RuntimeError: broken env 0",
    ) as info:
        await engine.generate_rollouts(requests, max_steps=1, concurrency=1)
    assert "broken env 1" not in str(info.value), "failures of one kind are one"
    assert client.num_begun <= 7, "the run does not go on once the limit is passed"


async def test_progress_counts_every_episode():
    seen: list[Progress] = []
    requests = [request(), request(env={"fail_on": 1}), request()]
    await make_engine(max_retries=0, on_progress=seen.append).generate_rollouts(requests, max_steps=1, concurrency=1)
    assert [(p.num_done, p.num_failed, p.num_episodes) for p in seen] == [(1, 0, 3), (2, 1, 3), (3, 1, 3)]


async def test_progress_tells_tokens_and_the_slowest_episode_while_a_batch_is_played():
    seen: list[str] = []

    class Looks(ScriptedClient):
        async def complete_tokens(self, request):
            seen.append(str(engine.progress))
            return await super().complete_tokens(request)

    engine = make_engine(Looks(["<a>inc</a>"] * 2))
    assert engine.progress is None
    await engine.generate_rollouts([request("counting", {"target": 2})], max_steps=3)
    num_tokens = len("<a>inc</a>") + 1  # one per byte, and the end
    assert seen[0].startswith("0 of 1 episodes, 0 tokens") and seen[0].endswith("slowest: episode 0, 0 s so far")
    assert seen[1].startswith(f"0 of 1 episodes, {num_tokens} tokens ("), "of an episode that is going on"
    assert engine.progress is None


async def test_failures_of_one_kind_show_the_users_own_frames_once_and_then_their_number(caplog):
    broken = [request(env={"fail_on": 1}) for _ in range(3)]
    engine = make_engine(max_retries=1, max_failed_share=1)
    await engine.generate_rollouts(broken, max_steps=1, concurrency=1)
    first, count = [record.getMessage() for record in caplog.records]
    assert (
        first.startswith("Episode 0 (env seed ") and "failed and will be retried: RuntimeError: broken env 1" in first
    )
    assert 'raise RuntimeError(f"broken env {self.fail_on}")' in first and "/src/ludic/" not in first
    assert "request_meta" not in first
    assert count.endswith("in env_step: 6 failed attempts so far.")
    caplog.clear()
    await engine.generate_rollouts(broken[:1], max_steps=1)
    assert not caplog.records, "a few more are in the metrics, not in the log"


async def test_a_broken_contract_is_told_without_frames(caplog):
    class Forgets(SeededEnv):
        def env_step(self, action):
            return "ok", 1.0, True

    engine = make_engine(max_retries=0, max_failed_share=1, env_registry={"forgets": Forgets})
    await engine.generate_rollouts([request("forgets")], max_steps=1)
    (told,) = [record.getMessage() for record in caplog.records]
    assert "Forgets.env_step returned tuple ('ok', 1.0, True); it must return a StepOutcome" in told
    assert ".py" not in told and "\n" not in told


# --- batches ---


async def test_an_incomplete_group_is_dropped_before_credit_and_counted():
    credit = TotalReward()
    grouped = [
        request(meta={"group_id": g}, env={"fail_on": 1} if (g, i) == ("b", 1) else {}) for g in "abc" for i in range(3)
    ]
    batch = await make_engine(max_retries=0).generate_batch(grouped, max_steps=1, credit_assigner=credit)
    assert [item.origin.group_id for item in batch.items] == ["a"] * 3 + ["c"] * 3
    assert credit.seen == [6]
    assert (batch.meta["num_failed"], batch.meta["num_groups_dropped"], batch.meta["num_rollouts"]) == (1, 1, 6)
    assert batch.meta["target_rollouts"] == 9


async def test_batch_meta_counts_and_averages_what_was_kept():
    client = ScriptedClient(lambda request: "<a>even</a>")
    requests = [request(env_seed=seed) for seed in range(8)]
    right = await _rewards(client, requests)
    batch = await make_engine(client).generate_batch(
        requests, max_steps=1, credit_assigner=TotalReward(), sample_filter=lambda item: item.weight > 0.5
    )
    num_right = sum(reward > 1 for reward in right)
    assert 0 < num_right < 8
    meta = batch.meta
    assert (meta["num_samples_before_filter"], meta["num_samples"], meta["num_samples_filtered"]) == (
        8,
        num_right,
        8 - num_right,
    )
    assert meta["avg_total_reward"] == pytest.approx(sum(right) / 8)
    assert meta["avg_completion_length"] == len("<a>even</a>") + 1
    assert all(type(value) is float for value in meta["rollout_metrics"].values())
    assert meta["rollout_metrics"]["num_samples"] == float(num_right)


async def _rewards(client, requests):
    return [r.total_reward for r in await make_engine(client).generate_rollouts(requests, max_steps=1)]


class Writes(InteractionProtocol):
    """Writes a rollout of one env step with its own tokens, and one of a player in whose name nothing was sampled."""

    async def run(self, *, env, max_steps, env_seed=None, sampling_seed=None, inference=None, timeout_s=None):
        def step(reward, trace=None):
            return EnvironmentStep(
                index=0, prev_obs="o", action="a", parsed_action="a", next_obs=None, source_agent_step_id=None,
                agent_step_ids=[], reward=reward, terminated=True, trace=trace,
            )  # fmt: skip

        return [Rollout(steps=[step(1.0, TokenTrace([1], [2, 3], [-1.0, -1.0]))]), Rollout(steps=[step(-1.0)])]


async def test_rollouts_of_env_steps_alone_are_trained_on_or_counted():
    engine = RolloutEngine(env_registry={"seeded": SeededEnv}, protocol_registry={"single": Writes})
    batch = await engine.generate_batch([request(env_seed=3, sampling_seed=4)], credit_assigner=TotalReward())
    (item,) = batch.items
    assert item.num_action_tokens == 2 and item.origin.total_reward == 1.0
    assert batch.meta["num_rollouts"] == 2 and batch.meta["num_rollouts_without_samples"] == 1
    assert batch.meta["rollout_metrics"]["num_rollouts_without_samples"] == 1.0
    assert batch.meta["avg_total_reward"] == 0.0 and batch.meta["avg_turns"] == 0.5
    report = await evaluate(engine, [request(env_seed=3, sampling_seed=4)], grading=Grading(success_reward=1.0))
    assert report.metrics["num_samples"] == 2 and report.metrics["accuracy"] == 0.5
    assert report.metrics["mean_completion_tokens"] == 1.0
    assert [record["completion_length"] for record in report.records] == [2, 0]
    assert [record["env_seed"] for record in report.records] == [3, 3]


async def test_items_say_the_seeds_of_their_episode_also_after_the_wire():
    requests = [request(env_seed=11, sampling_seed=12), request()]
    batch = await make_engine(seed=5).generate_batch(requests, credit_assigner=TotalReward())
    first, second = batch.items
    assert (first.origin.env_seed, first.origin.sampling_seed) == (11, 12)
    (again,) = await make_engine(seed=5).generate_rollouts(
        [request(env_seed=second.origin.env_seed, sampling_seed=second.origin.sampling_seed)]
    )
    assert again.agent_steps[0].trace.completion_token_ids.tolist() == second.input_ids[second.action_mask].tolist()
    sent = decode_group(encode_group(batch.items))
    assert [item.origin.env_seed for item in sent] == [item.origin.env_seed for item in batch.items]
    assert [item.origin.sampling_seed for item in sent] == [item.origin.sampling_seed for item in batch.items]


async def test_an_env_that_cannot_be_made_is_a_failed_episode():
    def make(sample):
        raise ValueError(f"bad sample {sample}")

    requests = [request(), request(), request("picky", {"sample": 3})]
    rollouts = await make_engine(env_registry={"picky": make}).generate_rollouts(requests, max_steps=1)
    assert rollouts[2].failure.message == "bad sample 3" and rollouts[2].meta["engine"]["env_kind"] == "picky"


async def test_episodes_of_one_request_sample_differently():
    rollouts = await make_engine().generate_rollouts(
        [request(env_seed=1, sampling_seed=2, num_episodes=4)], max_steps=1
    )
    assert {r.meta["env_seed"] for r in rollouts} == {1}
    assert len({r.meta["sampling_seed"] for r in rollouts}) == 4


async def test_exactly_the_allowed_share_may_fail():
    requests = [request(env={"fail_on": i} if i < 2 else {}) for i in range(10)]
    rollouts = await make_engine(max_retries=0, max_failed_share=0.2).generate_rollouts(requests, max_steps=1)
    assert sum(r.failure is not None for r in rollouts) == 2
