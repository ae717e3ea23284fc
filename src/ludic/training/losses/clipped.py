"""PPO's clipped surrogate by token: the loss of GRPO and its relatives, PPO, REINFORCE++ and SPO.

Where the ratio has left the trust region in the direction that the weight pushes, the gradient is zero; where it has left
it the other way, the gradient brings it back. The region is around the policy that sampled; decoupled (arXiv 2110.00641, AReaL)
it is around the proximal policy, the weights from before the batch's first update, and an importance weight leads to it from the
policy that sampled.
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
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count


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
