"""Golden numbers, each worked by hand or enumerated."""

import itertools
import math
import random
from statistics import fmean

import pytest

from ludic.eval import majority_at_k, mean_estimate, pass_at_k, share_estimate
from ludic.eval.statistics import Estimate
from ludic.types import ConfigError


def bounds(estimate: Estimate) -> tuple[float, float]:
    return estimate.low, estimate.high


# --- intervals ---


def test_one_sample_per_task_gives_wilsons_interval():
    # 8 of 10: centre (0.8 + 1.9208/10) / 1.38415 = 0.71674, margin 1.95996/1.38415 * sqrt(0.016 + 0.0096036) = 0.22658.
    estimate = share_estimate([1.0] * 8 + [0.0] * 2)
    assert estimate.mean == 0.8
    assert bounds(estimate) == pytest.approx((0.49016, 0.94332), abs=1e-4)


def test_a_perfect_score_has_a_lower_bound_below_one():
    # 20 of 20: the lower end is n / (n + z²) = 20 / 23.8415.
    assert bounds(share_estimate([1.0] * 20)) == (pytest.approx(20 / (20 + 1.959964**2)), 1.0)
    assert bounds(share_estimate([0.0] * 20)) == (0.0, pytest.approx(1.959964**2 / (20 + 1.959964**2)))


def test_repeated_equal_samples_do_not_narrow_the_interval():
    once = share_estimate([1.0] * 5 + [0.0] * 5)
    repeated = share_estimate([1.0] * 5 + [0.0] * 5, num_samples=1000)
    assert bounds(repeated) == pytest.approx(bounds(once))


def test_independent_samples_within_tasks_narrow_the_interval():
    # Shares of 0.4 and 0.6 vary by 0.01 where single samples vary by 0.25: 10 tasks are worth 250 samples, if there were so many.
    tasks = [0.4, 0.6] * 5
    assert bounds(share_estimate(tasks, num_samples=1000)) == pytest.approx(bounds(share_estimate([0.0, 1.0] * 125)))
    assert bounds(share_estimate(tasks, num_samples=50)) == pytest.approx(bounds(share_estimate([0.0, 1.0] * 25)))


def test_a_mean_of_rewards_has_students_interval():
    # Values 1, 2, 3: mean 2, standard deviation 1, t(2) = 4.303.
    estimate = mean_estimate([1.0, 2.0, 3.0])
    assert estimate.mean == 2.0
    assert bounds(estimate) == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))


def test_the_t_table_and_its_expansion_agree_where_they_meet():
    def half_width(num: int) -> float:  # of values with standard error 1
        scale = math.sqrt(num * (num - 1) / num) if num % 2 == 0 else 0
        return mean_estimate([scale, -scale] * (num // 2)).high

    # t(31) = 2.0395, t(39) = 2.0227, t(99) = 1.9842
    assert [half_width(num) for num in (32, 40, 100)] == pytest.approx([2.0395, 2.0227, 1.9842], abs=2e-4)


@pytest.mark.parametrize("rewards", [[0.5], [0.5, 0.5, 0.5]])
def test_equal_rewards_have_infinite_bounds(rewards):
    assert mean_estimate(rewards) == Estimate(0.5, -math.inf, math.inf)


def test_the_interval_covers_the_truth_at_its_nominal_rate():
    # Exactly, by summing the binomial: 40 tasks of one sample each, true share 0.3.
    num, truth = 40, 0.3
    covered = 0.0
    for right in range(num + 1):
        estimate = share_estimate([1.0] * right + [0.0] * (num - right))
        if estimate.low <= truth <= estimate.high:
            covered += math.comb(num, right) * truth**right * (1 - truth) ** (num - right)
    assert 0.93 < covered < 0.98


def test_the_interval_covers_the_truth_with_several_samples_per_task():
    rng, truth, num = random.Random(0), 0.5, 300
    covered = naive = 0
    for _ in range(num):
        chances = [rng.betavariate(0.5, 0.5) for _ in range(50)]  # tasks are easy or hard, seldom in between
        right = [sum(rng.random() < chance for _ in range(8)) for chance in chances]
        estimate = share_estimate([count / 8 for count in right], num_samples=400)
        covered += estimate.low <= truth <= estimate.high
        counted = share_estimate([1.0] * sum(right) + [0.0] * (400 - sum(right)))
        naive += counted.low <= truth <= counted.high
    assert 0.91 < covered / num < 0.98
    assert naive / num < 0.75


@pytest.mark.parametrize("estimate", [mean_estimate, share_estimate])
def test_an_empty_evaluation_is_refused(estimate):
    with pytest.raises(ConfigError, match="no samples"):
        estimate([])


# --- pass@k ---


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),  # 3 of the 6 pairs hold the right one
        (5, 2, 3, 0.9),  # 1 of the 10 triples is all wrong
        (10, 0, 5, 0.0),
        (10, 10, 1, 1.0),
        (10, 6, 5, 1.0),  # only 4 wrong: any 5 hold a right one
        (3, 1, 3, 1.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_equals_the_enumeration():
    for n, c in itertools.product(range(1, 8), range(8)):
        if c <= n:
            graded = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                assert pass_at_k(n, c, k) == pytest.approx(
                    fmean(any(chosen) for chosen in itertools.combinations(graded, k))
                )


def test_pass_at_k_stays_exact_where_binomials_are_huge():
    # One right of 100,000, k half of them: a plain 1/2, from binomials of thirty thousand digits.
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-12)


@pytest.mark.parametrize("of", [lambda: pass_at_k(4, 1, 8), lambda: majority_at_k(["a"] * 4, [True] * 4, 8)])
def test_a_k_beyond_the_samples_is_refused_with_advice(of):
    with pytest.raises(ConfigError, match="k=8.*only 4 samples.*at least 8"):
        of()


def test_a_k_below_one_is_refused():
    with pytest.raises(ConfigError, match="k=0"):
        pass_at_k(4, 1, 0)


# --- majority@k ---


def test_ties_are_split_evenly():
    assert majority_at_k(["7", "7", "8", "8"], [True, True, False, False], 4) == 0.5
    assert majority_at_k(["7", "8", "9"], [True, False, False], 3) == pytest.approx(1 / 3)


def test_unreadable_answers_never_win():
    assert majority_at_k(["7", None, None, None], [True, False, False, False], 4) == 1.0
    assert majority_at_k([None, None], [False, False], 2) == 0.0
    # k=1: only one of the four draws can be read, and it is right.
    assert majority_at_k(["7", None, None, None], [True, False, False, False], 1) == 0.25


def test_majority_of_three_by_hand():
    # a a b c, a right. Triples: aab, aac -> a; abc twice -> a with chance 1/3. (1 + 1 + 1/3 + 1/3) / 4.
    assert majority_at_k(["a", "a", "b", "c"], [True, True, False, False], 3) == pytest.approx((2 + 2 / 3) / 4)


def test_majority_at_k_equals_the_enumeration():
    answers = ["a", "a", "b", "c", None, "b", "b", None, "a"]
    right = {"a": True, "b": False, "c": True, None: False}

    def vote(chosen: tuple[str | None, ...]) -> float:
        read = [answer for answer in chosen if answer is not None]
        if not read:
            return 0.0
        most = max(map(read.count, read))
        winners = {answer for answer in read if read.count(answer) == most}
        return fmean(right[winner] for winner in winners)

    for k in range(1, len(answers) + 1):
        counted = fmean(vote(chosen) for chosen in itertools.combinations(answers, k))
        assert majority_at_k(answers, [right[a] for a in answers], k) == pytest.approx(counted)


def test_equal_answers_with_different_grades_count_their_mean():
    assert majority_at_k(["a1", "a1", "b2"], [True, False, False], 3) == 0.5


def test_winning_chances_of_many_samples_sum_to_one():
    answers = [str(i % 20) for i in range(48)]
    chances = [majority_at_k(answers, [a == str(i) for a in answers], 24) for i in range(20)]
    assert sum(chances) == pytest.approx(1.0)
    assert chances[0] == chances[7] > chances[8] == chances[19], "the first eight were given once more often"
