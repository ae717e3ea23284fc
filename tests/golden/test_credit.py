"""Every credit rule on a tiny case worked by hand."""

from itertools import product

import numpy as np
import pytest

from ludic.training.credit_assignment import (
    GAE,
    ConstantCredit,
    EpisodicReturn,
    GroupNormalizedReturn,
    HybridNormalizedReturn,
    LeaveOneOutReturn,
    MonteCarloReturn,
    PerStepReward,
    StateGroupReturn,
    TurnGroupReturn,
    gae,
)
from ludic.types import StopReason
from tests.unit.training.hand_made import rollout, turn_weights

near = pytest.approx


def per_turn(rule, *rollouts):
    weights = rule.compute(rollouts)
    return [turn_weights(weights, of=r) for r in rollouts]


# --- without a baseline ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [1, 5])
def test_monte_carlo_discounts_once_per_turn_however_many_model_calls_a_turn_has(calls):
    # G_1 = 1; G_0 = -0.1 + 0.9 * 1 = 0.80 (discounting every step would give 0.71 with one call per turn)
    # second member, longer: G_2 = 2; G_1 = 0 + 0.9 * 2 = 1.8; G_0 = 1 + 0.9 * 1.8 = 2.62
    a, b = per_turn(
        MonteCarloReturn(gamma=0.9), rollout([-0.1, 1.0], calls=calls), rollout([1.0, 0.0, 2.0], calls=calls)
    )
    assert a == near([0.80, 1.0]) and b == near([2.62, 1.8, 2.0])


def test_episodic_return_is_the_total_on_every_step():
    # -0.1 + 1 = 0.9; 1 + 0 + 2 = 3
    assert per_turn(EpisodicReturn(), rollout([-0.1, 1.0]), rollout([1.0, 0.0, 2.0])) == [
        near([0.9] * 2),
        near([3.0] * 3),
    ]


def test_per_step_reward_is_each_steps_own():
    r = rollout([-0.1, 1.0])  # steps: call, env -0.1, call, env 1
    longer = rollout([0.5, 0.0, 2.0])
    weights = PerStepReward().compute([r, longer])
    assert [weights[(r.id, i)] for i in range(4)] == [0.0, -0.1, 0.0, 1.0]
    assert [weights[(longer.id, i)] for i in range(6)] == [0.0, 0.5, 0.0, 0.0, 0.0, 2.0]


def test_constant_credit_is_constant():
    assert per_turn(ConstantCredit(0.5), rollout([-0.1, 1.0]), rollout([3.0])) == [[0.5, 0.5], [0.5]]


# --- with a group ---------------------------------------------------------------------------------------------


def test_group_normalized_subtracts_the_mean_of_the_group():
    # totals 0.9, 3, 0 -> mean 1.3 -> -0.4, 1.7, -1.3
    found = per_turn(GroupNormalizedReturn(3), rollout([-0.1, 1.0]), rollout([1.0, 0.0, 2.0]), rollout([0.0]))
    assert found == [near([-0.4] * 2), near([1.7] * 3), near([-1.3])]


def test_group_normalized_divides_by_the_population_spread():
    # totals 0, 0, 0, 4 -> mean 1, variance (1 + 1 + 1 + 9) / 4 = 3 -> -1/sqrt(3) three times, 3/sqrt(3)
    members = [rollout([0.0, 0.0]), rollout([0.0]), rollout([1.0, -1.0]), rollout([1.0, 3.0])]
    a, b, c, d = per_turn(GroupNormalizedReturn(4, normalize_adv=True), *members)
    low, high = -(3**-0.5), 3**0.5
    assert a == near([low, low]) and b == near([low]) and c == near([low, low]) and d == near([high, high])


def test_positive_only_clamps_after_the_division():
    # as above, negatives to 0; clamping first would make the spread sqrt(27/16) = 1.30 and the last weight 2.31
    members = [rollout([0.0, 0.0]), rollout([0.0]), rollout([1.0, -1.0]), rollout([1.0, 3.0])]
    *low, high = per_turn(GroupNormalizedReturn(4, normalize_adv=True, positive_only=True), *members)
    assert low == [[0.0, 0.0], [0.0], [0.0, 0.0]] and high == near([3**0.5] * 2)


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize(
    "rule",
    [
        GroupNormalizedReturn(4, normalize_adv=True),
        GroupNormalizedReturn(4),
        HybridNormalizedReturn(4),
        TurnGroupReturn(4, normalize=True),
        StateGroupReturn(4),
    ],
)
def test_equal_rewards_with_rounding_errors_get_no_weight(rule, scale):
    # 0.7 as float32 and its neighbour: a spread of 3e-8 over 3e-8 + 1e-8 would be weights of ±0.75.
    low = np.float32(0.7 * scale)
    high = np.nextafter(low, np.float32(np.inf))
    members = [rollout([float(reward)]) for reward in (low, high, low, high)]
    assert per_turn(rule, *members) == [[0.0]] * 4


def test_a_small_spread_of_rewards_still_counts():
    # totals 100 and 100.01: deviation 0.005, a ten-thousandth of the rewards but far above rounding
    low, high = per_turn(GroupNormalizedReturn(2, normalize_adv=True), rollout([100.0]), rollout([100.01]))
    assert low == near([-1.0], rel=1e-5) and high == near([1.0], rel=1e-5)


def two_groups():
    # totals 0, 2 -> -1, 1;  totals 5, 5 + 2 * sqrt(7) ~ centred -sqrt(7), sqrt(7)
    return [
        rollout([0.0, 0.0], group="a"), rollout([1.0, 0.0, 1.0], group="a"),
        rollout([5.0], group="b"), rollout([5.0, 2 * 7**0.5], group="b"),
    ]  # fmt: skip


def test_hybrid_centres_on_the_group_and_scales_by_the_batch():
    # centred -1, 1, -sqrt(7), sqrt(7): mean 0, variance (1 + 1 + 7 + 7) / 4 = 4, so everything is halved
    a, b, c, d = per_turn(HybridNormalizedReturn(2), *two_groups())
    assert a == near([-0.5] * 2) and b == near([0.5] * 3)
    assert c == near([-(7**0.5) / 2]) and d == near([7**0.5 / 2] * 2)


def test_hybrid_clamps_after_the_division_too():
    a, b, c, d = per_turn(HybridNormalizedReturn(2, positive_only=True), *two_groups())
    assert (a, c) == ([0.0, 0.0], [0.0]) and b == near([0.5] * 3) and d == near([7**0.5 / 2] * 2)


def test_leave_one_out_subtracts_the_mean_of_the_others():
    # totals 0.9, 3, 0: 0.9 - 1.5 = -0.6; 3 - 0.45 = 2.55; 0 - 1.95 = -1.95
    found = per_turn(LeaveOneOutReturn(3), rollout([-0.1, 1.0]), rollout([1.0, 0.0, 2.0]), rollout([0.0]))
    assert found == [near([-0.6] * 2), near([2.55] * 3), near([-1.95])]


def test_turn_group_compares_each_turn_with_the_members_that_reach_it():
    # gamma 0.5.  G: (1 + 0.5 * 2 = 2, 2);  (0 + 0.5 * 4 = 2, 0 + 0.5 * 8 = 4, 8);  (5,)
    # turn 0: mean (2 + 2 + 5) / 3 = 3;  turn 1: mean (2 + 4) / 2 = 3;  turn 2: 8, alone
    found = per_turn(TurnGroupReturn(gamma=0.5), rollout([1.0, 2.0]), rollout([0.0, 0.0, 8.0]), rollout([5.0]))
    assert found == [near([-1.0, -1.0]), near([-1.0, 1.0, 0.0]), near([2.0])]


def test_turn_group_divides_by_the_spread_of_the_turn():
    # turn 0: -1, -1, 2, variance (1 + 1 + 4) / 3 = 2;  turn 1: -1, 1, variance 1;  turn 2: alone, 0
    rule = TurnGroupReturn(3, gamma=0.5, normalize=True)
    found = per_turn(rule, rollout([1.0, 2.0]), rollout([0.0, 0.0, 8.0]), rollout([5.0]))
    root = 2**0.5
    assert found == [near([-1 / root, -1.0]), near([-1 / root, 1.0, 0.0]), near([root])]


# --- with values ----------------------------------------------------------------------------------------------


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5. Over: d_1 = 2 + 0 - 1 = 1, d_0 = 1 + 0.5 * 1 - 2 = -0.5; A_1 = 1, A_0 = -0.5 + 0.25 * 1
    assert gae([1.0, 2.0], [2.0, 1.0], gamma=0.5, lam=0.5) == near([-0.25, 1.0])
    # cut off with 4 to come: d_1 = 2 + 0.5 * 4 - 1 = 3; A_1 = 3, A_0 = -0.5 + 0.25 * 3
    assert gae([1.0, 2.0], [2.0, 1.0], gamma=0.5, lam=0.5, bootstrap=4.0) == near([0.25, 3.0])


def test_gae_over_rollouts_bootstraps_only_what_was_cut_off():
    done, cut_off = rollout([1.0, 2.0], calls=2), rollout([1.0, 2.0, 0.0], stop=StopReason.MAX_STEPS)
    values = {done.id: [2.0, 1.0], cut_off.id: [2.0, 1.0, 0.0, 4.0]}
    rule = GAE(gamma=0.5, lam=0.5, value_fn=lambda r: values[r.id])
    # cut off: d_2 = 0 + 2 - 0 = 2, d_1 = 2 + 0 - 1 = 1, d_0 = -0.5; A_2 = 2, A_1 = 1 + 0.5 = 1.5, A_0 = -0.5 + 0.375
    assert per_turn(rule, done, cut_off) == [near([-0.25, 1.0]), near([-0.125, 1.5, 2.0])]
    # targets: A + V
    targets = rule.value_targets([done, cut_off])
    assert turn_weights(targets, of=done) == near([1.75, 2.0])
    assert turn_weights(targets, of=cut_off) == near([1.875, 2.5, 2.0])


# --- what the docstrings claim about bias, by exact enumeration -----------------------------------------------
# Policy: a coin with P(1) = p, so the score of action a is d log P / d logit = a - p. E[score * weight] over all
# outcomes is the expected gradient.


def expected_gradient(rule, p, episodes, num_members):
    """Sum over members and turns of score * weight, averaged over members; `episodes` are (probability, actions, rewards)."""
    total = 0.0
    for drawn in product(episodes, repeat=num_members):
        probability = 1.0
        members = []
        for chance, _, rewards in drawn:
            probability *= chance
            members.append(rollout(rewards))
        weights = rule.compute(members)
        for (_, actions, _), member in zip(drawn, members, strict=True):
            scored = zip(actions, turn_weights(weights, of=member), strict=True)
            total += probability * sum((a - p) * w for a, w in scored) / num_members
    return total


def bandit(p):
    return [(1 - p, [0], [1.0]), (p, [1], [3.0])]


@pytest.mark.parametrize("num_members", [2, 3])
def test_leave_one_out_is_unbiased_and_the_group_mean_shrinks_the_gradient(num_members):
    # true gradient of E[R] = 1 + 2p in the logit: 2 p (1 - p) = 0.42 at p = 0.3
    p, n = 0.3, num_members
    assert expected_gradient(LeaveOneOutReturn(n), p, bandit(p), n) == near(0.42)
    assert expected_gradient(GroupNormalizedReturn(n), p, bandit(p), n) == near(0.42 * (n - 1) / n)


def test_the_turn_baseline_underweights_turns_that_few_members_reach():
    # Two members. Action 0 at turn 0 ends the episode with reward 0; action 1 leads to turn 1, whose action is paid.
    # True gradient: turn 0: p (1 - p) * p;  turn 1 (reached with probability p): p * p (1 - p). At p = 0.3: 0.063 each.
    # Turn 0 is always reached by both: shrinks by 1/2. Turn 1: by 1/2 if the other gets there (p), else to 0.
    p = 0.3
    episodes = [(1 - p, [0], [0.0]), (p * (1 - p), [1, 0], [0.0, 0.0]), (p * p, [1, 1], [0.0, 1.0])]
    assert expected_gradient(MonteCarloReturn(), p, episodes, 2) == near(2 * 0.063)
    assert expected_gradient(TurnGroupReturn(), p, episodes, 2) == near(0.063 / 2 + 0.063 * p / 2)
