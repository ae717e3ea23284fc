"""Credit over many turns: values by hand, and what is unbiased by exact enumeration of a tree with early stops."""

from copy import deepcopy
from itertools import product

import pytest

from ludic.training.credit_assignment import (
    EpisodicReturn,
    GroupNormalizedReturn,
    LeaveOneOutReturn,
    MonteCarloReturn,
    PotentialShaping,
    Relabelled,
    RoleBaselineReturn,
    StateGroupReturn,
    TurnGroupReturn,
    TurnLeaveOneOutReturn,
    info_potential,
    observation_before,
)
from ludic.types import Rollout, StopReason
from tests.unit.training.hand_made import agent_step, rollout, turn_weights

near = pytest.approx


def per_turn(rule, *rollouts):
    weights = rule.compute(rollouts)
    return [turn_weights(weights, of=r) for r in rollouts]


def walk(states, rewards, **facts):
    """A rollout whose turn t was taken in states[t]."""
    made = rollout(rewards, **facts)
    for step, state in zip(made.env_steps, states, strict=True):
        step.prev_obs = state
    return made


# --- values by hand -------------------------------------------------------------------------------------------


def test_turn_leave_one_out_compares_each_turn_with_the_others_that_reach_it():
    # gamma 0.5.  G: a (1 + 0.5 * 2 = 2, 2);  b (0 + 0.5 * 4 = 2, 0 + 0.5 * 8 = 4, 8);  c (5,)
    # turn 0: a 2 - (2 + 5) / 2, b 2 - (2 + 5) / 2, c 5 - (2 + 2) / 2;  turn 1: a 2 - 4, b 4 - 2
    # turn 2: b is alone; the last turns of a and c are worth 2 and 5, so 8 - 3.5
    found = per_turn(TurnLeaveOneOutReturn(gamma=0.5), rollout([1.0, 2.0]), rollout([0.0, 0.0, 8.0]), rollout([5.0]))
    assert found == [near([-1.5, -2.0]), near([-1.5, 2.0, 4.5]), near([3.0])]


def test_turn_leave_one_out_has_no_baseline_where_the_others_never_acted():
    assert per_turn(TurnLeaveOneOutReturn(), rollout([1.0, 2.0]), rollout([])) == [near([3.0, 2.0]), []]


@pytest.mark.parametrize("rule", [StateGroupReturn(4), TurnLeaveOneOutReturn(4, gamma=0.9)])
def test_credit_for_turns_is_grpos_up_to_a_factor_where_episodes_have_one_turn(rule):
    # Rewards 1, 0, 0, 1; all in one state.  GRPO: (R - 0.5) / 0.5.  GiGPO: twice that.  Against the others: 4/3 (R - 0.5)
    members = [walk("s", [reward]) for reward in (1.0, 0.0, 0.0, 1.0)]
    factor = {StateGroupReturn: 2.0, TurnLeaveOneOutReturn: 2 / 3}[type(rule)]
    grpo = per_turn(GroupNormalizedReturn(4, normalize_adv=True), *members)
    assert per_turn(rule, *members) == [near([factor * weight]) for (weight,) in grpo]


def two_walks():
    # gamma 0.5.  a: G = 0 + 0.5 * 4 = 2, 4; total 4.   b, twice in s: G = 0 + 0.5 * 2 = 1, 2, 0; total 2
    return walk("st", [0.0, 4.0]), walk("ssu", [0.0, 2.0, 0.0])


@pytest.mark.parametrize(
    ("comparison", "a", "b"),
    [
        # totals: mean 3, so 1 and -1.  s holds 2, 1, 2: mean 5/3, so 1/3 for a; -2/3 and 1/3 for b.  t and u: alone
        ("mean", [1 + 2 / 3, 1.0], [-1 - 4 / 3, -1 + 2 / 3, -1.0]),
        # totals: 4 - 2 and 2 - 4.  s: a against b's two visits 2 - 1.5; b against a's one 1 - 2 and 2 - 2
        ("others", [2 + 2 * 0.5, 2.0], [-2 + 2 * -1.0, -2.0, -2.0]),
        # totals: spread 1.  s: variance (1/9 + 4/9 + 1/9) / 3 = 2/9, so 1/3, -2/3, 1/3 become 1, -2, 1 over sqrt(2)
        ("scaled", [1 + 2**0.5, 1.0], [-1 - 2 * 2**0.5, -1 + 2**0.5, -1.0]),
    ],
)
def test_state_groups_add_the_step_term_to_the_episode_term(comparison, a, b):
    rule = StateGroupReturn(2, gamma=0.5, step_weight=2.0, comparison=comparison)
    assert per_turn(rule, *two_walks()) == [near(a, abs=1e-6), near(b, abs=1e-6)]


def test_state_groups_use_the_given_state_function():
    # All observations differ in the clock; without it both turns 0 are in s: G = 1 and 3, so -2 and 2 twice.
    members = walk(["s 1", "t 2"], [0.0, 1.0]), walk(["s 9", "u 8"], [0.0, 3.0])
    clockless = StateGroupReturn(
        2, gamma=1.0, comparison="others", state_of=lambda turn: observation_before(turn).split()[0]
    )
    assert per_turn(clockless, *members) == [near([-4.0, -2.0]), near([4.0, 2.0])]
    assert per_turn(StateGroupReturn(2, gamma=1.0, comparison="others"), *members) == [
        near([-2.0] * 2),
        near([2.0] * 2),
    ]


def test_the_state_of_a_reply_that_never_reached_the_env_is_its_last_prompt_message():
    reached = walk(["left or right?"], [1.0])
    unread = Rollout(steps=[agent_step(0, turn="t0", reward=-1.0, info={"parse_error": True})])
    unread.steps[0].prompt_messages = [{"role": "user", "content": "left or right?"}]
    assert observation_before(reached.turns()[0]) == observation_before(unread.turns()[0]) == "left or right?"


def test_a_role_is_compared_with_earlier_batches_only():
    rule = RoleBaselineReturn(decay=0.5)

    def played(*games):
        return [w[0] for w in per_turn(rule, *[rollout([earned], agent_id=role) for role, earned in games])]

    assert played(("x", 1.0), ("x", 0.0), ("o", -1.0)) == near([1.0, 0.0, -1.0])  # nothing known yet
    assert played(("x", 1.0), ("o", 0.0)) == near([0.5, 1.0])  # x: mean of 1 and 0; o: -1
    # x: (0.25 * 0.5 + 0.5 * 1) / (0.25 + 0.5) = 5/6;  o: (0.25 * -1 + 0.5 * 0) / 0.75 = -1/3
    assert played(("x", 1.0), ("o", 0.0)) == near([1 / 6, 1 / 3])


def test_resume_restores_role_baselines():
    before = RoleBaselineReturn(decay=0.5)
    before.compute([rollout([4.0], agent_id="x")])
    wrapped = Relabelled(RoleBaselineReturn(decay=0.5), lambda r: r)
    wrapped.load_state_dict(Relabelled(before, lambda r: r).state_dict())
    assert per_turn(wrapped, rollout([5.0], agent_id="x")) == [near([1.0])]


def test_shaping_pays_the_discounted_rise_of_the_potential():
    # gamma 0.5, Phi 0, 0.5, 0.8 and 0 at the end: 0.5 * 0.5 - 0, 0.5 * 0.8 - 0.5, 1 - 0.8
    shaping = PotentialShaping(lambda r: [0.0, 0.5, 0.8], gamma=0.5)
    rule = Relabelled(MonteCarloReturn(0.0), shaping)
    assert per_turn(rule, rollout([0.0, 0.0, 1.0], calls=3)) == [near([0.25, -0.1, 0.2])]
    # with the task's own discount, G - Phi = 0.25 - 0, 0.5 - 0.5, 1 - 0.8
    assert per_turn(Relabelled(MonteCarloReturn(0.5), shaping), rollout([0.0, 0.0, 1.0])) == [near([0.25, 0.0, 0.2])]


@pytest.mark.parametrize("stop", [StopReason.TERMINATED, StopReason.MAX_STEPS])
def test_shaping_does_not_pay_for_where_an_episode_ends(stop):
    # undiscounted, everything cancels but the start, which all siblings share: totals 1 - 0.3 and 0 - 0.3
    rule = Relabelled(EpisodicReturn(), PotentialShaping(lambda r: [0.3, 0.9, 0.7][: len(r.turns())]))
    assert per_turn(rule, rollout([0.0, 0.0, 1.0], stop=stop), rollout([0.0], stop=stop)) == [
        near([0.7] * 3),
        near([-0.3]),
    ]


def test_info_potential_is_the_last_value_of_the_env():
    told = rollout([0.0, 0.0, 0.0, 1.0])
    for step, progress in zip(told.env_steps, [0.25, None, 0.75, 1.0], strict=True):
        step.info = {} if progress is None else {"progress": progress}
    assert info_potential("progress", start=0.1)(told) == [0.1, 0.25, 0.25, 0.75]


def test_relabelling_must_keep_tokens_and_steps():
    def shorter(r):
        return Rollout(id=r.id, steps=r.steps[:2], meta=r.meta)

    with pytest.raises(ValueError, match="2 steps.*may change rewards only.*with_turn_rewards"):
        Relabelled(EpisodicReturn(), shorter).compute([rollout([0.0, 1.0])])


# --- unbiased or not, by enumeration --------------------------------------------------------------------------
# At each of three turns the policy goes on (1) with probability P[t], or stops (0). The score of action a at turn t is
# a - P[t], in a separate logit. All groups of episodes are enumerated; E[score * weight] is the expected gradient.

P = (0.6, 0.5, 0.25)
REACHED = (1.0, 0.6, 0.3)
EPISODES = [  # actions, rewards: stopping at once is safe, going on pays only at the very end
    ((0,), (1.0,)),
    ((1, 0), (0.5, -2.0)),
    ((1, 1, 0), (0.5, 0.0, 0.0)),
    ((1, 1, 1), (0.5, 0.0, 4.0)),
]
# Values: V2 = 4 * 0.25 = 1, V1 = 0.5 * 1 + 0.5 * -2 = -0.5, V0 = 0.6 * (0.5 - 0.5) + 0.4 * 1 = 0.4
VALUES = (0.4, -0.5, 1.0)
# Reached * p (1 - p) * (worth of going on - worth of stopping):
# 1 * 0.24 * (0 - 1), 0.6 * 0.25 * (1 + 2), 0.3 * 0.1875 * (4 - 0)
TRUE = (-0.24, 0.45, 0.225)


def chance(actions):
    probability = 1.0
    for t, action in enumerate(actions):
        probability *= P[t] if action else 1 - P[t]
    return probability


def expected_gradient(rule, num_members):
    """Per turn, averaged over the members."""
    gradient = [0.0, 0.0, 0.0]
    for drawn in product(EPISODES, repeat=num_members):
        members = [walk([f"s{t}" for t in range(len(rewards))], rewards) for _, rewards in drawn]
        probability = 1.0
        for actions, _ in drawn:
            probability *= chance(actions)
        weights = deepcopy(rule).compute(members)
        for (actions, _), member in zip(drawn, members, strict=True):
            for t, weight in enumerate(turn_weights(weights, of=member)):
                gradient[t] += probability * (actions[t] - P[t]) * weight / num_members
    return gradient


def test_the_enumeration_finds_the_gradient_that_is_derived_by_hand():
    assert sum(chance(actions) for actions, _ in EPISODES) == near(1.0)
    assert expected_gradient(MonteCarloReturn(), 1) == near(TRUE)


@pytest.mark.parametrize("num_members", [2, 3, 4])
def test_turn_leave_one_out_is_unbiased_though_the_policy_decides_when_to_stop(num_members):
    assert expected_gradient(TurnLeaveOneOutReturn(num_members), num_members) == near(TRUE)


@pytest.mark.parametrize("num_members", [2, 3])
def test_turn_leave_one_out_expects_what_monte_carlo_does_at_any_discount(num_members):
    plain = expected_gradient(MonteCarloReturn(0.5), 1)
    assert expected_gradient(TurnLeaveOneOutReturn(gamma=0.5), num_members) == near(plain)


def test_the_turn_group_mean_biases_the_gradient_towards_early_turns():
    # k others reach turn t, each with probability q: the factor is E[k / (k + 1)]; q / 2 for one other,
    # 2 q (1 - q) / 2 + q^2 * 2/3 = q - q^2 / 3 for two.
    two = [g * q / 2 for g, q in zip(TRUE, REACHED, strict=True)]
    three = [g * (q - q * q / 3) for g, q in zip(TRUE, REACHED, strict=True)]
    assert expected_gradient(TurnGroupReturn(), 2) == near(two)
    assert expected_gradient(TurnGroupReturn(), 3) == near(three)


def test_state_groups_against_others_keep_the_sign_and_favour_frequent_states():
    # the episode term is leave-one-out: factor 1; the step term is on when the one other gets to the state: q
    rule = StateGroupReturn(2, gamma=1.0, step_weight=3.0, comparison="others")
    assert expected_gradient(rule, 2) == near([g * (1 + 3 * q) for g, q in zip(TRUE, REACHED, strict=True)])
    # with the group's mean, both halve
    rule = StateGroupReturn(2, gamma=1.0, step_weight=3.0, comparison="mean")
    assert expected_gradient(rule, 2) == near([g * (1 + 3 * q) / 2 for g, q in zip(TRUE, REACHED, strict=True)])


def test_a_role_baseline_is_unbiased_whatever_it_has_seen():
    rule = RoleBaselineReturn()
    rule.compute([rollout([7.0])])
    for num_members in (1, 2):
        assert expected_gradient(rule, num_members) == near(TRUE)


def some_potential(r):
    return [0.7, -3.0, 2.0][: len(r.turns())]


@pytest.mark.parametrize("rule", [MonteCarloReturn(), TurnLeaveOneOutReturn(), LeaveOneOutReturn(2), EpisodicReturn()])
def test_shaping_by_any_potential_leaves_the_gradient_as_it_was(rule):
    assert expected_gradient(Relabelled(rule, PotentialShaping(some_potential)), 2) == near(TRUE)


def test_shaping_by_the_true_values_makes_one_turn_rewards_sufficient():
    rule = Relabelled(MonteCarloReturn(0.0), PotentialShaping(lambda r: VALUES[: len(r.turns())]))
    assert expected_gradient(rule, 1) == near(TRUE)
    # without it, it sees what the turn itself paid: 0.24 * (0.5 - 1), 0.15 * (0 + 2), 0.05625 * 4
    assert expected_gradient(MonteCarloReturn(0.0), 1) == near([-0.12, 0.3, 0.225])
