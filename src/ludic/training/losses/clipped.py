"""PPO's clipped surrogate, by token (GRPO) or by whole sample (GSPO).

Where the ratio has left the trust region in the direction that the weight pushes, the gradient is zero; where it has left
it the other way, the gradient brings it back.
"""

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction, common_stats, require_not_negative, require_positive
from ludic.training.losses.corrections import log_ratio
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Reduction, Stats, over_items, over_tokens


def clipped_objective(ratio: Tensor, weight: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(min(r A, clip(r) A), where the clip is what counts)."""
    free, held = ratio * weight, ratio.clamp(1 - low, 1 + high) * weight
    return torch.minimum(free, held), held < free


class TokenClippedSurrogateLoss(Loss):
    """−mean Σ_t min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t)."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 0.2,
        clip_eps_high: float = 0.2,
        length_normalize: bool = False,
        ratio_clip: float | None = None,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        full = log_ratio(tokens, type(self).__name__).exp()
        # Dual clipping: a cap on the ratio bounds what a negative weight can do.
        ratio = full if self.ratio_clip is None else full.clamp(max=self.ratio_clip)
        objective, is_clipped = clipped_objective(ratio, tokens.weights, self.clip_eps_low, self.clip_eps_high)
        loss = -tokens.reduce_tokens(objective, self.reduction, self.constant_length)
        stats = {
            **common_stats(tokens),
            "ratio_mean": over_tokens(full),
            "clip_frac": over_tokens(is_clipped.float()),
            "ratio_clip_frac": over_tokens((ratio < full).float()),
        }
        return loss, stats


class ClippedSurrogateLoss(Loss):
    """−mean min(r A, clip(r, 1 − low, 1 + high) A), r the sample's ratio; its geometric mean if length-normalised."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 3e-4,
        clip_eps_high: float = 4e-4,
        length_normalize: bool = False,
        ratio_clip: float | None = None,
    ) -> None:
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.length_normalize = length_normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        difference = log_ratio(tokens, type(self).__name__)
        total_B = tokens.item_mean(difference) if self.length_normalize else tokens.item_sum(difference)
        full_B = total_B.clamp(max=MAX_LOG_RATIO).exp()
        ratio_B = full_B if self.ratio_clip is None else full_B.clamp(max=self.ratio_clip)
        objective_B, is_clipped_B = clipped_objective(
            ratio_B, tokens.item_weights, self.clip_eps_low, self.clip_eps_high
        )
        clipped_tokens = (is_clipped_B.float() * tokens.lengths).sum().detach()
        stats = {
            **common_stats(tokens),
            "ratio_mean": over_items(full_B),
            "clip_frac": (clipped_tokens, float(tokens.logps.shape[0])),
            "ratio_clip_frac": over_items((ratio_B < full_B).float()),
        }
        return -tokens.reduce_items(objective_B), stats
