"""How far the policy that sampled is from the policy that is trained: what to measure, and what to do about it.

Even at the same version the two differ a little (other kernels, other precision); when data is older they differ more. The
measurements go into every step's statistics. The corrections are factors on the weights, made from the same ratios and
without a gradient; they compose, and any loss can be wrapped in them.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, require_positive
from ludic.training.losses.tokens import ActionTokens, Stats, over_items, over_tokens
from ludic.types import ConfigError

_MAX_LOG_RATIO = 20.0
"""e^20 is beyond anything that a correction would let through, and far from overflow."""


def log_ratio(tokens: ActionTokens, who: str) -> Tensor:
    """[A] log of trained over sampled probability, bounded so that its exponential is finite."""
    return (tokens.logps - tokens.require_old_logps(who)).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def mismatch_stats(tokens: ActionTokens) -> Stats:
    """KL(sampler ‖ trainer) per token (k3), and the effective sample size of the samples' ratios."""
    if tokens.old_logps is None:
        return {}
    tokens = tokens.with_known_old_logps()
    assert tokens.old_logps is not None, "some are known"
    difference = (tokens.logps.detach() - tokens.old_logps).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    ratio = difference.exp()
    item_ratio = tokens.item_mean(difference).exp()
    count = float(tokens.logps.shape[0])
    return {
        "kl_actor_policy": over_tokens(ratio - 1 - difference),
        "logp_difference_abs": over_tokens(difference.abs()),
        # Kish: (Σ r)² / (n Σ r²); the two means are reported, the quotient is taken at the end (see `effective_share`).
        "ratio_token_mean": (ratio.sum(), count),
        "ratio_token_square_mean": (ratio.square().sum(), count),
        "ratio_geometric_mean": over_items(item_ratio),
    }


def effective_share(stats: dict[str, float]) -> dict[str, float]:
    """Adds `ess`, the share of the tokens that counts after weighting by their ratios: 1 when on-policy."""
    if "ratio_token_square_mean" not in stats:
        return stats
    square = stats.pop("ratio_token_square_mean")
    return {**stats, "ess": stats["ratio_token_mean"] ** 2 / max(square, 1e-12)}


class Correction(Protocol):
    """[A] factors between 0 and some bound, without a gradient."""

    def factors(self, tokens: ActionTokens) -> Tensor: ...


class TokenTruncation:
    """Truncated importance sampling, token by token: min(ratio, cap)."""

    def __init__(self, cap: float = 2.0) -> None:
        require_positive(cap=cap)
        self.cap = cap

    def factors(self, tokens: ActionTokens) -> Tensor:
        return log_ratio(tokens, type(self).__name__).detach().exp().clamp(max=self.cap)


class SequenceTruncation:
    """Truncated importance sampling of whole samples: min(product of ratios, cap)."""

    def __init__(self, cap: float = 2.0) -> None:
        require_positive(cap=cap)
        self.cap = cap

    def factors(self, tokens: ActionTokens) -> Tensor:
        total_B = tokens.item_sum(log_ratio(tokens, type(self).__name__).detach())
        return tokens.spread(total_B.clamp(max=_MAX_LOG_RATIO).exp().clamp(max=self.cap))


class TokenMask:
    """Tokens whose ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.5, high: float = 2.0) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def factors(self, tokens: ActionTokens) -> Tensor:
        ratio = log_ratio(tokens, type(self).__name__).detach().exp()
        return ((ratio >= self.low) & (ratio <= self.high)).to(ratio.dtype)


class SequenceMask:
    """Samples whose geometric mean ratio lies outside [low, high] do not count."""

    def __init__(self, low: float = 0.99, high: float = 1.01) -> None:
        _check_band(low, high)
        self.low, self.high = low, high

    def factors(self, tokens: ActionTokens) -> Tensor:
        mean_B = tokens.item_mean(log_ratio(tokens, type(self).__name__).detach()).exp()
        inside = (mean_B >= self.low) & (mean_B <= self.high)
        return tokens.spread(inside.to(mean_B.dtype))


def _check_band(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise ConfigError(f"low={low}, high={high}; a band of ratios needs 0 ≤ low < high.")


class CorrectedLoss(Loss):
    """A loss whose weights are multiplied by corrections."""

    def __init__(self, loss: Loss, corrections: Sequence[Correction]) -> None:
        self.loss = loss
        self.corrections = tuple(corrections)
        self.needs_entropy, self.needs_reference = loss.needs_entropy, loss.needs_reference
        self.needs_values = loss.needs_values

    def of(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        factors = torch.ones_like(tokens.weights)
        for correction in self.corrections:
            factors = factors * correction.factors(tokens)
        loss, stats = self.loss.of(tokens.corrected(factors))
        own = {"correction_mean": over_tokens(factors), "correction_zero_frac": over_tokens((factors == 0).float())}
        return loss, {**stats, **own}
