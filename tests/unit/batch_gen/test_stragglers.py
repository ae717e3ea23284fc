"""A batch that closes before its last episodes are done: what is in which batch, under which versions, and after a resume."""

import asyncio

import pytest

from ludic.batch_gen import GRPORequestStrategy, RolloutBatchSource, make_dataset_sequence_requests_fn
from ludic.batch_gen.episodes import TooManyFailures
from ludic.batch_gen.sources.stragglers import Stragglers
from ludic.inference import ScriptedClient
from ludic.training.algorithms import make_grpo
from ludic.training.config import TrainerConfig
from ludic.training.learner.batches import describe, prepare
from ludic.types import RequestsExhausted, VersionRun
from tests.unit.batch_gen.parts import RL, TotalReward, make_engine, other_tasks, request


class SlowClient(ScriptedClient):
    """Holds the calls of chosen episodes (by the number in their prompt) back until they are let go."""

    def __init__(self, slow=()) -> None:
        super().__init__(lambda request: "<a>even</a>")
        self.slow = {number: asyncio.Event() for number in slow}
        self.num_calls: dict[int, int] = {}

    async def complete_tokens(self, request):
        text = bytes(i for i in request.prompt_token_ids if i < 256).decode(errors="replace")
        number = int(text.split("task=")[1].split(".")[0])
        self.num_calls[number] = self.num_calls.get(number, 0) + 1
        if number in self.slow and self.num_calls[number] > self.first_calls:
            await self.slow[number].wait()
        return await super().complete_tokens(request)

    first_calls = 0
    """Calls of a task that are answered at once."""


def numbered_env(turns: int = 1, fails: bool = False):
    from ludic.envs import SingleAgentEnv
    from ludic.types import StepOutcome

    class Numbered(SingleAgentEnv):
        blocking = False

        def __init__(self, sample) -> None:
            super().__init__()
            self.sample, self.turns = sample, 0

        def env_reset(self, *, seed=None):
            return f"task={self.sample}.", {}

        def env_step(self, action):
            if fails:
                raise RuntimeError("broken")
            self.turns += 1
            return StepOutcome("more", float(self.turns), terminated=self.turns == turns)

    return Numbered


def source_of(client, *, close_at=0.5, max_carries=1, turns=1, num_tasks=4, group=2, concurrency=64, **settings):
    env = settings.pop("env", None) or numbered_env(turns)
    engine = make_engine(client, env_registry={"numbered": env}, **settings)
    return RolloutBatchSource(
        engine,
        requests_fn=make_dataset_sequence_requests_fn(
            list(range(100)), batch_size=num_tasks, env_kind="numbered", protocol_kind="single", inference=RL
        ),
        strategy=GRPORequestStrategy(group),
        credit_assigner=TotalReward(),
        concurrency=concurrency,
        stragglers=Stragglers(close_at=close_at, max_carries=max_carries),
    )


def tasks_of(batch) -> list[int]:
    """The task of each group in the batch, in order; groups are whole."""
    found: dict[str, list[int]] = {}
    for item in batch.items:
        found.setdefault(item.origin.group_id, []).append(item.meta["request_meta"]["sample_index"])
    assert all(len(members) == 2 and len(set(members)) == 1 for members in found.values())
    return [members[0] for members in found.values()]


async def test_a_batch_closes_without_the_slow_group_which_is_in_the_next():
    client = SlowClient(slow=[1])
    source = source_of(client, close_at=0.75)
    first = await source.next_batch()
    assert tasks_of(first) == [0, 2, 3]
    assert first.meta["num_carried"] == 2 and first.meta["num_from_earlier"] == 0
    client.slow[1].set()
    second = await source.next_batch()
    assert tasks_of(second) == [1, 4, 5, 6], "the carried group, and three new ones: a batch has four groups"
    assert second.meta["num_from_earlier"] == 2 and second.meta["num_carried"] == 0
    await source.close()
    assert not other_tasks()


async def test_one_slow_episode_keeps_its_whole_group():
    client = SlowClient()
    client.slow = {2: asyncio.Event()}
    client.first_calls = 1
    source = source_of(client, close_at=0.75)
    assert tasks_of(await source.next_batch()) == [0, 1, 3]
    client.slow[2].set()
    assert tasks_of(await source.next_batch()) == [2, 4, 5, 6]
    await source.close()


async def test_a_group_that_was_carried_as_often_as_allowed_is_waited_for():
    client = SlowClient(slow=[1])
    source = source_of(client, close_at=0.5, max_carries=2)
    assert tasks_of(await source.next_batch()) == [0, 2, 3]
    assert 1 not in tasks_of(await source.next_batch())
    third = asyncio.create_task(source.next_batch())
    await asyncio.sleep(0.05)
    assert not third.done(), "it was carried twice"
    client.slow[1].set()
    assert 1 in tasks_of(await third)
    await source.close()


async def test_every_group_is_in_one_batch_exactly():
    client = SlowClient(slow=range(0, 40, 3))
    source = source_of(client, close_at=0.5)
    seen: list[int] = []
    for number in range(10):
        for task in range(0, 4 * number, 3):
            if task in client.slow:
                client.slow[task].set()
        seen += tasks_of(await source.next_batch())
    assert len(seen) == len(set(seen))
    rest = sorted(set(range(max(seen) + 1)) - set(seen))
    assert len(rest) <= 4, f"only what was begun last is missing: {rest}"
    await source.close()


async def test_tokens_of_a_carried_episode_keep_the_version_that_sampled_them():
    client = SlowClient(slow=[1])
    client.first_calls = 2  # the first turn of both episodes
    source = source_of(client, close_at=0.75, turns=2)
    assert tasks_of(await source.next_batch()) == [0, 2, 3]
    client.version = 1
    client.slow[1].set()
    second = await source.next_batch()
    carried = [item for item in second.items if item.meta["request_meta"]["sample_index"] == 1]
    fresh = [item for item in second.items if item not in carried]
    turn = len(carried[0].actor_logps) // 2
    assert all(item.attachments.version_runs == (VersionRun(0, turn), VersionRun(1, turn)) for item in carried)
    assert {run.version for item in fresh for run in item.attachments.version_runs} == {1}
    # The trainer at step 1: one version behind, kept with max_lag 1, dropped and counted with max_lag 0.
    algorithm = make_grpo(group_size=2)
    kept = prepare(second, algorithm, TrainerConfig(max_lag=1), 1)
    assert kept.counts["num_stale"] == 0 and describe(kept, 1, None)["lag_max"] == 1.0
    assert prepare(second, algorithm, TrainerConfig(max_lag=0), 1).counts["num_stale"] == len(carried)
    await source.close()


async def test_resume_plays_the_unfinished_groups_again_and_loses_none():
    client = SlowClient(slow=[1])
    source = source_of(client, close_at=0.75)
    first = await source.next_batch()
    saved = source.state_dict()
    await source.close()
    again = source_of(SlowClient(), close_at=0.75)
    again.load_state_dict(saved)
    second = await again.next_batch()
    assert tasks_of(first) + tasks_of(second) == [0, 2, 3, 1, 4, 5, 6]
    seeds = {item.origin.sampling_seed for item in second.items if item.meta["request_meta"]["sample_index"] == 1}
    client.slow[1].set()
    other = await source.next_batch()  # the one that was closed plays them again, too
    assert {i.origin.sampling_seed for i in other.items if i.meta["request_meta"]["sample_index"] == 1} == seeds
    assert tasks_of(other) == tasks_of(second)
    await source.close()
    await again.close()


async def test_episodes_keep_their_numbers_over_a_resume():
    """Requests without seeds get them from the number of the episode."""
    engine_of = lambda client: make_engine(client, env_registry={"numbered": numbered_env()})  # noqa: E731

    def plain(client):
        return RolloutBatchSource(
            engine_of(client),
            requests_fn=lambda: [request("numbered", {"sample": number}) for number in range(4)],
            credit_assigner=TotalReward(),
            stragglers=Stragglers(close_at=0.75),
        )

    source = plain(SlowClient(slow=[1]))
    await source.next_batch()
    saved = source.state_dict()
    await source.close()
    again = plain(SlowClient())
    again.load_state_dict(saved)
    second = await again.next_batch()
    from ludic.batch_gen.episodes import plan_episodes

    plans = plan_episodes([request("numbered", {"sample": 0})] * 7, first_index=0, seed=0)
    expected = {plan.index: plan.sampling_seed for plan in plans}
    assert [item.origin.sampling_seed for item in second.items] == [expected[i] for i in (1, 4, 5, 6)]
    await again.close()


async def test_the_last_batch_is_what_was_carried_when_requests_end():
    client = SlowClient(slow=[1])
    source = source_of(client, close_at=0.75)
    draw, calls = source._requests._requests_fn, []

    def once():
        if calls:
            raise RequestsExhausted("no more")
        calls.append(1)
        return draw()

    source._requests._requests_fn = once
    await source.next_batch()
    client.slow[1].set()
    assert tasks_of(await source.next_batch()) == [1]
    with pytest.raises(RequestsExhausted):
        await source.next_batch()
    await source.close()


async def test_too_many_failures_end_the_run():
    source = source_of(SlowClient(), close_at=0.5, env=numbered_env(fails=True))
    with pytest.raises(TooManyFailures):
        for _ in range(2):  # half of the episodes may fail, which is enough to close the first batch
            assert not (await source.next_batch()).items
    await source.close()
    assert not other_tasks()
