"""How far a judge agrees with known answers: accuracy, Cohen's kappa, the confusion table."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """A judge's yes or no against the truth."""

    true_positives: int
    """Right replies that the judge accepts."""
    false_positives: int
    """Wrong replies that the judge accepts: what a policy would learn to exploit."""
    true_negatives: int
    false_negatives: int
    num_failed: int = 0
    """Cases without a verdict; they are in none of the other numbers."""

    @property
    def num(self) -> int:
        return self.true_positives + self.false_positives + self.true_negatives + self.false_negatives

    @property
    def accuracy(self) -> float:
        return (self.true_positives + self.true_negatives) / self.num

    @property
    def expected(self) -> float:
        """The accuracy of a judge with the same share of yes that does not look at the replies."""
        said, true = self.true_positives + self.false_positives, self.true_positives + self.false_negatives
        return (said * true + (self.num - said) * (self.num - true)) / self.num**2

    @property
    def kappa(self) -> float:
        """Cohen's kappa: 1 is perfect, 0 is what chance gives, also if judge or truth always say the same."""
        return 0.0 if self.expected == 1 else (self.accuracy - self.expected) / (1 - self.expected)

    @property
    def true_positive_rate(self) -> float | None:
        right = self.true_positives + self.false_negatives
        return self.true_positives / right if right else None

    @property
    def false_positive_rate(self) -> float | None:
        wrong = self.false_positives + self.true_negatives
        return self.false_positives / wrong if wrong else None


def agreement(scores: Sequence[float | None], correct: Sequence[bool], *, threshold: float = 0.5) -> Agreement:
    """A score of at least `threshold` is a yes; None is a case without a verdict.

    >>> found = agreement([0.9, 0.8, 0.2, None], [True, False, False, True])
    >>> found.num, round(found.accuracy, 3), found.num_failed
    (3, 0.667, 1)
    """
    pairs = [(s >= threshold, bool(c)) for s, c in zip(scores, correct, strict=True) if s is not None]
    if not pairs:
        raise ConfigError(f"There is no verdict to compare: {len(scores)} cases, none with a score.")
    return Agreement(
        true_positives=pairs.count((True, True)),
        false_positives=pairs.count((True, False)),
        true_negatives=pairs.count((False, False)),
        false_negatives=pairs.count((False, True)),
        num_failed=len(scores) - len(pairs),
    )


def pair_accuracy(groups: Sequence[Sequence[tuple[float, bool]]]) -> float | None:
    """Of the pairs of a right and a wrong sibling, the share in which the right one scores higher; a tie is half of one. This is
    the area under the ROC curve within groups. `groups`: (score, correct) of each sibling. None if there is no such pair."""
    wins = [
        1.0 if good > bad else 0.5 if good == bad else 0.0
        for group in groups
        for good, is_right in group
        if is_right
        for bad, other_is_right in group
        if not other_is_right
    ]
    return fmean(wins) if wins else None
