import json

import pytest

from ludic.batch_gen import (
    DynamicSampling,
    GRPORequestStrategy,
    RequestsExhausted,
    RolloutBatchSource,
    SuccessBandCurriculum,
    UniformCurriculum,
    make_dataset_sequence_requests_fn,
)
from ludic.inference import ScriptedClient
from ludic.rewards import Rewards, as_scorer
from ludic.types import ConfigError
from tests.unit.batch_gen.parts import RL, TotalReward, make_engine, request


def dataset(num=7, **settings):
    return make_dataset_sequence_requests_fn(
        [None] * num,
        **{
            "batch_size": 3,
            "env_kind": "seeded",
            "protocol_kind": "single",
            "inference": RL,
            "env_kwargs_fn": lambda sample: {} if sample is None else {"fail_on": sample},
            "shuffle": True,
            "group_size": 4,
            **settings,
        },
    )


def make_source(**settings) -> RolloutBatchSource:
    settings = {"engine": make_engine(), "credit_assigner": TotalReward(), "max_steps": 1, **settings}
    if not {"requests_fn", "request_fn", "curriculum"} & settings.keys():
        settings["requests_fn"] = dataset()
    return RolloutBatchSource(**settings)


def content(batch) -> list:
    return [
        (item.input_ids.tolist(), item.action_mask.tolist(), item.weight, item.meta["request_meta"]["sample_index"])
        for item in batch.items
    ]


async def test_a_batch_is_what_the_requests_ask_for():
    source = make_source()
    batch = await source.next_batch()
    assert len(batch) == 12 and batch.meta["source"] == "rollout" and batch.meta["batch_index"] == 0
    assert batch.meta["rollout_metrics"]["generation_s"] > 0
    assert len({item.origin.group_id for item in batch.items}) == 3
    assert (await source.get_next_batch()).meta["batch_index"] == 1


async def test_orchestrator_and_request_fn_are_aliases():
    class Algorithm:
        credit_assigner = TotalReward()

    ours = make_source(requests_fn=dataset())
    theirs = RolloutBatchSource(orchestrator=make_engine(), request_fn=dataset(), algorithm=Algorithm(), max_steps=1)
    assert content(await ours.next_batch()) == content(await theirs.next_batch())


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_fn": list, "requests_fn": list},
        {"orchestrator": make_engine()},
        {"engine": None},
        {"credit_assigner": None},
        {"max_steps": 0},
        {"curriculum": UniformCurriculum([request()], batch_size=1), "requests_fn": list},
    ],
)
def test_contradictory_arguments_are_refused(wrong):
    with pytest.raises(ConfigError):
        make_source(**wrong)


@pytest.mark.parametrize("dynamic", [None, DynamicSampling(max_rounds=3)], ids=["plain", "dynamic"])
@pytest.mark.parametrize("num_before", [1, 2, 5])
async def test_a_resumed_source_makes_the_same_batches(num_before, dynamic):
    def source():
        return make_source(requests_fn=dataset(), dynamic_sampling=dynamic)

    whole = source()
    for _ in range(num_before):
        await whole.next_batch()
    resumed = source()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        one, other = await whole.next_batch(), await resumed.next_batch()
        assert content(one) == content(other) and one.meta["batch_index"] == other.meta["batch_index"]


async def test_a_resumed_source_numbers_its_episodes_on_so_that_derived_seeds_go_on():
    def source():
        return make_source(requests_fn=lambda: [request(meta={"sample_index": 0}) for _ in range(3)])

    whole = source()
    first = content(await whole.next_batch())
    resumed = source()
    resumed.load_state_dict(whole.state_dict())
    assert content(await resumed.next_batch()) == content(await whole.next_batch()) != first


async def test_the_end_of_the_requests_reaches_the_trainer():
    def exhausted():
        raise RequestsExhausted("no more")

    with pytest.raises(RequestsExhausted):
        await make_source(requests_fn=exhausted).next_batch()


# --- dynamic sampling ---


def rewards_by_group(batch) -> list[set[float]]:
    groups: dict[str, set[float]] = {}
    for item in batch.items:
        groups.setdefault(item.origin.group_id, set()).add(item.origin.total_reward)
    return list(groups.values())


async def test_groups_without_a_difference_are_replaced_until_the_batch_is_full():
    plain = await make_source(requests_fn=dataset(group_size=2, batch_size=6)).next_batch()
    assert any(len(rewards) == 1 for rewards in rewards_by_group(plain)), "there is something to replace"
    source = make_source(
        requests_fn=dataset(group_size=2, batch_size=6), dynamic_sampling=DynamicSampling(max_rounds=20)
    )
    batch = await source.next_batch()
    assert [len(rewards) for rewards in rewards_by_group(batch)] == [2] * 6
    assert batch.meta["num_zero_variance_groups"] > 0 and batch.meta["num_sampling_rounds"] > 1
    assert batch.meta["rollout_metrics"]["num_zero_variance_groups"] == float(batch.meta["num_zero_variance_groups"])


@pytest.mark.parametrize("by_component", [True, False])
async def test_equal_totals_are_kept_if_the_credit_is_by_component(by_component):
    episodes = 0

    def trade(rollout):
        """Two components that add up to 1 in every rollout."""
        nonlocal episodes
        episodes += 1
        return {"short": float(episodes % 2), "polite": float(1 - episodes % 2)}

    always_right = ScriptedClient(lambda request: "<a>same</a>")
    source = make_source(
        engine=make_engine(always_right, rewards=Rewards([as_scorer(trade)])),
        dynamic_sampling=DynamicSampling(max_rounds=2, by_component=by_component),
    )
    batch = await source.next_batch()
    assert (len(batch) > 0) is by_component
    assert all(len(rewards) == 1 for rewards in rewards_by_group(batch))


async def test_no_request_that_was_drawn_is_lost_to_a_refill():
    played = []
    engine = make_engine()
    original = engine.run_episodes

    async def run_episodes(requests, **kwargs):
        played.extend(r.meta["sample_index"] for r in requests[::2])
        return await original(requests, **kwargs)

    engine.run_episodes = run_episodes
    source = make_source(
        engine=engine,
        requests_fn=dataset(50, group_size=2, batch_size=6, shuffle=False),
        dynamic_sampling=DynamicSampling(max_rounds=9),
    )
    for _ in range(2):
        await source.next_batch()
    assert played == list(range(len(played))) and len(played) > 12


async def test_refilling_is_bounded():
    always_right = ScriptedClient(lambda request: "<a>same</a>")
    source = make_source(engine=make_engine(always_right), dynamic_sampling=DynamicSampling(max_rounds=3))
    batch = await source.next_batch()
    assert len(batch) == 0 and batch.meta["num_sampling_rounds"] == 3 and batch.meta["num_zero_variance_groups"] == 9


async def test_failed_groups_are_replaced_too_and_counted():
    samples = [1] + [None] * 20
    requests_fn = make_dataset_sequence_requests_fn(
        samples,
        batch_size=4,
        env_kind="seeded",
        protocol_kind="single",
        inference=RL,
        env_kwargs_fn=lambda sample: {"fail_on": sample},
        group_size=8,
    )
    source = make_source(
        engine=make_engine(max_retries=0), requests_fn=requests_fn, dynamic_sampling=DynamicSampling(max_rounds=9)
    )
    batch = await source.next_batch()
    assert len(rewards_by_group(batch)) == 4
    assert batch.meta["num_failed"] == 8 and batch.meta["num_groups_dropped"] == 1


async def test_data_that_ends_during_a_refill_gives_the_batch_there_is():
    draws = iter([GRPORequestStrategy(8).expand([request(env_seed=1), request(env_seed=2)])])

    def requests_fn():
        try:
            return next(draws)
        except StopIteration:
            raise RequestsExhausted("no more") from None

    client = ScriptedClient(lambda r: f"<a>{'even' if r.seed % 2 else 'odd'}</a>" if _number(r) % 2 else "<a>x</a>")
    source = make_source(
        engine=make_engine(client), requests_fn=requests_fn, dynamic_sampling=DynamicSampling(max_rounds=9)
    )
    batch = await source.next_batch()
    assert len(batch) == 8
    with pytest.raises(RequestsExhausted):
        await source.next_batch()


def _number(r) -> int:
    """The number that the env of parts.py showed, read from the prompt's bytes."""
    text = bytes(int(i) for i in r.prompt_token_ids if i < 256).decode()
    return int(text.rpartition("number=")[2])


async def test_an_empty_first_draw_does_not_set_the_batch_size():
    draws = iter([[], GRPORequestStrategy(8).expand([request(), request()])])
    source = make_source(requests_fn=lambda: next(draws), dynamic_sampling=DynamicSampling(max_rounds=1))
    assert len(await source.next_batch()) == 0
    assert len(await source.next_batch()) > 0


# --- curriculum ---


async def test_a_curriculum_is_told_how_its_tasks_went_and_resumes():
    def source(curriculum):
        return make_source(curriculum=curriculum, strategy=GRPORequestStrategy(4))

    def tasks():
        return SuccessBandCurriculum(
            [request(env_seed=index, meta={"sample_index": index}) for index in range(9)], batch_size=3, success_at=1.05
        )

    whole_tasks = tasks()
    whole = source(whole_tasks)
    for _ in range(4):
        await whole.next_batch()
    assert sum(whole_tasks.num_seen) == 48 and max(whole_tasks.success_rates) > 0
    resumed_tasks = tasks()
    resumed = source(resumed_tasks)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert content(await whole.next_batch()) == content(await resumed.next_batch())
    assert resumed_tasks.success_rates == whole_tasks.success_rates
