"""Rejection-sampling fine-tuning: which samples are kept, and that it learns the bandit."""

import pytest

from ludic.training import make_rft
from ludic.training.filters import forget_temperature, keep_distinct, keep_few_per_group, keep_rewarded
from ludic.types import ActorTokenLogps, CandidateSets, ConfigError, SampleAttachments, SampleOrigin, SAWBatch, SAWItem


def sample(*ids, reward=1.0, group="g", rollout=None, **facts):
    origin = SampleOrigin(total_reward=reward, group_id=group, rollout_id=rollout or f"{ids}{reward}", **facts)
    return SAWItem([9, *ids], None, [0] + [1] * len(ids), 1.0, {}, SampleAttachments(temperature=0.6), origin)


def test_only_rewarded_samples_are_kept_without_their_temperature():
    batch = SAWBatch(items=[sample(1), sample(2, reward=0.4), sample(3, reward=0.5), sample(4, reward=-1.0)])
    kept = make_rft(min_reward=0.5).preprocess(batch)
    assert [item.input_ids[1] for item in kept.items] == [1, 3] and kept.meta["accepted_frac"] == 0.5
    assert all(item.attachments.temperature is None for item in kept.items)
    assert len(batch) == 4 and keep_rewarded(SAWBatch(items=[])).meta["accepted_frac"] == 0.0


@pytest.mark.parametrize(
    ("attached", "is_known"),
    [
        ({"temperature": 0.6}, False),
        ({"untrainable_sampling": "top_p=0.9"}, False),
        ({"candidates": CandidateSets.of([[1, 2]])}, False),
        ({"temperature": 1.0}, True),
        ({"temperature": 0.0}, True),
    ],
    ids=str,
)
def test_log_probs_are_dropped_with_the_temperature(attached, is_known):
    logps = ActorTokenLogps([-0.5])
    others = SampleAttachments(actor_logps=logps, temperature=1.0)
    own = SampleAttachments(actor_logps=logps, **attached)
    kept = forget_temperature(SAWBatch(items=[SAWItem([9, 1], None, [0, 1], 1.0, {}, a) for a in (others, own)]))
    assert [item.actor_logps is not None for item in kept.items] == [is_known, is_known]


def test_a_sample_without_a_reward_is_refused():
    with pytest.raises(ConfigError, match=r"origin\.total_reward"):
        make_rft().preprocess(SAWBatch(items=[SAWItem([1, 2], None, [0, 1], 1.0)]))


def test_equal_sequences_are_imitated_once_if_asked():
    batch = SAWBatch(items=[sample(1, 2, rollout="a"), sample(1, 2, rollout="b"), sample(1, 3), sample(1)])
    kept = keep_distinct(batch)
    assert [item.input_ids.tolist() for item in kept.items] == [[9, 1, 2], [9, 1, 3], [9, 1]]
    assert kept.meta["duplicate_frac"] == 0.25
    assert len(make_rft(distinct=True).preprocess(batch)) == 3 and len(make_rft().preprocess(batch)) == 4


def test_at_most_max_per_group_rollouts_of_a_prompt_are_kept_the_best_first():
    parts = [sample(1, reward=2.0, rollout="a"), sample(2, reward=2.0, rollout="a")]  # one rollout, two samples
    batch = SAWBatch(
        items=[sample(3, reward=1.0), *parts, sample(4, reward=1.5), sample(5, group="h"), sample(6, group=None)]
    )
    best = keep_few_per_group(batch, max_rollouts=1)
    assert [item.input_ids[1] for item in best.items] == [1, 2, 5, 6]
    assert [item.input_ids[1] for item in make_rft(max_per_group=2).preprocess(batch).items] == [1, 2, 4, 5, 6]
    with pytest.raises(ConfigError, match="max_rollouts=0"):
        keep_few_per_group(batch, max_rollouts=0)


def test_the_roles_of_an_episode_are_not_compared_with_each_other():
    """X and O of one game share a group id; each role keeps its best, as credit compares within a role."""
    games = [
        sample(number, reward=reward, agent_id=role, rollout=f"{role}{number}")
        for role, rewards in (("X", (2.0, 3.0)), ("O", (0.5, 0.0)))
        for number, reward in enumerate(rewards)
    ]
    helper = sample(7, reward=0.1, agent_id="X", delegate="helper")
    kept = keep_few_per_group(SAWBatch(items=[*games, helper]), max_rollouts=1)
    assert [item.origin.rollout_id for item in kept.items] == ["X1", "O0", helper.origin.rollout_id]
