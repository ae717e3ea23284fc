"""What to do about samples of another policy: factors on their weights, made from ratios and without a gradient.

They compose, and any loss can be wrapped in them (`CorrectedLoss`). Three families: a truncation multiplies by the ratio, up
to a cap; a rejection does too, but drops what lies above; a mask multiplies by 1 inside a band and by 0 outside.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, as_loss, require_positive
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Stats, over_items, over_tokens
from ludic.types import ConfigError

# How far the policy that sampled is from the policy that is trained: what every step reports of it.
# Even at the same version the two differ a little (other kernels, other precision); when data is older they differ more. What
# can be done about it is in `corrections`.

NUM_PARTS = 4
"""A sample's action tokens are looked at in so many parts of equal length."""

_SQUARES = {"ratio_token": "ess", "ratio_sequence": "ess_sequence", "correction": "correction_ess"}
"""Whose mean and mean square become which effective share."""


def log_ratio(tokens: ActionTokens, who: str) -> Tensor:
    """[A] log of trained over sampled probability, bounded so that its exponential is finite."""
    return (tokens.logps - tokens.require_old_logps(who)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(tokens: ActionTokens, difference_A: Tensor) -> Tensor:
    """[B] log of the ratio of a whole sample's probability, bounded too."""
    return tokens.item_sum(difference_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_stats(tokens: ActionTokens) -> Stats:
    """KL(sampler ‖ trainer) per token, overall and along the samples, and what the effective sample sizes are made of."""
    if tokens.old_logps is None:
        return {}
    tokens = tokens.with_known_old_logps()
    assert tokens.old_logps is not None, "some are known"
    difference = (tokens.logps.detach() - tokens.old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = difference.exp()
    sequence_ratio = sequence_log_ratio(tokens, difference).exp()
    k3 = ratio - 1 - difference
    return {
        "kl_actor_policy": over_tokens(k3),
        "kl_actor_policy_k1": over_tokens(-difference),
        **_along(tokens, k3),
        "logp_difference_abs": over_tokens(difference.abs()),
        "ratio_geometric_mean": over_items(tokens.item_mean(difference).exp()),
        **moments("ratio_token", ratio),
        **moments("ratio_sequence", sequence_ratio),
    }


def _along(tokens: ActionTokens, values_A: Tensor) -> Stats:
    """The mean over the first, second, … part of every sample's action tokens."""
    part_A = part_of_sample(tokens)
    values_A = values_A.float()
    sums = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, values_A)
    counts = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, torch.ones_like(values_A))
    return {f"kl_actor_policy_q{part + 1}": (sums[part], counts[part]) for part in range(NUM_PARTS)}


def part_of_sample(tokens: ActionTokens) -> Tensor:
    """[A] which of NUM_PARTS parts of its sample's action tokens each lies in."""
    order_A = tokens.item_index.argsort(stable=True)
    lengths_B = tokens.item_sum(torch.ones_like(tokens.logps.detach())).long()
    starts_B = lengths_B.cumsum(0) - lengths_B
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(len(order_A), device=order_A.device)
    place_A = place_A - tokens.spread(starts_B)
    return place_A * NUM_PARTS // tokens.spread(lengths_B)


def moments(name: str, values: Tensor) -> Stats:
    """Mean and mean square, of which `effective_sample_size` makes an effective sample size when all are added up."""
    return {f"{name}_mean": over_items(values), f"{name}_square_mean": over_items(values.square())}


def effective_sample_size(stats: dict[str, float]) -> dict[str, float]:
    """In place of mean squares, Kish's (Σ r)² / (n Σ r²): the share of tokens or samples that counts after weighting by r.

    `ess` by the ratios of tokens, `ess_sequence` by those of whole samples, `correction_ess` by what corrections have left.
    """
    out = dict(stats)
    for name, square in stats.items():
        path, _, own = name.rpartition("/")
        base = own.removesuffix("_square_mean")
        if base == own or base not in _SQUARES:
            continue
        prefix = f"{path}/" if path else ""
        del out[name]
        out[prefix + _SQUARES[base]] = stats[f"{prefix}{base}_mean"] ** 2 / max(square, 1e-12)
    return out


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
        self.needs_values, self.teacher_kl = loss.needs_values, loss.teacher_kl
        self.needs_logits = loss.needs_logits

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        factors = torch.ones_like(tokens.weights)
        is_capped = torch.zeros_like(factors, dtype=torch.bool)
        for correction in self.corrections:
            own = correction.factors(tokens)
            factors, is_capped = factors * own, is_capped | correction.is_capped(own)
        loss, stats = self.loss(tokens.corrected(factors))
        return loss, {
            **stats,
            **moments("correction", factors),
            "correction_zero_frac": over_tokens((factors == 0).float()),
            "correction_capped_frac": over_tokens(is_capped.float()),
        }
