"""Texts that wait to be scored, and how many of them go through the model together."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """A text whose end is to be scored, and who waits for it."""

    tokens: np.ndarray[Any, Any]
    num_prompt: int
    """Tokens at the start whose own log-probs nobody asked for."""
    temperature: float
    answer: Future[np.ndarray[Any, Any]] = field(default_factory=Future)

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_prompt

    def predictors(self, start: int) -> range:
        """Where the logits are that predict the scored tokens, if the text begins at flat position `start`."""
        return range(start + self.num_prompt - 1, start + len(self.tokens) - 1)


def take_batch(waiting: list[Scoring], *, max_tokens: int, max_logits: int) -> list[Scoring]:
    """Take out the first, and whoever has its temperature and still fits; one alone always fits."""
    batch: list[Scoring] = []
    num_tokens = num_logits = 0
    for scoring in list(waiting):
        if batch and scoring.temperature != batch[0].temperature:
            continue
        num_tokens, num_logits = num_tokens + len(scoring.tokens), num_logits + scoring.num_scored
        if batch and (num_tokens > max_tokens or num_logits > max_logits):
            break
        batch.append(scoring)
        waiting.remove(scoring)
    return batch
