"""Off-policy samples: how far the sampling policy is from the trained one, and corrections for it.

Even at the same version the two differ a little (other kernels, other precision); on older data they differ more. Every step
reports the difference (`mismatch_stats`). Corrections are factors on the weights, made from ratios and without a gradient. They
compose, and any loss can be wrapped in them (`CorrectedLoss`). A truncation multiplies by the ratio, up to a cap; a rejection
does too, but drops what lies above the cap; a mask multiplies by 1 inside a band and by 0 outside. Some masks look at the weight
besides, and drop only what would be pushed farther away.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, as_loss, require_not_negative, require_positive
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Stats, sum_and_count
from ludic.types import ConfigError

NUM_PARTS = 4
"""Number of equal parts of a sample's action tokens for each of which the KL is reported as well."""

_SQUARES = {"ratio_token": "ess", "ratio_sequence": "ess_sequence", "correction": "correction_ess"}
"""Statistic → the name of the effective sample size that its mean and mean square give."""


def mismatch_stats(tokens: ActionTokens) -> Stats:
    """KL(sampler ‖ trainer) per token, overall and along the samples, and what the effective sample sizes are made of."""
    if tokens.old_logps is None:
        return {}
    tokens = tokens.with_known_old_logps()
    assert tokens.old_logps is not None, "some are known"
    difference = (tokens.logps.detach() - tokens.old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = difference.exp()
    k3 = ratio - 1 - difference
    gap_B = -tokens.item_mean(difference)
    sequence_B = _sequence_ratio(tokens, difference)
    return {
        "kl_actor_policy": sum_and_count(k3),
        "kl_actor_policy_k1": sum_and_count(-difference),
        **_along(tokens, k3),
        "logp_difference_abs": sum_and_count(difference.abs()),
        "ratio_geometric_mean": sum_and_count((-gap_B).exp()),
        "log_perplexity_gap": sum_and_count(gap_B),
        "log_perplexity_gap_abs": sum_and_count(gap_B.abs()),
        "chi_square": sum_and_count((ratio - 1).square()),
        "chi_square_sequence": sum_and_count((sequence_B - 1).square()),
        **moments("ratio_token", ratio),
        **moments("ratio_sequence", sequence_B),
    }


def _along(tokens: ActionTokens, values_A: Tensor) -> Stats:
    """The mean over the first, second, … part of every sample's action tokens."""
    part_A = _part_of_sample(tokens)
    values_A = values_A.float()
    sums = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, values_A)
    counts = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, torch.ones_like(values_A))
    return {f"kl_actor_policy_q{part + 1}": (sums[part], counts[part]) for part in range(NUM_PARTS)}


def _part_of_sample(tokens: ActionTokens) -> Tensor:
    """[A] the part of its sample, of NUM_PARTS, that each action token lies in."""
    order_A = tokens.item_index.argsort(stable=True)
    lengths_B = tokens.item_sum(torch.ones_like(tokens.logps.detach())).long()
    starts_B = lengths_B.cumsum(0) - lengths_B
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(len(order_A), device=order_A.device)
    place_A = place_A - tokens.spread(starts_B)
    return place_A * NUM_PARTS // tokens.spread(lengths_B)


def moments(name: str, values: Tensor) -> Stats:
    """Mean and mean square, from whose totals `effective_sample_size` computes an effective sample size."""
    return {f"{name}_mean": sum_and_count(values), f"{name}_square_mean": sum_and_count(values.square())}


def effective_sample_size(stats: dict[str, float]) -> dict[str, float]:
    """The statistics with Kish's (Σ r)² / (n Σ r²) in place of mean squares: the share that counts after weighting by r.

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


class _Capped(Correction):
    def __init__(self, cap: float = 2.0) -> None:
        require_positive(cap=cap)
        self.cap = cap


class TokenTruncation(_Capped):
    """Truncated importance sampling, token by token: min(ratio, cap)."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return _log_ratio(tokens, self).exp().clamp(max=self.cap)

    def is_capped(self, factors_A: Tensor) -> Tensor:
        return factors_A >= self.cap


class SequenceTruncation(TokenTruncation):
    """Truncated importance sampling of whole samples: min(product of ratios, cap)."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        return tokens.spread(_sequence_ratio(tokens, _log_ratio(tokens, self)).clamp(max=self.cap))


class TokenRejection(_Capped):
    """Masked importance sampling, token by token: the ratio; 0 where it is above the cap."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        ratio = _log_ratio(tokens, self).exp()
        return torch.where(ratio <= self.cap, ratio, 0.0)


class SequenceRejection(_Capped):
    """Masked importance sampling of whole samples: the product of ratios; 0 where it is above the cap."""

    def factors(self, tokens: ActionTokens) -> Tensor:
        ratio_B = _sequence_ratio(tokens, _log_ratio(tokens, self))
        return tokens.spread(torch.where(ratio_B <= self.cap, ratio_B, 0.0))


class _Band(Correction):
    def __init__(self, low: float, high: float) -> None:
        if not 0 <= low < high:
            raise ConfigError(f"low={low}, high={high}; a band of ratios needs 0 ≤ low < high.")
        self.low, self.high = low, high

    def _is_inside(self, ratio: Tensor) -> Tensor:
        return ((ratio >= self.low) & (ratio <= self.high)).to(ratio.dtype)


class TokenMask(_Band):
    """Tokens whose ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.5, high: float = 2.0) -> None:
        super().__init__(low, high)

    def factors(self, tokens: ActionTokens) -> Tensor:
        return self._is_inside(_log_ratio(tokens, self).exp())


class SequenceMask(_Band):
    """Geometric rejection: samples whose geometric mean ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        super().__init__(low, high)

    def factors(self, tokens: ActionTokens) -> Tensor:
        return tokens.spread(self._is_inside(tokens.item_mean(_log_ratio(tokens, self)).exp()))


class NegativeSequenceMask(Correction):
    """Tokens of negative weight do not count in samples that have become unlikely: mean log(sampled / trained) above `max_gap`.

    From DeepSeek-V3.2 (arXiv 2512.02556). Such samples push the policy away from what it no longer does.
    """

    def __init__(self, max_gap: float = 0.1) -> None:
        require_not_negative(max_gap=max_gap)
        self.max_gap = max_gap

    def factors(self, tokens: ActionTokens) -> Tensor:
        gap_A = tokens.spread(-tokens.item_mean(_log_ratio(tokens, self)))
        return ((tokens.weights >= 0) | (gap_A <= self.max_gap)).to(gap_A.dtype)


class DivergenceMask(Correction):
    """A clip on how far a token's probability has moved, and not on its ratio: DPPO (arXiv 2602.04879).

    Tokens that the weight pushes farther in the direction in which they have gone do not count where sampled against trained
    probability, each as "this token or another", differ by more than `limit` in total variation, |π − μ|, or in KL(μ ‖ π). A rare
    token may change its ratio much; a likely one may not.
    """

    def __init__(self, limit: float = 0.2, kind: Literal["tv", "kl"] = "tv") -> None:
        require_positive(limit=limit)
        if kind not in ("tv", "kl"):
            raise ConfigError(f"DivergenceMask(kind={kind!r}); there are 'tv' (total variation) and 'kl'.")
        self.limit, self.kind = limit, kind

    def factors(self, tokens: ActionTokens) -> Tensor:
        log_ratio = _log_ratio(tokens, self)
        old = tokens.require_old_logps(type(self).__name__).exp()
        new = tokens.logps.detach().exp()
        is_far = (new - old).abs() > self.limit if self.kind == "tv" else _binary_kl(old, new, log_ratio) > self.limit
        goes_on = log_ratio * tokens.weights > 0
        return (~(is_far & goes_on)).to(log_ratio.dtype)


def _binary_kl(old: Tensor, new: Tensor, log_ratio: Tensor) -> Tensor:
    """KL(μ ‖ π) of "this token or another"; probabilities of 1 are taken as a little less."""
    others_old, others_new = ((1 - p).clamp(min=1e-6) for p in (old, new))
    return -old * log_ratio + others_old * (others_old / others_new).log()


CORRECTIONS: dict[str, type[Correction]] = {
    "token_truncation": TokenTruncation,
    "sequence_truncation": SequenceTruncation,
    "token_rejection": TokenRejection,
    "sequence_rejection": SequenceRejection,
    "token_mask": TokenMask,
    "sequence_mask": SequenceMask,
    "negative_sequence_mask": NegativeSequenceMask,
    "divergence_mask": DivergenceMask,
}


def make_correction(text: str) -> Correction:
    """The correction that a setting names, such as token_mask or token_mask=0.5,2."""
    name, _, given = text.partition("=")
    if name not in CORRECTIONS:
        raise ConfigError(f"There is no correction {name!r}; there are {', '.join(CORRECTIONS)}.")
    try:
        return CORRECTIONS[name](*map(float, given.split(",") if given else ()))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"The correction {text!r} cannot be made; write its numbers as token_mask=0.5,2.") from error


def _log_ratio(tokens: ActionTokens, who: Correction) -> Tensor:
    return tokens.log_ratio(who).detach()


def _sequence_ratio(tokens: ActionTokens, log_ratio_A: Tensor) -> Tensor:
    """[B] ratio of a whole sample's probability, bounded on both sides."""
    return tokens.item_sum(log_ratio_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


class CorrectedLoss(Loss):
    """A loss whose weights are multiplied by corrections."""

    def __init__(self, loss: Loss, corrections: Sequence[Correction]) -> None:
        self.loss, self.corrections = as_loss(loss), tuple(corrections)
        self.needs = replace(self.loss.needs, old_logps=True)

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
            "correction_zero_frac": sum_and_count((factors == 0).float()),
            "correction_capped_frac": sum_and_count(is_capped.float()),
        }
