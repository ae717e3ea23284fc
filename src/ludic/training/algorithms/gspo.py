"""GSPO (arXiv 2507.18071): the ratio, and the clip, of whole samples (geometric mean over their tokens)."""

from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses.base import Loss, capped, common_stats, require_not_negative, require_positive
from ludic.training.losses.clipped import clipped_objective
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, of_whole_samples, sum_and_count


class ClippedSurrogateLoss(Loss):
    """−mean min(r A, clip(r, 1 − low, 1 + high) A), r the sample's ratio; its geometric mean if length-normalised."""

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


def make_gspo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 3e-4,
    clip_eps_high: float = 4e-4,
    length_normalize: bool = True,
    ratio_clip: float | None = None,
    reduction: Reduction | str = "sample_mean",
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gspo",
) -> RLAlgorithm:
    """GRPO's credit; one ratio per sample, clipped very close to 1."""
    loss = ClippedSurrogateLoss(
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
