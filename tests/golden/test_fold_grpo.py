"""FoldGRPO worked by hand: branches under the outcome of their episode, process rewards, value and gradient."""

import pytest

from ludic.training.algorithms import make_fold_grpo
from ludic.training.credit_assignment import FoldedReturn, fold_penalties
from ludic.types import ConfigError, Rollout, TokenTrace
from tests.golden.tokens import by_hand
from tests.unit.training.hand_made import agent_step, rollout, turn_weights

near = pytest.approx


def episode(run, rewards, *branches, group="g"):
    """A parent with a turn per reward, and branches of so many turns, which earn nothing."""
    parent = rollout(rewards, group=group, engine={"episode_run": run})
    link = {"engine": {"episode_run": run}, "delegate": "searcher", "parent_step_id": parent.steps[0].id}
    return [parent, *(rollout([0.0] * turns, group=group, **link) for turns in branches)]


def weights_of(rule, rollouts):
    found = rule.compute(rollouts)
    return [turn_weights(found, of=r) for r in rollouts]


def test_branches_get_the_advantage_of_their_episode():
    # outcomes 1 and 0: mean ½, deviation ½
    found = weights_of(FoldedReturn(2), [*episode("a", [0.0, 1.0], 2, 1), *episode("b", [0.0], 1)])
    assert found == [near([1.0, 1.0]), near([1.0, 1.0]), near([1.0]), near([-1.0]), near([-1.0])]


def test_process_rewards_are_added_to_the_outcome_and_clipped():
    # Q = −0.4 at the first step of branches: (1 − 0.4 − ½) / ½ = 0.2; (clip(0 − 0.4) − ½) / ½ = −1.
    rule = FoldedReturn(2, process=lambda r: {0: -0.4} if r.is_sub_task else {})
    found = weights_of(rule, [*episode("a", [1.0], 2), *episode("b", [0.0], 1)])
    assert found == [near([1.0]), near([0.2, 1.0]), near([-1.0]), near([-1.0])]


def test_where_all_earn_the_same_only_process_rewards_count():
    rule = FoldedReturn(2, process=lambda r: {0: -0.4} if r.is_sub_task else {})
    found = weights_of(rule, [*episode("a", [1.0], 2), *episode("b", [1.0])])
    assert found == [near([0.0]), near([-0.4, 0.0]), near([0.0])]


def test_an_outcome_beyond_the_bounds_is_not_clipped():
    # outcomes −1 and −1: nothing to learn; clipped to 0, both would look better than their mean
    assert weights_of(FoldedReturn(2), [*episode("a", [-1.0], 1), *episode("b", [-1.0])]) == [[0.0], [0.0], [0.0]]
    # outcomes 3 and 1: mean 2, deviation 1; a process reward of −5 takes 3 to 0
    rule = FoldedReturn(2, process=lambda r: {0: -5.0} if r.is_sub_task else {})
    found = weights_of(rule, [*episode("a", [3.0], 1), *episode("b", [1.0])])
    assert found == [near([1.0]), near([-2.0]), near([-1.0])]


def test_branches_of_a_failed_parent_get_nothing():
    parent, branch = episode("c", [1.0], 1)
    broken = Rollout.failed(RuntimeError("bug"), meta=parent.meta)
    found = FoldedReturn(2).compute([*episode("a", [1.0]), *episode("b", [0.0]), broken, branch])
    assert turn_weights(found, of=branch) == [0.0] and all(key[0] != broken.id for key in found)


def test_branches_do_not_count_as_members_of_a_group():
    with pytest.raises(ValueError, match="group_size=3"):
        FoldedReturn(3).compute([*episode("a", [1.0], 4), *episode("b", [0.0])])


def call(index, num_prompt, **facts):
    made = agent_step(index, turn=f"t{index}", **facts)
    made.trace = TokenTrace([1] * num_prompt, [3], [-0.5])
    return made


def test_penalties_are_for_long_parents_and_failed_calls():
    steps = [
        call(0, 5),  # 6 tokens: within 6
        call(1, 6),  # 7 tokens
        call(2, 9, action_target="external"),  # starts a branch
        call(3, 2, action_target="internal", tool_results=[{"is_error": True}]),
        call(4, 8, info={"parse_error": True}),
    ]
    parent = Rollout(steps=steps, meta={})
    process = fold_penalties(max_main_tokens=6, unfolded=1.0, failed_call=0.5, scope=lambda branch: {0: -0.2})
    assert process(parent) == near({1: -1.0, 3: -0.5, 4: -1.5})
    branch = Rollout(steps=steps, meta={"parent_step_id": "x", "delegate": "searcher"})
    assert process(branch) == near({0: -0.2, 3: -0.5, 4: -0.5})
    with pytest.raises(ConfigError, match="above 0"):
        fold_penalties(unfolded=-1.0)


def test_value_and_gradient_of_a_clipped_turn():
    # A = 1 at ρ = 1.5 (beyond 1.28: no gradient), A = −1 at ρ = 1; sum over 2 samples.
    tokens = by_hand([-1.0, -2.0], [1.5, 1.0], [1.0, -1.0], [0, 1])
    loss, _ = make_fold_grpo().loss(tokens)
    loss.backward()
    assert loss.item() == near(-(1.28 - 1.0) / 2) and tokens.logps.grad.tolist() == near([0.0, 0.5])
