"""GMPO: the geometric mean of clipped token ratios, so that a single outlier cannot carry a sample away."""

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, common_stats, require_not_negative, require_positive
from ludic.training.losses.corrections import log_ratio
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Stats, over_items, over_tokens


class GMPOLoss(Loss):
    """−mean g A, g = exp of the mean (or sum) of log ratios, each clipped where the weight pushes it outwards."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 0.4,
        clip_eps_high: float = 0.4,
        length_normalize: bool = True,
        ratio_clip: float | None = None,
    ) -> None:
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        require_positive(ratio_clip=ratio_clip)
        self.clip_eps_low, self.clip_eps_high, self.ratio_clip = clip_eps_low, clip_eps_high, ratio_clip
        self.length_normalize = length_normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        weights_B = tokens.item_weights
        sign = torch.sign(tokens.spread(weights_B))
        difference = log_ratio(tokens, type(self).__name__)
        signed = sign * difference
        held = torch.minimum(signed, sign * difference.clamp(-self.clip_eps_low, self.clip_eps_high))
        total_B = tokens.item_mean(held * sign) if self.length_normalize else tokens.item_sum(held * sign)
        full_B = total_B.clamp(max=MAX_LOG_RATIO).exp()
        mean_B = full_B if self.ratio_clip is None else full_B.clamp(max=self.ratio_clip)
        stats = {
            **common_stats(tokens),
            "geom_mean_ratio_mean": over_items(full_B),
            "clip_frac": over_tokens((held < signed).float()),
            "ratio_clip_frac": over_items((mean_B < full_B).float()),
        }
        return -tokens.reduce_items(mean_B * weights_B), stats
