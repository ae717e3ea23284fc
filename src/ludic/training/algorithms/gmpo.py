"""GMPO (arXiv 2507.20673): the geometric mean of token ratios, each clipped in log space, so that no outlier dominates."""

import torch
from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses.base import Loss, capped, common_stats, require_not_negative, require_positive
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, of_whole_samples, sum_and_count


class GMPOLoss(Loss):
    """−mean g A, g = exp of the mean (or sum) of log ratios, each clipped where the weight pushes it outwards."""

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


def make_gmpo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.4,
    clip_eps_high: float = 0.4,
    length_normalize: bool = True,
    ratio_clip: float | None = None,
    reduction: Reduction | str = "sample_mean",
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gmpo",
) -> RLAlgorithm:
    """GRPO's credit; log ratios within ±0.4."""
    loss = GMPOLoss(
        clip_eps_low=clip_eps_low,
        clip_eps_high=clip_eps_high,
        length_normalize=length_normalize,
        ratio_clip=ratio_clip,
        reduction=reduction,
    )
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, group_normalize_adv, positive_only),
        loss=loss,
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
