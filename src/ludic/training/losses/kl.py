"""Regularisers: KL to the policy that sampled or to a frozen reference, and an entropy bonus.

The mean of ℓ − ℓ_ref estimates the KL, but its gradient has expectation zero. With d = ℓ − ℓ_ref on tokens that the policy
itself sampled:

- k1: the estimate is used as a reward, −d, so the gradient is sg(d) ∇ℓ: that of KL(policy ‖ reference);
- k2: d² / 2, whose gradient d ∇ℓ is the same;
- k3: e^{−d} − 1 + d, never negative, of low variance; its gradient (1 − e^{−d}) ∇ℓ is that of KL(reference ‖ policy).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, Needs, named
from ludic.training.losses.tokens import MAX_LOG_RATIO, TOKEN_MEAN, ActionTokens, Reduction, Stats, sum_and_count
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


class _KLLoss(Loss):
    def __init__(self, coeff: float, to: Literal["actor", "reference"], estimator: KLEstimator | str) -> None:
        if to not in ("actor", "reference"):
            raise ConfigError(
                f"to={to!r}; there are 'actor' (the policy that sampled) and 'reference' (a frozen model)."
            )
        self.coeff, self.to, self.estimator = coeff, to, named(KLEstimator, estimator, "estimator")
        self.needs = Needs(old_logps=to == "actor", reference=to == "reference")

    def _difference(self, tokens: ActionTokens) -> Tensor:
        """[A] ℓ − ℓ_ref."""
        who = type(self).__name__
        if self.to == "actor":
            return tokens.logps - tokens.require_old_logps(who)
        if tokens.ref_logps is None:
            raise KeyError(f"{who}(to='reference') needs a reference model: Trainer(reference=…).")
        return tokens.logps - tokens.ref_logps


class TokenKLLoss(_KLLoss):
    """coeff · mean over tokens (or samples) of a KL estimate."""

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K3,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
    ) -> None:
        super().__init__(coeff, to, estimator)
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        difference = self._difference(tokens)
        terms = kl_terms(difference, tokens.logps, self.estimator)
        return self.coeff * tokens.reduce_tokens(terms, self.reduction), {"kl_mean": sum_and_count(k3(difference))}


class KLLoss(_KLLoss):
    """coeff · mean over samples of a KL estimate of the whole sample's log-ratio (its mean if length-normalised)."""

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K2,
        length_normalize: bool = False,
    ) -> None:
        super().__init__(coeff, to, estimator)
        self.length_normalize = length_normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        combine = tokens.item_mean if self.length_normalize else tokens.item_sum
        difference_B = combine(self._difference(tokens))
        terms_B = kl_terms(difference_B, combine(tokens.logps), self.estimator)
        return self.coeff * tokens.reduce_items(terms_B), {"kl_mean": sum_and_count(difference_B)}


class Regularized(Loss):
    """The loss plus regularisers, on the same tokens. Its statistics keep their names; those of a regulariser get its name."""

    def __init__(self, loss: Loss, regularisers: Mapping[str, Loss]) -> None:
        self.loss, self.regularisers = loss, dict(regularisers)
        self.needs = Needs.of_parts([loss, *regularisers.values()])

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        total, stats = self.loss(tokens)
        stats = dict(stats)
        for name, regulariser in self.regularisers.items():
            loss, own = regulariser(tokens)
            total = total + loss
            stats |= {f"{name}/{key}": value for key, value in own.items()}
        return total, stats


class EntropyBonus(Loss):
    """−coeff · mean entropy over action tokens, which rewards exploration."""

    needs = Needs(entropy=True, old_logps=False)

    def __init__(self, *, coeff: float = 0.01) -> None:
        self.coeff = coeff

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        assert tokens.entropy is not None, "`needs` asks for it"
        loss = -self.coeff * tokens.reduce_tokens(tokens.entropy, TOKEN_MEAN)
        return loss, {"entropy_mean": sum_and_count(tokens.entropy)}
