"""Regularisers: KL to the policy that sampled or to a frozen reference, and an entropy bonus.

The mean of ℓ − ℓ_ref estimates the KL, but its gradient has expectation zero. With d = ℓ − ℓ_ref on tokens that the policy
itself sampled:

- k1: the estimate is used as a reward, −d, so the gradient is sg(d) ∇ℓ: that of KL(policy ‖ reference);
- k2: d² / 2, whose gradient d ∇ℓ is the same;
- k3: e^{−d} − 1 + d, never negative, of low variance; its gradient (1 − e^{−d}) ∇ℓ is that of KL(reference ‖ policy).

On tokens that another policy sampled none of them is right. With `importance_weighted` every term counts by the ratio ρ, trained
over sampled, through which the gradient goes too (DeepSeek-V3.2, arXiv 2512.02556): ∇(ρ k3) = ρ d ∇ℓ, whose mean over the
sampler's tokens is the gradient of KL(policy ‖ reference). k1 and k2 get the same gradient and keep their values.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Literal

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, Needs, capped, named, require_positive
from ludic.training.losses.tokens import MAX_LOG_RATIO, TOKEN_MEAN, ActionTokens, Reduction, Stats, sum_and_count
from ludic.types import ConfigError


class KLEstimator(StrEnum):
    K1 = "k1"
    K2 = "k2"
    K3 = "k3"


def _kl_terms(difference: Tensor, logps: Tensor, estimator: KLEstimator) -> Tensor:
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


def _weighted_kl_terms(
    difference: Tensor, logps: Tensor, ratio: Tensor, estimator: KLEstimator, cap: float | None
) -> Tensor:
    """Terms with the estimator's value times the ratio, up to a cap, and with the gradient ρ d ∇ℓ."""
    weight, d = capped(ratio.detach(), cap), difference.detach()
    value = {KLEstimator.K1: d, KLEstimator.K2: d.square() / 2, KLEstimator.K3: k3(d)}[estimator]
    push = weight * d * logps
    return weight * value + (push - push.detach())


class _KLLoss(Loss):
    def __init__(
        self,
        coeff: float,
        to: Literal["actor", "reference"],
        estimator: KLEstimator | str,
        is_weighted: bool,
        weight_cap: float | None,
    ) -> None:
        if to not in ("actor", "reference"):
            raise ConfigError(
                f"to={to!r}; there are 'actor' (the policy that sampled) and 'reference' (a frozen model)."
            )
        self.coeff, self.to, self.estimator = coeff, to, named(KLEstimator, estimator, "estimator")
        require_positive(weight_cap=weight_cap)
        self.is_weighted, self.weight_cap = is_weighted, weight_cap
        self.needs = Needs(old_logps=to == "actor" or is_weighted, reference=to == "reference")

    def _difference(self, tokens: ActionTokens) -> Tensor:
        """[A] ℓ − ℓ_ref."""
        who = type(self).__name__
        if self.to == "actor":
            return tokens.logps - tokens.require_old_logps(who)
        if tokens.ref_logps is None:
            raise KeyError(f"{who}(to='reference') needs a reference model: Trainer(reference=…).")
        return tokens.logps - tokens.ref_logps


class TokenKLLoss(_KLLoss):
    """coeff · mean over tokens (or samples) of a KL estimate.

    `importance_weighted`: by each token's ratio, up to `weight_cap`. That is the gradient of each token's KL at the contexts that
    were sampled; how likely the contexts have become is in the ratio of the whole sample only (`KLLoss`).
    """

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K3,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
        importance_weighted: bool = False,
        weight_cap: float | None = None,
    ) -> None:
        super().__init__(coeff, to, estimator, importance_weighted, weight_cap)
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        difference = self._difference(tokens)
        if self.is_weighted:
            ratio = tokens.log_ratio(self).exp()
            terms = _weighted_kl_terms(difference, tokens.logps, ratio, self.estimator, self.weight_cap)
        else:
            terms = _kl_terms(difference, tokens.logps, self.estimator)
        return self.coeff * tokens.reduce_tokens(terms, self.reduction), {"kl_mean": sum_and_count(k3(difference))}


class KLLoss(_KLLoss):
    """coeff · mean over samples of a KL estimate of the whole sample's log-ratio (its mean if length-normalised).

    `importance_weighted`: by the ratio of the whole sample, up to `weight_cap`.
    """

    def __init__(
        self,
        *,
        coeff: float = 1.0,
        to: Literal["actor", "reference"] = "actor",
        estimator: KLEstimator | str = KLEstimator.K2,
        length_normalize: bool = False,
        importance_weighted: bool = False,
        weight_cap: float | None = None,
    ) -> None:
        super().__init__(coeff, to, estimator, importance_weighted, weight_cap)
        if length_normalize and importance_weighted:
            raise ConfigError(
                "KLLoss(length_normalize=True, importance_weighted=True): the mean over a sample's tokens has another gradient "
                "than its KL. Give one of them, or TokenKLLoss."
            )
        self.length_normalize = length_normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        combine = tokens.item_mean if self.length_normalize else tokens.item_sum
        difference_B = combine(self._difference(tokens))
        if self.is_weighted:
            log_ratio_B = tokens.item_sum(tokens.log_ratio(self)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            logps_B = tokens.item_sum(tokens.logps)
            terms_B = _weighted_kl_terms(difference_B, logps_B, log_ratio_B.exp(), self.estimator, self.weight_cap)
        else:
            terms_B = _kl_terms(difference_B, combine(tokens.logps), self.estimator)
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
