"""One batch from several sources, in given shares."""

import json

import pytest

from ludic.batch_gen import MixedBatchSource, MixedPart
from ludic.types import ConfigError, RequestsExhausted
from tests.unit.batch_gen.numbered import Numbered, numbers


def mixture(*, lead=(4, 6), demos=(5,), shares=(2, 1), teacher_share=0.3):
    return MixedBatchSource(
        [
            MixedPart(name="play", source=Numbered(*lead), share=shares[0], objective="rl"),
            MixedPart(name="demos", source=Numbered(*demos, first=1000), share=shares[1], objective="sft"),
            MixedPart(name="teacher", source=Numbered(3, first=2000), share=teacher_share),
        ]
    )


async def test_a_batch_is_a_whole_one_of_the_first_part_and_the_others_shares():
    source = mixture()
    first, second = await source.next_batch(), await source.next_batch()
    assert numbers(first) == [0, 1, 2, 3, 1000, 1001]
    # 10 samples of the first part so far: 5 of demos, and 10 · 0.3 / 2 = 1.5 of the teacher, of which 1.
    assert numbers(second) == [4, 5, 6, 7, 8, 9, 1002, 1003, 1004, 2000]
    assert [item.origin.objective for item in second.items] == ["rl"] * 6 + ["sft"] * 3 + [None]
    assert second.meta["play/num_mixed"] == 6 and second.meta["demos/num_mixed"] == 3
    assert second.meta["avg_total_reward"] == 0.5 and second.meta["source"] == "mixed"


async def test_shares_hold_over_the_run_and_no_sample_is_lost_or_given_twice():
    source = mixture(lead=(3, 1, 0, 8), shares=(0.7, 0.2), teacher_share=0.1)
    seen = [number for _ in range(40) for number in numbers(await source.next_batch())]
    # 120 samples of the first part in ten rounds; 120 · 2/7 = 34.3 and 120 · 1/7 = 17.1 of the others.
    assert sorted(seen) == [*range(120), *range(1000, 1034), *range(2000, 2017)]


async def test_a_resumed_mixture_gives_what_it_would_have_given():
    straight = mixture(lead=(3, 5), demos=(7,))
    expected = [numbers(await straight.next_batch()) for _ in range(9)]
    for cut in range(9):
        source = mixture(lead=(3, 5), demos=(7,))
        found = [numbers(await source.next_batch()) for _ in range(cut)]
        saved = json.loads(json.dumps(source.state_dict()))
        source = mixture(lead=(3, 5), demos=(7,))
        source.load_state_dict(saved)
        found += [numbers(await source.next_batch()) for _ in range(9 - cut)]
        assert found == expected, cut


async def test_what_waits_comes_back_from_a_checkpoint_as_it_was():
    source = mixture()
    await source.next_batch()
    resumed = mixture()
    resumed.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for mine, other in zip((await source.next_batch()).items, (await resumed.next_batch()).items, strict=True):
        assert mine.input_ids.tolist() == other.input_ids.tolist() and mine.meta == other.meta
        assert mine.actor_logps.tolist() == other.actor_logps.tolist()
        assert mine.attachments.version_runs == other.attachments.version_runs


async def test_versions_reach_every_part_and_the_end_of_one_is_the_end():
    lead, other = Numbered(2), Numbered(2, endless=False)
    source = MixedBatchSource([MixedPart(name="a", source=lead, share=1), MixedPart(name="b", source=other, share=1)])
    source.notify_version(7)
    assert lead.version == other.version == 7
    await source.next_batch()
    with pytest.raises(RequestsExhausted):
        await source.next_batch()


async def test_a_part_that_gives_no_samples_raises_an_error_with_its_name():
    empty = MixedPart(name="filtered", source=Numbered(0), share=1)
    source = MixedBatchSource([MixedPart(name="a", source=Numbered(1), share=1), empty])
    with pytest.raises(RequestsExhausted, match="'filtered' gave 16 batches"):
        await source.next_batch()


def test_mixtures_that_cannot_work_are_refused():
    part = MixedPart(name="a", source=Numbered(1), share=1)
    with pytest.raises(ConfigError, match="with different names"):
        MixedBatchSource([part, part])
    with pytest.raises(ConfigError, match="share=0"):
        MixedPart(name="a", source=Numbered(1), share=0)
    with pytest.raises(ConfigError, match=r"parts \['a'\], this one \['demos', 'play', 'teacher'\]"):
        mixture().load_state_dict(MixedBatchSource([part]).state_dict())
