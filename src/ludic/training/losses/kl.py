"""Staying close: KL to the policy that sampled, or to a frozen reference, with a gradient that is really the KL's.

The mean of ℓ − ℓ_ref estimates the KL, but its gradient has expectation zero: differentiating it is of no use. With d = ℓ −
ℓ_ref on tokens that the policy itself sampled:

- k1: the estimate is used as a reward, −d, so the gradient is sg(d) ∇ℓ: that of KL(policy ‖ reference);
- k2: d² / 2, whose gradient d ∇ℓ is the same;
- k3: e^{−d} − 1 + d, never negative, of low variance; its gradient (1 − e^{−d}) ∇ℓ is that of KL(reference ‖ policy).
"""

from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction, named
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Reduction, Stats, over_items, over_tokens
from ludic.types import ConfigError


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def kl_terms(difference: Tensor, logps: Tensor, estimator: KLEstimator) -> Tensor:
    """Terms whose gradient is the estimator's; `difference` is ℓ − ℓ_ref and carries the gradient of ℓ."""
    if estimator is KLEstimator.K1:
        return difference.detach() * logps
    if estimator is KLEstimator.K2:
        return difference.square() / 2
    return k3(difference)


def k3(difference: Tensor) -> Tensor:
    """e^{−d} − 1 + d. Only the side on which the exponential explodes is bounded: the other must keep its gradient."""
    bounded = difference.clamp(min=-MAX_LOG_RATIO)
    return torch.expm1(-bounded) + bounded


class TokenKLLoss(Loss):
    """coeff · mean over tokens (or samples) of a KL estimate."""

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K3,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        _check_anchor(to)
        self.coeff, self.to, self.estimator = coeff, to, named(KLEstimator, estimator, "estimator")
        self.needs_reference = to == "reference"
        self.needs_old_logps = to == "actor"
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        difference = tokens.logps - anchor(tokens, self.to, type(self).__name__)
        terms = kl_terms(difference, tokens.logps, self.estimator)
        loss = self.coeff * tokens.reduce_tokens(terms, self.reduction, self.constant_length)
        return loss, {"kl_mean": over_tokens(k3(difference))}


class KLLoss(Loss):
    """coeff · mean over samples of a KL estimate of the whole sample's log-ratio (its mean if length-normalised)."""

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K2,
        length_normalize: bool = False,
    ) -> None:
        _check_anchor(to)
        self.coeff, self.to, self.estimator = coeff, to, named(KLEstimator, estimator, "estimator")
        self.needs_reference = to == "reference"
        self.needs_old_logps = to == "actor"
        self.length_normalize = length_normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        combine = tokens.item_mean if self.length_normalize else tokens.item_sum
        difference_B = combine(tokens.logps - anchor(tokens, self.to, type(self).__name__))
        terms_B = kl_terms(difference_B, combine(tokens.logps), self.estimator)
        return self.coeff * tokens.reduce_items(terms_B), {"kl_mean": over_items(difference_B)}


def _check_anchor(to: str) -> None:
    if to not in ("actor", "reference"):
        raise ConfigError(f"to={to!r}; there are 'actor' (the policy that sampled) and 'reference' (a frozen model).")


def anchor(tokens: ActionTokens, to: Literal["actor", "reference"], who: str) -> Tensor:
    """The log-probs to stay close to."""
    if to == "actor":
        return tokens.require_old_logps(who)
    if tokens.ref_logps is None:
        raise KeyError(f"{who}(to='reference') needs a reference model: Trainer(reference=…).")
    return tokens.ref_logps


# A reward for being undecided.


class EntropyBonus(Loss):
    """−coeff · mean entropy over action tokens."""

    needs_entropy = True
    needs_old_logps = False

    def __init__(self, *, coeff: float = 0.01) -> None:
        self.coeff = coeff

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        assert tokens.entropy is not None, "needs_entropy says so"
        loss = -self.coeff * tokens.reduce_tokens(tokens.entropy, Reduction.TOKEN_MEAN)
        return loss, {"entropy_mean": over_tokens(tokens.entropy)}
