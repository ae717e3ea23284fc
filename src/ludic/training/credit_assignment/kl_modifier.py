"""Credit modifiers: what is added to the weights of samples that have been credited already, token by token.

A modifier takes a batch and returns one, as every preprocess hook does; an algorithm runs it before a batch becomes tensors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ludic.training.credit_assignment.turns_and_groups import returns_to_go
from ludic.types import ConfigError, SAWBatch, SAWItem


class CreditModifier(Protocol):
    """Changes weights and nothing else."""

    def __call__(self, batch: SAWBatch) -> SAWBatch: ...


@dataclass(frozen=True, slots=True)
class KLCreditModifier:
    """Adds coeff · (log π_teacher − log π_old) of each action token to its weight.

    The difference is a number that was fixed when the token was sampled, and no gradient flows into it. It has to be one:
    the gradient of log π − log π_teacher itself, over tokens that π sampled, has expectation zero.
    """

    coeff: float = 1.0
    discount: float = 0.0
    """How much a token answers for the tokens after it in its sample: 0 for none (the KL of each token, given what came
    before it), 1 for all (the KL of whole replies)."""
    name: str = "kl"
    """The batch's mean of log π_old − log π_teacher is logged as teacher_<name>."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.coeff) and self.coeff >= 0):
            raise ConfigError(f"KLCreditModifier.coeff={self.coeff}; it must be 0 or more.")
        if not 0 <= self.discount <= 1:
            raise ConfigError(f"KLCreditModifier.discount={self.discount}; it lies between 0 and 1.")

    def __call__(self, batch: SAWBatch) -> SAWBatch:
        _check_teachers(batch.items)
        gaps = [_gap(item) for item in batch.items]
        items = [self._modified(item, gap) for item, gap in zip(batch.items, gaps, strict=True)]
        return SAWBatch(items=items, meta={**batch.meta, f"teacher_{self.name}": _mean_kl(gaps)})

    def _modified(self, item: SAWItem, gap: npt.NDArray[np.float64]) -> SAWItem:
        weights = (item.token_weights + self.coeff * returns_to_go(gap, self.discount)).astype(np.float32)
        attachments = replace(item.attachments, token_weights=weights)
        return replace(item, weight=float(weights.mean()) if len(weights) else item.weight, attachments=attachments)


def _check_teachers(items: Sequence[SAWItem]) -> None:
    missing = [i for i, item in enumerate(items) if item.attachments.teacher_logps is None]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(items)} samples (the first is {missing[0]}) have no teacher log-probs. Wrap the batch source "
            "in ludic.batch_gen.TeacherAnnotatedBatchSource, which asks a teacher for them."
        )


def _gap(item: SAWItem) -> npt.NDArray[np.float64]:
    """How much likelier the teacher finds each token than the policy that sampled it did."""
    teacher, old = item.attachments.teacher_logps, item.actor_logps
    assert teacher is not None, "checked for the whole batch"
    if old is None:
        raise ConfigError(
            f"A sample (rollout {item.meta.get('rollout_id')}) has no actor log-probs to compare the teacher's with. Ask the "
            "sampler for them: InferenceSpec(return_=ReturnSpec.for_rl())."
        )
    return teacher.astype(np.float64) - old


def _mean_kl(gaps: Sequence[npt.NDArray[np.float64]]) -> float:
    """Over tokens: an estimate of the reverse KL per token."""
    together = np.concatenate(gaps) if gaps else np.zeros(0)
    return -float(together.mean()) if len(together) else 0.0
