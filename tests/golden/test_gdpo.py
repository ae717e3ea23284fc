"""GDPO worked by hand: weights of a group from components, and value and gradient of its loss."""

from math import exp, sqrt

import pytest

from ludic.rewards import Rewards
from ludic.training.algorithms import make_gdpo
from ludic.training.credit_assignment import ComponentNormalizedReturn, GroupNormalizedReturn, with_turn_rewards
from tests.golden.tokens import by_hand
from tests.unit.training.hand_made import rollout, turn_weights

near = pytest.approx


class Table:
    """Gives each rollout the components that it has in a table."""

    name, by_group = "judge", False

    def __init__(self):
        self.by_id = {}

    async def score(self, rollouts):
        return [self.by_id[one.id] for one in rollouts]


async def group_of(rows, weights=None, group="g"):
    """A group whose members earn (env, judge/a, judge/b)."""
    table, members = Table(), []
    for env, a, b in rows:
        member = rollout([0.0, env], group=group)
        table.by_id[member.id] = {"judge/a": a, "judge/b": b}
        await Rewards([table], weights).score_episode([member])
        members.append(member)
    return members


def credit(rule, members):
    found = rule.compute(members)
    return [turn_weights(found, of=member)[0] for member in members]


async def test_each_component_is_divided_by_its_own_spread_and_then_weighted():
    # env 1 0 0 0: mean 1/4, std √3/4, so (3/4) / (√3/4) = √3 and −1/√3
    # judge/a 10 30 10 30: mean 20, std 10, so −1 1 −1 1; weight 0.5
    # judge/b 0.2 four times: no spread, so 0
    rows = [(1.0, 10.0, 0.2), (0.0, 30.0, 0.2), (0.0, 10.0, 0.2), (0.0, 30.0, 0.2)]
    low, high = -1 / sqrt(3), sqrt(3)
    expected = [high - 0.5, low + 0.5, low - 0.5, low + 0.5]
    members = await group_of(rows, {"judge/a": 0.5})
    assert credit(ComponentNormalizedReturn(4), members) == near(expected)
    # The same weights given to the rule instead.
    members = await group_of(rows)
    assert credit(ComponentNormalizedReturn(4, {"judge/a": 0.5}), members) == near(expected)
    assert credit(ComponentNormalizedReturn(4, {"judge": 0.5}), members) == near(expected)
    # GRPO lets the large component decide: totals 11.2, 30.2, 10.2, 30.2.
    assert credit(GroupNormalizedReturn(4, normalize_adv=True), members) == near(
        [(r - 20.45) / sqrt((9.25**2 + 9.75**2 + 10.25**2 + 9.75**2) / 4) for r in (11.2, 30.2, 10.2, 30.2)]
    )


async def test_a_negative_weight_turns_a_component_round_and_a_weight_of_zero_leaves_it_out():
    rows = [(1.0, 4.0, 1.0), (0.0, 2.0, 5.0)]
    members = await group_of(rows, {"judge/a": -0.25, "judge/b": 0.0})
    # env ±1; judge/a ±1 times −0.25
    assert credit(ComponentNormalizedReturn(2), members) == near([1 - 0.25, -1 + 0.25])


async def test_combinations_with_equal_totals_are_told_apart():
    rows = [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0), (0.0, 1.0, 0.0)]
    members = await group_of(rows, {"judge/a": 1.0})
    assert credit(GroupNormalizedReturn(4, normalize_adv=True), members) == [0.0] * 4
    members = await group_of(rows, {"judge/a": 0.5})
    low, high = -1 / sqrt(3), sqrt(3)
    assert credit(ComponentNormalizedReturn(4), members) == near([high - 0.5 * high] + [low - 0.5 * low] * 3)


async def test_one_component_is_grpo_and_rounding_is_no_difference():
    members = [rollout([r]) for r in (0.25, 0.5, 1.0)]
    assert credit(ComponentNormalizedReturn(3), members) == near(credit(GroupNormalizedReturn(3, True), members))
    equal = await group_of([(0.1 + 0.2, 1.0, 0.0), (0.3, 1.0, 0.0)])
    assert credit(ComponentNormalizedReturn(2), equal) == [0.0, 0.0]


async def test_relabelled_rewards_are_one_component():
    (member, other) = await group_of([(1.0, 4.0, 1.0), (0.0, 2.0, 5.0)], {"judge": 2.0})
    relabelled = [with_turn_rewards(member, [0.0, 3.0]), with_turn_rewards(other, [0.0, 5.0])]
    assert relabelled[0].reward_components == {"env": 3.0} == relabelled[0].scores
    assert credit(ComponentNormalizedReturn(2), relabelled) == near([-1.0, 1.0])


async def test_value_and_gradient_of_a_batch_of_two_groups():
    # Groups of 2: env ±1 each; judge/a ±1 in the first group (weight 0.5), equal in the second.
    # A_sum = 1.5, −1.5, 1, −1: mean 0, std √((2·2.25 + 2) / 4) = √1.625. Then GRPO's loss on A_sum / √1.625.
    first = await group_of([(1.0, 3.0, 0.0), (0.0, 1.0, 0.0)], {"judge/a": 0.5})
    second = await group_of([(0.0, 2.0, 0.0), (5.0, 2.0, 0.0)], {"judge/a": 0.5}, group="h")
    algorithm = make_gdpo(group_size=2)
    sums = credit(algorithm.credit_assigner, [*first, *second])
    assert sums == near([1.5, -1.5, -1.0, 1.0])
    std = sqrt(1.625)
    # One token each but the first sample, which has two. Ratios 1, e^0.5 (above 1.2 and pushed up: clipped), 1, e^0.1, 1.
    ratios, weights = [1.0, exp(0.5), 1.0, exp(0.1), 1.0], [sums[0], sums[0], *sums[1:]]
    logps = [-1.0, -2.0, -0.5, -1.5, -0.7]
    tokens = by_hand(logps, ratios, weights, [0, 0, 1, 2, 3], weight_mean=0.0, weight_std=std)
    value, _ = algorithm.loss(tokens)
    value.backward()
    assert value.item() == near(-(1.5 + 1.5 * 1.2 - 1.5 - exp(0.1) + 1.0) / std / 4, rel=1e-7)
    gradient = [-1.5, 0.0, 1.5, exp(0.1), -1.0]
    assert tokens.logps.grad.tolist() == near([g / std / 4 for g in gradient], rel=1e-7)
    plain = make_gdpo(group_size=2, normalize_batch=False).loss(tokens)[0].item()
    assert plain == near(-(1.5 + 1.5 * 1.2 - 1.5 - exp(0.1) + 1.0) / 4)
