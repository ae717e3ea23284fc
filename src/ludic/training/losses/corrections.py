"""What to do about samples of another policy: factors on their weights, made from ratios and without a gradient.

They compose, and any loss can be wrapped in them (`CorrectedLoss`). Three families: a truncation multiplies by the ratio, up
to a cap; a rejection does too, but drops what lies above; a mask multiplies by 1 inside a band and by 0 outside.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, as_loss, require_positive
from ludic.training.losses.mismatch import log_ratio, moments, sequence_log_ratio
from ludic.training.losses.tokens import ActionTokens, Stats, over_tokens
from ludic.types import ConfigError


class Correction(ABC):
    """One factor per token."""

    @abstractmethod
    def factors(self, tokens: ActionTokens) -> Tensor:
        """[A] between 0 and some bound, without a gradient."""

    def is_capped(self, factors_A: Tensor) -> Tensor:
        """[A] whether a factor is smaller than the ratio that it stands for; only a truncation does that."""
        return torch.zeros_like(factors_A, dtype=torch.bool)


class _Truncation(Correction):
    def __init__(self, cap: float = 2.0) -> None:
        require_positive(cap=cap)
        self.cap = cap

    def is_capped(self, factors_A: Tensor) -> Tensor:
        return factors_A >= self.cap


class _Rejection(Correction):
    def __init__(self, cap: float = 2.0) -> None:
        require_positive(cap=cap)
        self.cap = cap

    def _kept(self, ratio: Tensor) -> Tensor:
        return torch.where(ratio <= self.cap, ratio, 0.0)


class TokenTruncation(_Truncation):
    """Truncated importance sampling, token by token: min(ratio, cap)."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return _token_ratio(tokens, self).clamp(max=self.cap)


class SequenceTruncation(_Truncation):
    """Truncated importance sampling of whole samples: min(product of ratios, cap)."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return tokens.spread(_sequence_ratio(tokens, self).clamp(max=self.cap))


class TokenRejection(_Rejection):
    """Masked importance sampling, token by token: the ratio; 0 where it is above the cap."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return self._kept(_token_ratio(tokens, self))


class SequenceRejection(_Rejection):
    """Masked importance sampling of whole samples: the product of ratios; 0 where it is above the cap."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return tokens.spread(self._kept(_sequence_ratio(tokens, self)))


class TokenMask(Correction):
    """Tokens whose ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.5, high: float = 2.0) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def factors(self, tokens: ActionTokens) -> Tensor:
        return _inside(_token_ratio(tokens, self), self.low, self.high)


class SequenceMask(Correction):
    """Geometric rejection: samples whose geometric mean ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def factors(self, tokens: ActionTokens) -> Tensor:
        mean_B = tokens.item_mean(log_ratio(tokens, type(self).__name__).detach()).exp()
        return tokens.spread(_inside(mean_B, self.low, self.high))


def _token_ratio(tokens: ActionTokens, who: Correction) -> Tensor:
    return log_ratio(tokens, type(who).__name__).detach().exp()


def _sequence_ratio(tokens: ActionTokens, who: Correction) -> Tensor:
    return sequence_log_ratio(tokens, log_ratio(tokens, type(who).__name__).detach()).exp()


def _inside(ratio: Tensor, low: float, high: float) -> Tensor:
    return ((ratio >= low) & (ratio <= high)).to(ratio.dtype)


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"low={low}, high={high}; a band of ratios needs 0 ≤ low < high.")


class CorrectedLoss(Loss):
    """A loss whose weights are multiplied by corrections."""

    def __init__(self, loss: Loss, corrections: Sequence[Correction]) -> None:
        self.loss = loss = as_loss(loss)
        self.corrections = tuple(corrections)
        self.needs_entropy, self.needs_reference = loss.needs_entropy, loss.needs_reference
        self.needs_values, self.distils = loss.needs_values, loss.distils
        self.needs_logits = loss.needs_logits

    def of(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        factors = torch.ones_like(tokens.weights)
        is_capped = torch.zeros_like(factors, dtype=torch.bool)
        for correction in self.corrections:
            own = correction.factors(tokens)
            factors, is_capped = factors * own, is_capped | correction.is_capped(own)
        loss, stats = self.loss.of(tokens.corrected(factors))
        return loss, {
            **stats,
            **moments("correction", factors),
            "correction_zero_frac": over_tokens((factors == 0).float()),
            "correction_capped_frac": over_tokens(is_capped.float()),
        }
