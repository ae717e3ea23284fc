import asyncio
import json

import pytest

from ludic.batch_gen import AsyncRolloutBatchSource, RequestsExhausted
from ludic.types import ConfigError, SAWBatch
from tests.unit.batch_gen.parts import other_tasks


class Numbered:
    """Batches 0, 1, 2, …; notes the versions at which they were begun."""

    def __init__(self, limit: int = 10**9) -> None:
        self.position, self.limit, self.num_open = 0, limit, 0
        self.begun: list[int] = []

    async def next_batch(self) -> SAWBatch:
        if self.position >= self.limit:
            raise RequestsExhausted("no more")
        number, self.position = self.position, self.position + 1
        self.begun.append(number)
        self.num_open += 1
        try:
            await asyncio.sleep(0.002)
        finally:
            self.num_open -= 1
        return SAWBatch(items=[], meta={"number": number})

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


async def reaches(condition) -> None:
    """Wait until something has happened, however slow the machine, and a little longer for what should not."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)


async def train(source, num_steps, *, first_version=0, step_s=0.01, versions_per_step=1) -> list[dict]:
    metas = []
    for step in range(num_steps):
        batch = await source.next_batch()
        metas.append(batch.meta)
        await asyncio.sleep(step_s)
        source.notify_version(first_version + (step + 1) * versions_per_step)
    return metas


@pytest.mark.parametrize("max_lag", [0, 1, 2, 4])
async def test_batches_come_in_order_and_no_older_than_max_lag(max_lag):
    async with AsyncRolloutBatchSource(Numbered(), max_lag=max_lag, max_batches=9) as source:
        metas = await train(source, 12)
    assert [meta["number"] for meta in metas] == list(range(12))
    lags = [meta["lag"] for meta in metas]
    assert max(lags) == max_lag, "the allowance is used, and not more"
    assert metas[-1]["rollout_metrics"]["lag"] == float(lags[-1])
    assert [m["generated_at_version"] + m["lag"] for m in metas] == list(range(12)), (
        "lag is measured when it is trained"
    )


async def test_generation_runs_while_the_trainer_trains():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=1) as source:
        await source.next_batch()
        await reaches(lambda: len(inner.begun) == 2)  # while the trainer computes
        assert inner.begun == [0, 1], "one batch ahead, and no more before the next version"
        source.notify_version(1)
        await reaches(lambda: len(inner.begun) == 3)
        assert inner.begun == [0, 1, 2]


async def test_without_lag_nothing_is_generated_while_the_trainer_trains():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=0) as source:
        await source.next_batch()
        await asyncio.sleep(0.02)
        assert inner.begun == [0]


async def test_the_number_of_finished_batches_is_bounded():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=50, max_batches=3) as source:
        await source.next_batch()
        await reaches(lambda: len(inner.begun) == 4)
        assert len(inner.begun) == 4, "the one being trained on, and three that wait"


async def test_several_versions_per_batch_count():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=4, max_batches=9, versions_per_batch=4) as source:
        metas = await train(source, 6, versions_per_step=4)
    assert max(meta["lag"] for meta in metas) == 4


async def test_a_trainer_that_never_tells_its_version_still_gets_batches():
    async with AsyncRolloutBatchSource(Numbered(), max_lag=0) as source:
        for number in range(5):
            batch = await asyncio.wait_for(source.next_batch(), 2)
            assert batch.meta["number"] == number


async def test_versions_may_be_told_from_another_thread():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=0) as source:
        await source.next_batch()
        await asyncio.to_thread(source.notify_version, 1)
        await reaches(lambda: len(inner.begun) == 2)
        assert inner.begun == [0, 1]


async def test_the_end_of_the_data_comes_after_the_last_batch_and_stays():
    async with AsyncRolloutBatchSource(Numbered(limit=2), max_lag=5, max_batches=5) as source:
        assert [(await source.next_batch()).meta["number"] for _ in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(RequestsExhausted):
                await asyncio.wait_for(source.next_batch(), 2)


async def test_an_error_in_the_background_reaches_the_trainer():
    class Broken(Numbered):
        async def next_batch(self):
            if self.position == 1:
                raise OSError("server gone")
            return await super().next_batch()

    async with AsyncRolloutBatchSource(Broken()) as source:
        await source.next_batch()
        with pytest.raises(OSError, match="server gone"):
            await asyncio.wait_for(source.next_batch(), 2)


async def test_closing_cancels_what_is_being_generated():
    class Slow(Numbered):
        async def next_batch(self):
            self.num_open += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.num_open -= 1

    inner = Slow()
    source = AsyncRolloutBatchSource(inner)
    waiting = asyncio.ensure_future(source.next_batch())
    await reaches(lambda: inner.num_open == 1)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert inner.num_open == 1, "a trainer that gives up waiting does not lose the batch"
    await source.close()
    assert inner.num_open == 0 and not other_tasks()
    with pytest.raises(ConfigError, match="closed"):
        await source.next_batch()


async def test_batches_made_ahead_are_made_again_after_a_resume():
    inner = Numbered()
    async with AsyncRolloutBatchSource(inner, max_lag=3, max_batches=9) as source:
        await train(source, 4)
        await reaches(lambda: inner.position > 4)
        state = json.loads(json.dumps(source.state_dict()))
    async with AsyncRolloutBatchSource(Numbered(), max_lag=3) as resumed:
        resumed.load_state_dict(state)
        batch = await resumed.next_batch()
        assert batch.meta["number"] == 4 and batch.meta["generated_at_version"] == 4
        with pytest.raises(ConfigError, match="before the first"):
            resumed.load_state_dict(state)


@pytest.mark.parametrize("wrong", [{"max_lag": -1}, {"max_batches": 0}, {"versions_per_batch": 0}])
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        AsyncRolloutBatchSource(Numbered(), **wrong)
