"""Samples that are used more than once, within limits of age."""

import json
from collections import Counter

import pytest

from ludic.batch_gen import AsyncRolloutBatchSource, ReplayBatchSource
from ludic.types import ConfigError
from tests.unit.batch_gen.numbered import Numbered, numbers


async def run(source, steps, *, first=0):
    """As a trainer does: the version goes up after each batch."""
    found = []
    for step in range(first, first + steps):
        source.notify_version(step)
        found.append(await source.next_batch())
    return found


async def test_a_batch_is_a_fresh_one_and_samples_of_earlier_ones():
    batches = await run(ReplayBatchSource(Numbered(4), capacity=100, num_replayed=3), 4)
    assert numbers(batches[0]) == [0, 1, 2, 3]
    for step, batch in enumerate(batches[1:], start=1):
        fresh, again = numbers(batch)[:4], numbers(batch)[4:]
        assert fresh == list(range(4 * step, 4 * step + 4))
        assert len(set(again)) == 3 and max(again) < 4 * step
        assert batch.meta["num_replayed"] == 3 and batch.meta["num_kept"] == 4 * step + 4
        assert batch.meta["avg_total_reward"] == 0.5, "the fresh batch's own numbers stay"


async def test_a_replayed_sample_has_the_log_probs_and_the_weight_that_it_was_sampled_with():
    source = ReplayBatchSource(Numbered(2), capacity=2, num_replayed=2)
    first, second = await run(source, 2)
    originals = {int(item.weight): item for item in first.items}
    for again in second.items[2:]:
        original = originals[int(again.weight)]
        assert again.actor_logps.tolist() == original.actor_logps.tolist()
        assert again.oldest_version == 0 and again.origin.is_replayed and again.origin.group_id is None
        assert original.origin.group_id == "g0" and not original.origin.is_replayed


async def test_nothing_is_older_than_the_limit_and_what_expired_is_counted():
    batches = await run(ReplayBatchSource(Numbered(2), capacity=100, num_replayed=50, max_lag=2), 6)
    for step, batch in enumerate(batches):
        assert {step - item.oldest_version for item in batch.items} == set(range(min(step, 2) + 1))
    assert [batch.meta["num_expired"] for batch in batches] == [0, 0, 0, 2, 2, 2]
    assert batches[-1].meta["replay_lag_mean"] == 1.5


async def test_the_limit_holds_inside_a_source_that_works_ahead():
    replay = ReplayBatchSource(Numbered(2), capacity=100, num_replayed=50, max_lag=1)
    async with AsyncRolloutBatchSource(replay, max_lag=0) as source:
        batches = await run(source, 5)
    for step, batch in enumerate(batches):
        assert {step - item.oldest_version for item in batch.items} == set(range(min(step, 1) + 1))


async def test_a_full_buffer_drops_the_oldest_samples():
    source = ReplayBatchSource(Numbered(4), capacity=6, num_replayed=50)
    batches = await run(source, 3)
    assert sorted(numbers(batches[2])[4:]) == [2, 3, 4, 5, 6, 7] and len(source) == 6


async def test_a_fresh_batch_is_taken_early_when_everything_has_expired():
    batches = await run(ReplayBatchSource(Numbered(2), capacity=8, num_replayed=3, fresh_every=3, max_lag=0), 3)
    assert [numbers(batch) for batch in batches] == [[0, 1], [2, 3], [4, 5]]


async def test_a_sample_one_half_life_older_is_drawn_half_as_often():
    counts = {"recent": Counter(), "uniform": Counter()}
    for seed in range(600):
        for name, half_life in (("recent", 1.0), ("uniform", None)):
            source = ReplayBatchSource(Numbered(1), capacity=9, num_replayed=1, half_life=half_life, seed=seed)
            last = (await run(source, 4))[-1]
            counts[name][numbers(last)[1]] += 1
    # Versions 0, 1, 2 at version 3: weights 1/8, 1/4, 1/2 of which the sum is 7/8.
    for number, share in enumerate([1 / 7, 2 / 7, 4 / 7]):
        assert counts["recent"][number] / 600 == pytest.approx(share, abs=0.05)
        assert counts["uniform"][number] / 600 == pytest.approx(1 / 3, abs=0.05)


@pytest.mark.parametrize("settings", [{}, {"max_lag": 3, "half_life": 2.0}, {"fresh_every": 2}], ids=str)
async def test_a_resumed_replay_gives_what_it_would_have_given(settings):
    def new():
        return ReplayBatchSource(Numbered(3, 5), capacity=10, num_replayed=4, seed=5, **settings)

    expected = [numbers(batch) for batch in await run(new(), 8)]
    for cut in range(8):
        source = new()
        found = await run(source, cut)
        saved = json.loads(json.dumps(source.state_dict()))
        source = new()
        source.load_state_dict(saved)
        found += await run(source, 8 - cut, first=cut)
        assert [numbers(batch) for batch in found] == expected, cut


@pytest.mark.parametrize(
    "settings",
    [{"capacity": 0}, {"num_replayed": 0}, {"fresh_every": 0}, {"max_lag": -1}, {"half_life": 0.0}],
    ids=str,
)
def test_settings_that_cannot_work_are_refused(settings):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"{name}="):
        ReplayBatchSource(Numbered(1), **{"capacity": 1, "num_replayed": 1, **settings})
