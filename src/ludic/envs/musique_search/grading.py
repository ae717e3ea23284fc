"""Grades a short answer: exact match and token F1 against several accepted answers.

Both compare normalised texts as SQuAD's evaluation does, which MuSiQue's follows: lower case, ASCII punctuation and the
articles a, an, the removed, white space collapsed.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalized(text: str) -> str:
    plain = text.lower().translate(_NO_PUNCTUATION)
    return " ".join((_ARTICLES.sub(" ", plain).split()) or plain.split())  # an answer that is an article stays one


def exact_match(answer: str, accepted: Iterable[str]) -> float:
    """1 when the answer is one of the accepted ones, else 0."""
    return _best(lambda gold: float(normalized(answer) == normalized(gold)), accepted)


def token_f1(answer: str, accepted: Iterable[str]) -> float:
    """Harmonic mean of the shares of shared words, for the accepted answer that fits best."""
    return _best(lambda gold: _f1(normalized(answer).split(), normalized(gold).split()), accepted)


def _best(score: Callable[[str], float], accepted: Iterable[str]) -> float:
    return max(map(score, accepted), default=0.0)


def _f1(answer: list[str], gold: list[str]) -> float:
    if not answer or not gold:
        return float(answer == gold)  # without a word on one side there is nothing to share
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold))
