"""Policy gradients with bounded ratios: PPO's clip by token (GRPO and its relatives) or by sample, its variants, and REINFORCE.

PPO: where the ratio has left the trust region in the direction that the weight pushes, the gradient is zero; where it has left
it the other way, the gradient brings it back. The region is around the policy that sampled; decoupled (arXiv 2110.00641, AReaL)
it is around the proximal policy, the weights from before the batch's first update, and an importance weight leads to it from the
policy that sampled.

REINFORCE corrects data that another version (or another kernel) sampled by the ratio of the whole sample's probability. That
ratio is a product over tokens: a mismatch of 0.05 nats a token over 400 tokens would weigh a sample by 5 · 10⁸, so it is capped.
"""

import torch
from torch import Tensor

from ludic.training.losses.base import (
    Bound,
    Loss,
    Needs,
    capped,
    clipped,
    common_stats,
    require_not_negative,
    require_positive,
)
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, of_whole_samples, sum_and_count


def clipped_objective(ratio: Tensor, weight: Tensor, low: Bound, high: Bound) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r) A), whether the clipped term is the smaller)."""
    free, held = ratio * weight, clipped(ratio, low, high) * weight
    return torch.minimum(free, held), held < free


class TokenClippedSurrogateLoss(Loss):
    """−mean Σ_t min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t); decoupled, each term times min(π_proximal / μ, behavior_cap)."""

    def __init__(
        self,
        *,
        clip_eps_low: Bound = 0.2,
        clip_eps_high: Bound = 0.2,
        length_normalize: bool = False,
        ratio_clip: float | None = None,
        reduction: Reduction | str | None = None,
        behavior_cap: float | None = None,
    ) -> None:
        """`ratio_clip` caps the ratio (dual clipping), which bounds what a negative weight can do. `behavior_cap` decouples: it
        caps the importance weight from the policy that sampled to the proximal one."""
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip, behavior_cap=behavior_cap)
        self.behavior_cap = behavior_cap
        self.needs = Needs(proximal=behavior_cap is not None)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        weights, decoupled = tokens.weights, {}
        if self.behavior_cap is None:
            full = tokens.log_ratio(self).exp()
        else:
            log_ratio, log_weight = tokens.proximal_log_ratios(self)
            full, behavior = log_ratio.exp(), log_weight.exp()
            weights = weights * capped(behavior, self.behavior_cap)
            decoupled = {
                "behavior_weight_mean": sum_and_count(behavior),
                "behavior_capped_frac": sum_and_count((behavior > self.behavior_cap).float()),
            }
        ratio = capped(full, self.ratio_clip)
        objective, is_clipped = clipped_objective(ratio, weights, self.clip_eps_low, self.clip_eps_high)
        stats = {
            **decoupled,
            **common_stats(tokens),
            "ratio_mean": sum_and_count(full),
            "clip_frac": sum_and_count(is_clipped.float()),
            "ratio_clip_frac": sum_and_count((ratio < full).float()),
        }
        return -tokens.reduce_tokens(objective, self.reduction), stats


class ClippedSurrogateLoss(Loss):
    """GSPO: −mean min(r A, clip(r, 1 − low, 1 + high) A), r the sample's ratio; its geometric mean if length-normalised."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 3e-4,
        clip_eps_high: float = 4e-4,
        length_normalize: bool = False,
        ratio_clip: float | None = None,
        reduction: Reduction | str = "sample_mean",
    ) -> None:
        """`reduction`: sample_mean or episode_mean."""
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.length_normalize = length_normalize
        self.reduction = of_whole_samples(reduction, type(self).__name__)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        full_B = tokens.item_ratio(tokens.log_ratio(self), mean=self.length_normalize)
        ratio_B, weights_B = capped(full_B, self.ratio_clip), tokens.item_weights
        objective_B, is_clipped_B = clipped_objective(ratio_B, weights_B, self.clip_eps_low, self.clip_eps_high)
        clipped_tokens = (is_clipped_B.float() * tokens.lengths).sum().detach()
        stats = {
            **common_stats(tokens),
            "ratio_mean": sum_and_count(full_B),
            "clip_frac": (clipped_tokens, float(tokens.logps.shape[0])),
            "ratio_clip_frac": sum_and_count((ratio_B < full_B).float()),
        }
        return -tokens.reduce_items(objective_B, self.reduction), stats


class GMPOLoss(Loss):
    """GMPO: −mean g A, g = exp of the mean (or sum) of log ratios, each clipped where the weight pushes it outwards."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 0.4,
        clip_eps_high: float = 0.4,
        length_normalize: bool = True,
        ratio_clip: float | None = None,
        reduction: Reduction | str = "sample_mean",
    ) -> None:
        """`reduction`: sample_mean or episode_mean."""
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.length_normalize = length_normalize
        self.reduction = of_whole_samples(reduction, type(self).__name__)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        weights_B = tokens.item_weights
        sign = torch.sign(tokens.spread(weights_B))
        difference = tokens.log_ratio(self)
        signed = sign * difference
        held = torch.minimum(signed, sign * difference.clamp(-self.clip_eps_low, self.clip_eps_high))
        full_B = tokens.item_ratio(held * sign, mean=self.length_normalize)
        mean_B = capped(full_B, self.ratio_clip)
        stats = {
            **common_stats(tokens),
            "geom_mean_ratio_mean": sum_and_count(full_B),
            "clip_frac": sum_and_count((held < signed).float()),
            "ratio_clip_frac": sum_and_count((mean_B < full_B).float()),
        }
        return -tokens.reduce_items(mean_B * weights_B, self.reduction), stats


class CISPOLoss(Loss):
    """CISPO: −mean Σ_t sg(clip(ρ_t, 1 − low, 1 + high)) A_t ℓ_t; without a lower bound by default.

    Every token keeps a gradient, also where PPO's clip would remove it.
    """

    def __init__(
        self,
        *,
        clip_eps_low: Bound = 1e6,
        clip_eps_high: Bound = 0.2,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
    ) -> None:
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio = tokens.log_ratio(self).detach().exp()
        held = clipped(ratio, self.clip_eps_low, self.clip_eps_high)
        stats = {
            **common_stats(tokens),
            "ratio_mean": sum_and_count(ratio),
            "clip_frac": sum_and_count((held != ratio).float()),
        }
        return -tokens.reduce_tokens(held * tokens.weights * tokens.logps, self.reduction), stats


class SAPOLoss(Loss):
    """SAPO: −mean Σ_t (4/τ) σ(τ (ρ_t − 1)) A_t, τ by the sign of A; the gradient's weight is 4 p (1 − p), 1 at ρ = 1."""

    def __init__(
        self,
        *,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        length_normalize: bool = False,
        reduction: Reduction | str | None = None,
    ) -> None:
        require_positive(tau_pos=tau_pos, tau_neg=tau_neg)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio = tokens.log_ratio(self).exp()
        tau = torch.where(tokens.weights > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1))
        stats = {
            **common_stats(tokens),
            "ratio_mean": sum_and_count(ratio),
            "grad_weight_mean": sum_and_count(4 * gate * (1 - gate)),
        }
        return -tokens.reduce_tokens(4 / tau * gate * tokens.weights, self.reduction), stats


class ReinforceLoss(Loss):
    """−mean( sg(min(r, cap)) · Σ A_t ℓ_t ), r the ratio of the sample's probability (its geometric mean if normalised)."""

    def __init__(
        self,
        *,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
    ) -> None:
        require_positive(ratio_clip=ratio_clip)
        self.length_normalize, self.ratio_clip = length_normalize, ratio_clip
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio_B = tokens.item_ratio(tokens.log_ratio(self).detach(), mean=self.length_normalize)
        used_B = capped(ratio_B, self.ratio_clip)
        terms_A = -tokens.spread(used_B) * tokens.weights * tokens.logps
        stats = {
            **common_stats(tokens),
            "ratio_mean": sum_and_count(ratio_B),
            "ratio_clip_frac": sum_and_count((used_B < ratio_B).float()),
        }
        return tokens.reduce_tokens(terms_A, self.reduction), stats


class ReinforceBaselineLoss(ReinforceLoss):
    """REINFORCE with the batch's mean weight subtracted; `normalize` divides by the standard deviation too."""

    def __init__(
        self,
        *,
        normalize: bool = False,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
    ) -> None:
        super().__init__(length_normalize=length_normalize, ratio_clip=ratio_clip, reduction=reduction)
        self.normalize = normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss, stats = super().__call__(tokens.center(scaled=self.normalize))
        return loss, {**stats, "baseline": (tokens.logps.new_tensor(tokens.facts.weight_mean), 1.0)}
