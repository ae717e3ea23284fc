"""GRPO (arXiv 2402.03300): a group of samples per prompt, each weighed against its siblings, under PPO's clip."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import Reduction, TokenClippedSurrogateLoss


def make_grpo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "grpo",
) -> RLAlgorithm:
    """Return minus the group's mean, over its standard deviation; token ratios clipped to 0.8 … 1.2."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            reduction=reduction,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
