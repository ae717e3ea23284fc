import pytest

from ludic.rewards import Rewards
from ludic.rewards.shaping import LengthPenalty, ShorterThanSiblings, SoftOverlong, UnknownLength, num_tokens
from ludic.types import AgentStep, ConfigError, EnvironmentStep, Rollout, TokenTrace


def replied(*lengths, env=0.0, **info) -> Rollout:
    """One turn per reply of so many tokens."""
    steps = []
    for number, length in enumerate(lengths):
        trace = TokenTrace([1, 2], [3] * length, [-0.5] * length)
        facts = {"trace": trace, "action": "a", "turn_id": f"t{number}"}
        steps.append(AgentStep(index=2 * number, prompt_messages=[], info=info, **facts))
        reward = env if number == len(lengths) - 1 else 0.0
        steps.append(
            EnvironmentStep(
                index=2 * number + 1,
                prev_obs="o",
                parsed_action="a",
                next_obs=None,
                reward=reward,
                source_agent_step_id=steps[-1].id,
                agent_step_ids=[steps[-1].id],
                **facts,
            )
        )
    return Rollout(steps=steps, meta={"request_meta": {"group_id": "g"}})


async def values(scorer, *rollouts):
    return [next(iter(answer.values())) for answer in await scorer.score(rollouts)]


def test_length_is_that_of_all_replies_or_of_the_longest_and_of_a_servers_count():
    assert num_tokens(replied(3, 5)) == 8 and num_tokens(replied(3, 5), "reply") == 5
    assert num_tokens(replied(0, completion_tokens=7)) == 7
    with pytest.raises(UnknownLength, match="step 0 has no token ids"):
        num_tokens(replied(0))


async def test_the_linear_penalty_begins_after_the_free_tokens():
    assert await values(LengthPenalty(per_tokens=10, free_tokens=4), replied(4), replied(5), replied(14)) == [
        0.0,
        -0.1,
        -1.0,
    ]
    assert await values(LengthPenalty(per_tokens=10, of="reply"), replied(4, 6)) == [-0.6]


async def test_soft_overlong_is_the_papers_formula():
    # L_max 10, L_cache 4: 0 up to 6; (6 − |y|) / 4 between; −1 from 10 on.
    rollouts = [replied(length) for length in (1, 6, 7, 9, 10, 12)]
    scorer = SoftOverlong(max_tokens=10, buffer_tokens=4)
    assert await values(scorer, *rollouts) == [0.0, 0.0, -0.25, -0.75, -1.0, -1.0]
    assert await values(scorer, replied(6, 6)) == [0.0]
    assert await values(SoftOverlong(max_tokens=10, buffer_tokens=4, of="episode"), replied(6, 6)) == [-1.0]


async def test_shorter_than_siblings_never_rewards_a_wrong_answer():
    # lengths 2, 4, 6: 0.5, 0, −0.5
    right = [replied(length, env=1.0) for length in (2, 4, 6)]
    wrong = [replied(length) for length in (2, 4, 6)]
    scorer = ShorterThanSiblings()
    assert await values(scorer, *right) == [0.5, 0.0, -0.5]
    assert await values(scorer, *wrong) == [0.0, 0.0, -0.5]
    assert await values(scorer, replied(3, env=1.0), replied(3)) == [0.0, 0.0]


async def test_a_weight_on_env_does_not_change_which_answers_are_right():
    rollouts = [replied(length, env=1.0) for length in (2, 6)]
    rewards = Rewards([ShorterThanSiblings()], {"env": 0.5})
    for rollout in rollouts:
        await rewards.score_episode([rollout])
    await rewards.score_group(rollouts)
    assert [rollout.reward_components for rollout in rollouts] == [
        {"env": 0.5, "shorter": 0.5},
        {"env": 0.5, "shorter": -0.5},
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LengthPenalty(per_tokens=0),
        lambda: LengthPenalty(free_tokens=-1),
        lambda: SoftOverlong(max_tokens=4, buffer_tokens=5),
        lambda: SoftOverlong(max_tokens=4, buffer_tokens=0),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(make):
    with pytest.raises(ConfigError, match=r"LengthPenalty|SoftOverlong"):
        make()
