"""MaxRL worked by hand: weights of a group, and the gradient that they give on average."""

from itertools import product
from math import comb, exp

import numpy as np
import pytest

from ludic.training.algorithms import make_maxrl
from ludic.training.credit_assignment import MaximumLikelihoodReturn
from tests.golden.tokens import by_hand
from tests.unit.training.hand_made import rollout, turn_weights

near = pytest.approx


def weights_of(*totals):
    members = [rollout([total]) for total in totals]
    found = MaximumLikelihoodReturn(len(members)).compute(members)
    return [turn_weights(found, of=member)[0] for member in members]


def test_weights_are_the_distance_from_the_mean_over_the_mean():
    # mean 1/4: (1 − 1/4) / (1/4) = 3, (0 − 1/4) / (1/4) = −1; GRPO would give √3 and −1/√3
    assert weights_of(1.0, 0.0, 0.0, 0.0) == near([3.0, -1.0, -1.0, -1.0])
    # mean 3/4: 1/3 and −1
    assert weights_of(1.0, 1.0, 0.0, 1.0) == near([1 / 3, 1 / 3, -1.0, 1 / 3])
    # rewards between: mean 0.5
    assert weights_of(0.25, 0.75) == near([-0.5, 0.5])


def test_a_group_that_all_solve_or_none_solves_gets_nothing():
    assert weights_of(0.0, 0.0, 0.0) == [0.0] * 3 == weights_of(1.0, 1.0, 1.0)


def test_a_total_below_zero_counts_as_zero():
    assert weights_of(1.0, -0.1) == near([1.0, -1.0])
    assert weights_of(-0.1, -0.5) == [0.0, 0.0]


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("logit", [-2.0, 0.3])
def test_the_mean_gradient_is_that_of_the_series_of_the_log_success_rate(size, logit):
    # One parameter θ, success with p = σ(θ): ∂ log π is 1 − p for a success and −p for a failure, and p' = p (1 − p).
    # All 2^G groups by their probabilities, against d/dθ of −Σ_{k=1}^{G−1} (1 − p)^k / k = Σ (1 − p)^{k−1} p'.
    p = 1 / (1 + exp(-logit))
    expected = sum((1 - p) ** (k - 1) for k in range(1, size)) * p * (1 - p)
    found = 0.0
    for rewards in product((0.0, 1.0), repeat=size):
        wins = int(sum(rewards))
        chance = p**wins * (1 - p) ** (size - wins)
        scores = np.where(np.array(rewards) > 0, 1 - p, -p)
        found += chance * float(np.mean(np.array(weights_of(*rewards)) * scores))
    assert found == near(expected, rel=1e-12)
    assert sum(comb(size, k) * p**k * (1 - p) ** (size - k) for k in range(size + 1)) == near(1.0)


def test_value_and_gradient_of_a_group_and_of_its_halves():
    # A = 3, −1, −1, −1; ratios 1, 1, and e^0.1, e^−0.5 (below 0.8 and pushed down: clipped), 1. Sum over tokens over 4 samples.
    loss = make_maxrl(group_size=4).loss
    ratios = [1.0, 1.0, exp(0.1), exp(-0.5), 1.0]
    logps, weights = [-1.0, -2.0, -0.5, -1.5, -0.7], [3.0, 3.0, -1.0, -1.0, -1.0]
    value = -(3.0 + 3.0 - exp(0.1) - 0.8 - 1.0) / 4
    gradient = [-3.0 / 4, -3.0 / 4, exp(0.1) / 4, 0.0, 1.0 / 4]
    whole = by_hand(logps, ratios, weights, [0, 0, 1, 2, 3])
    found, _ = loss(whole)
    found.backward()
    assert found.item() == near(value) and whole.logps.grad.tolist() == near(gradient)
    first = by_hand(logps[:3], ratios[:3], weights[:3], [0, 0, 1], num_items=4, num_tokens=5)
    second = by_hand(logps[3:], ratios[3:], weights[3:], [0, 1], num_items=4, num_tokens=5)
    parts = loss(first)[0] + loss(second)[0]
    parts.backward()
    assert parts.item() == near(value)
    assert [*first.logps.grad.tolist(), *second.logps.grad.tolist()] == near(gradient)
