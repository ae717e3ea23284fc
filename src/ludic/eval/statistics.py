"""The statistics of an evaluation: means with intervals, pass@k, majority@k.

Samples of one task are correlated, so the variance is measured between tasks.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean, pvariance, stdev

from ludic.types import ConfigError

Z95 = 1.959963984540054
"""Half-width of the central 95 % of a standard normal distribution."""
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
        2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # fmt: skip
"""The same for Student's t, by degrees of freedom from 1."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def mean_estimate(task_values: Sequence[float]) -> Estimate:
    """Mean of any numbers, such as rewards, one per task; interval by Student's t.

    A single task, or several equal values, have no measurable variance: the bounds are infinite.
    """
    _require_tasks(task_values)
    mean = fmean(task_values)
    if len(set(task_values)) == 1:
        return Estimate(mean, -math.inf, math.inf)
    margin = _t95(len(task_values) - 1) * stdev(task_values) / math.sqrt(len(task_values))
    return Estimate(mean, mean - margin, mean + margin)


def share_estimate(task_shares: Sequence[float], *, num_samples: int | None = None) -> Estimate:
    """Mean of shares between 0 and 1, such as the accuracy on each task; Wilson's interval.

    With one sample per task the shares are 0 or 1 and this is the usual Wilson interval. With several (`num_samples` over all
    tasks), n is the effective number of independent samples with the observed variance between tasks, at least the number of
    tasks and at most the number of samples.
    """
    _require_tasks(task_shares)
    num_tasks, mean = len(task_shares), fmean(task_shares)
    most = max(num_tasks, num_samples or num_tasks)
    variance_of_mean = pvariance(task_shares) / num_tasks
    # Equal shares: at 0 or 1 the samples of a task may be fully correlated; in between they vary like independent samples.
    alike = num_tasks if mean in (0.0, 1.0) else most
    effective = mean * (1 - mean) / variance_of_mean if variance_of_mean > 0 else alike
    return _wilson(mean, min(max(effective, num_tasks), most))


def _wilson(share: float, num: float) -> Estimate:
    z2 = Z95 * Z95
    middle = (share + z2 / (2 * num)) / (1 + z2 / num)
    margin = Z95 / (1 + z2 / num) * math.sqrt(share * (1 - share) / num + z2 / (4 * num * num))
    # At 0 and 1 the formula gives exact bounds up to rounding.
    return Estimate(
        share, 0.0 if share == 0 else max(0.0, middle - margin), 1.0 if share == 1 else min(1.0, middle + margin)
    )


def _t95(degrees: int) -> float:
    if degrees <= len(_T95):
        return _T95[degrees - 1]
    return Z95 + 2.3724 / degrees + 2.8225 / degrees**2  # the first terms of its expansion; right to four digits here


def _require_tasks(values: Sequence[float]) -> None:
    if not values:
        raise ConfigError("There is nothing to average: the evaluation has no samples. Ask for at least one task.")


# --- k of n samples ---


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate, from n samples, of the probability that one of k is correct: 1 − C(n − c, k) / C(n, k).

    Computed as a product to avoid large binomials.
    """
    check_k(k, num_samples)
    if not 0 <= num_correct <= num_samples:
        raise ConfigError(f"{num_correct} of {num_samples} samples cannot be right.")
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_correct + 1, num_samples + 1))


def majority_at_k(answers: Sequence[Hashable | None], correct: Sequence[bool], k: int) -> float:
    """The probability that the most frequent answer among k of the n samples is correct.

    Exact, over all C(n, k) subsets. Tied answers share the vote evenly. None (an unparseable answer) has no vote; a subset
    without votes counts as wrong. If equal answers have different grades, the result is their mean.
    """
    check_k(k, len(answers))
    grades: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, is_right in zip(answers, correct, strict=True):
        if answer is not None:
            grades[answer].append(is_right)
    counts = sorted(map(len, grades.values()))
    num_unread = len(answers) - sum(counts)
    chances = {count: _chance_to_win(count, counts, num_unread, k) for count in set(counts)}
    return sum(chances[len(graded)] * fmean(graded) for graded in grades.values())


def _chance_to_win(count: int, counts: Sequence[int], num_unread: int, k: int) -> float:
    """Winning probability of an answer given `count` times, among answers given `counts` times (itself included)."""
    others = list(counts)
    others.remove(count)
    ways = sum(_winning_ways(count, votes, others, num_unread, k) for votes in range(1, min(count, k) + 1))
    return ways / math.comb(sum(counts) + num_unread, k)


def _winning_ways(count: int, votes: int, others: Sequence[int], num_unread: int, k: int) -> float:
    """Number of subsets of k in which an answer gets `votes` of its `count` and no answer gets more; a tie of t counts 1/t."""
    # ways[(taken, ties)]: subsets of the other answers with `taken` samples in which `ties` answers tie.
    ways: dict[tuple[int, int], int] = {(0, 0): 1}
    for other in others:
        longer: dict[tuple[int, int], int] = defaultdict(int)
        for (taken, ties), number in ways.items():
            for more in range(min(other, votes, k - votes - taken) + 1):
                longer[taken + more, ties + (more == votes)] += number * math.comb(other, more)
        ways = longer
    return math.comb(count, votes) * sum(
        number * math.comb(num_unread, k - votes - taken) / (ties + 1) for (taken, ties), number in ways.items()
    )


def check_k(k: int, num_samples: int) -> None:
    """Raise ConfigError for a k outside 1 to num_samples."""
    if k < 1:
        raise ConfigError(f"k={k}; pass@k and majority@k need k of at least 1.")
    if k > num_samples:
        raise ConfigError(
            f"k={k}, but there are only {num_samples} samples per task: pass@{k} cannot be estimated from them. Take at least "
            f"{k} samples per task, or a k of at most {num_samples}."
        )
