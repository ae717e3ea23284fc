"""GMPO (arXiv 2507.20673): the geometric mean of token ratios, each clipped in log space."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import GMPOLoss


def make_gmpo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.4,
    clip_eps_high: float = 0.4,
    length_normalize: bool = True,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gmpo",
) -> RLAlgorithm:
    """GRPO's credit; log ratios within ±0.4."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=GMPOLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
