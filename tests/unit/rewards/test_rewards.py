import asyncio
from dataclasses import replace

import pytest

from ludic.inference import ScriptedClient
from ludic.rewards import FunctionScorer, Rewards, as_scorer, remove_scores
from ludic.training.credit_assignment import EpisodeCredit, EpisodicReturn
from ludic.types import ConfigError, Rollout, ScorerContractError, UnknownName
from tests.unit.batch_gen.parts import make_engine, request
from tests.unit.training.hand_made import session


class Fixed:
    """Returns what it is told, and notes how many rollouts it saw."""

    def __init__(self, name="judge", answer=None, *, by_group=False):
        self.name, self.by_group, self.answer = name, by_group, answer
        self.seen = []

    async def score(self, rollouts):
        self.seen.append(len(rollouts))
        return [self.answer or {self.name: 0.5} for _ in rollouts]


async def played(num=1, **fields) -> list[Rollout]:
    return await make_engine().generate_rollouts([request(num_episodes=num, env_seed=1, **fields)], max_steps=1)


async def test_a_component_is_added_after_its_weight_and_its_value_is_kept():
    (rollout,) = await played()
    own = rollout.reward_components
    assert own.keys() == {"env", "parser"}
    await Rewards([Fixed(answer={"judge/style": 1.0, "judge/fact": 0.25})], {"judge": 0.5}).score_episode([rollout])
    assert rollout.reward_components == {**own, "judge/style": 0.5, "judge/fact": 0.125}
    assert rollout.total_reward == sum(rollout.reward_components.values())
    assert rollout.env_steps[-1].info["scores"] == {"judge/style": 1.0, "judge/fact": 0.25}
    assert rollout.scores == {**own, "judge/style": 1.0, "judge/fact": 0.25}


async def test_applying_rewards_again_replaces_the_scores_and_removing_them_restores_the_rollout():
    (right, *_) = [rollout for rollout in await played(8) if rollout.total_reward > 1]
    before = right.to_dict()
    for value in (1.0, 2.0):
        await Rewards([Fixed(answer={"judge": value})], {"env": 0.5, "judge": 3.0}).score_episode([right])
    assert right.reward_components == {"env": 0.5, "parser": 0.1, "judge": 6.0} and right.total_reward == 6.6
    assert Rollout.from_json(right.to_json()).reward_components == right.reward_components
    remove_scores(right)
    assert right.to_dict() == before


async def test_a_reply_that_the_env_never_saw_carries_the_score():
    engine = make_engine(ScriptedClient(lambda request: "garbage"))
    (rollout,) = await engine.generate_rollouts([request()], max_steps=1)
    assert not rollout.env_steps
    before = rollout.total_reward
    await Rewards([Fixed()]).score_episode([rollout])
    assert rollout.total_reward == before + 0.5 and rollout.reward_components["judge"] == 0.5


async def test_a_rollout_without_a_step_that_counts_gets_one():
    (rollout,) = await played()
    call = replace(rollout.agent_steps[0], action_target="internal")
    cut = Rollout(steps=[call])
    await Rewards([Fixed()]).score_episode([cut])
    assert cut.total_reward == 0.5 and cut.reward_components == {"env": 0.0, "judge": 0.5}
    assert cut.env_steps[0].turn_id == call.turn_id and cut.env_steps[0].trace is call.trace


async def test_failed_rollouts_sub_tasks_and_agents_that_never_acted_are_not_scored():
    (rollout,) = await played()
    child = Rollout(steps=list(rollout.steps), meta={"parent_step_id": "x"})
    scorer = Fixed()
    await Rewards([scorer]).score_episode([rollout, child, Rollout(), Rollout.failed(RuntimeError("x"))])
    assert scorer.seen == [1] and "judge" not in child.reward_components


async def test_siblings_are_scored_together_by_agent():
    (one,) = await played()

    def of(agent):
        return Rollout(steps=list(one.steps), meta={"request_meta": {"group_id": "g"}, "agent_id": agent})

    scorer = Fixed(by_group=True)
    rewards = Rewards([scorer, Fixed("alone")])
    rollouts = [of(agent) for agent in "ababa"]
    await rewards.score_group(rollouts)
    assert sorted(scorer.seen) == [2, 3]
    assert all("alone" not in rollout.reward_components for rollout in rollouts)


# --- wrong answers and wrong settings ---


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({"judge": float("nan")}, "returned nan"),
        ({"judge": "good"}, "returned 'good'"),
        ({"judge": None}, "returned None"),
        ({"env": 1.0}, "component named 'env'"),
        ({"judgement": 1.0}, "component named 'judgement'"),
        (0.5, "components by name"),
    ],
)
async def test_a_wrong_answer_is_refused_and_changes_nothing(answer, said):
    (rollout,) = await played()
    before = rollout.to_dict()
    with pytest.raises(ScorerContractError, match=said) as raised:
        await Rewards([Fixed("length"), Fixed(answer=answer)], {"env": 2.0}).score_episode([rollout])
    assert "Raised by the scorer 'judge'." in raised.value.__notes__
    assert rollout.to_dict() == before


async def test_one_answer_per_rollout_is_required():
    async def score(rollouts):
        return []

    short = Fixed()
    short.score = score
    with pytest.raises(ScorerContractError, match="given 1 rollouts and returned"):
        await Rewards([short]).score_episode(await played())


async def test_a_scorer_that_takes_too_long_is_named():
    async def slow(rollout):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError, match="'slow' took longer than timeout_s=0.01"):
        await Rewards([FunctionScorer(slow)], timeout_s=0.01).score_episode(await played())


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Rewards([Fixed(), Fixed()]), ConfigError, "named 'judge'"),
        (lambda: Rewards([Fixed("env")]), ConfigError, "named 'env'"),
        (lambda: Rewards([Fixed("a/b")]), ConfigError, "named 'a/b'"),
        (lambda: Rewards([Fixed()], {"jugde": 1.0}), UnknownName, "Did you mean 'judge'"),
        (lambda: Rewards([Fixed()], {"judge": float("inf")}), ConfigError, "finite"),
        (lambda: Rewards(max_concurrent=0), ConfigError, "max_concurrent=0"),
        (lambda: Rewards(timeout_s=0), ConfigError, "timeout_s=0"),
        (lambda: as_scorer(3), ConfigError, "neither a reward function nor a scorer"),
        (lambda: as_scorer(Fixed, "x"), ConfigError, "neither a reward function nor a scorer"),
        (lambda: as_scorer(Fixed(), "other"), ConfigError, "given the name 'other'"),
    ],
)
def test_wrong_settings_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


# --- reward functions ---


async def test_a_function_gives_a_number_or_numbers_by_name_and_may_be_async():
    def short(rollout):
        return len(rollout.steps)

    async def parts(rollout):
        return {"a": 1, "b": True}

    (rollout,) = await played()
    await Rewards([as_scorer(short), as_scorer(parts, "p")], {"p/a": 3.0}).score_episode([rollout])
    assert rollout.reward_components | {"env": 0, "parser": 0} == {
        "env": 0, "parser": 0, "short": 2.0, "p/a": 3.0, "p/b": 1.0,
    }  # fmt: skip


async def test_a_function_of_rollouts_sees_the_group_and_must_return_a_list():
    def rank(rollouts):
        return [float(number) for number, _ in enumerate(rollouts)]

    def wrong(rollouts):
        return 1.0

    rollouts = await played(3, meta={"group_id": "g"})
    assert as_scorer(rank).by_group
    await Rewards([as_scorer(rank)]).score_group(rollouts)
    assert [rollout.reward_components["rank"] for rollout in rollouts] == [0.0, 1.0, 2.0]
    with pytest.raises(ScorerContractError, match="must return a list"):
        await Rewards([as_scorer(wrong)]).score_group(rollouts)


async def test_at_most_max_concurrent_scorers_run_at_once():
    num_open, most = 0, 0

    async def note(rollout):
        nonlocal num_open, most
        num_open += 1
        most = max(most, num_open)
        await asyncio.sleep(0.001)
        num_open -= 1
        return 0.0

    rewards = Rewards([FunctionScorer(note)], max_concurrent=2)
    rollouts = await played(8)
    await asyncio.gather(*(rewards.score_episode([rollout]) for rollout in rollouts))
    assert most == 2


async def test_a_session_of_several_threads_is_scored_in_its_main_rollout():
    main, thread = session(1.0, (0, 2), (1,), call_rewards={1: 0.25})
    scorer = Fixed()
    await Rewards([scorer], {"env": 0.5}).score_episode([main, thread])
    assert scorer.seen == [1]
    assert main.reward_components == {"env": 0.5, "judge": 0.5} and thread.reward_components == {"env": 0.125}
    assert main.own_reward == 1.0 and thread.own_reward == 0.25
    rule = EpisodeCredit(EpisodicReturn())
    assert set(rule.compute([main, thread]).values()) == {1.125}, "all threads get the credit of the whole session"


async def test_the_weight_of_a_component_comes_before_that_of_its_scorer():
    (rollout,) = await played()
    rewards = Rewards([Fixed(answer={"judge/style": 1.0, "judge/fact": 1.0})], {"judge": 0.5, "judge/fact": 2.0})
    await rewards.score_episode([rollout])
    assert rollout.reward_components["judge/style"] == 0.5 and rollout.reward_components["judge/fact"] == 2.0


async def test_a_weight_for_env_scales_the_envs_reward_and_its_value_is_kept():
    (right, *_) = [rollout for rollout in await played(8) if rollout.total_reward > 1]
    await Rewards([], {"env": 0.25}).score_episode([right])
    assert right.total_reward == 0.25 + 0.1 and right.reward_components == {"env": 0.25, "parser": 0.1}
    assert right.scores == {"env": 1.0, "parser": 0.1}
