"""CISPO (MiniMax-M1, arXiv 2506.13585): clip the importance weight, keep every token's gradient."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked, with_kl
from ludic.training.credit_assignment import GroupNormalizedReturn, HybridNormalizedReturn
from ludic.training.losses import CISPOLoss


def make_cispo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 1e6,
    clip_eps_high: float = 0.2,
    length_normalize: bool = True,
    kl_coeff: float = 0.0,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "cispo",
) -> RLAlgorithm:
    """GRPO's credit; REINFORCE with token ratios capped at 1.2."""
    loss = CISPOLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize)
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=with_kl(loss, kl_coeff),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


# ScaleRL (arXiv 2510.13786): CISPO with weights scaled by the whole batch and groups without variance left out.


def make_scalerl(
    *,
    group_size: int = 8,
    positive_only: bool = False,
    clip_eps_low: float = 0.20,
    clip_eps_high: float = 0.28,
    length_normalize: bool = True,
    kl_coeff: float = 0.0,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "scalerl",
) -> RLAlgorithm:
    """Group-centred, batch-scaled returns; CISPO's clipped importance weights."""
    loss = CISPOLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, length_normalize=length_normalize)
    return RLAlgorithm(
        name=name,
        credit_assigner=HybridNormalizedReturn(group_size, positive_only=positive_only),
        loss=with_kl(loss, kl_coeff),
        preprocess=checked(
            drop_zero_weight=drop_zero_weight,
            drop_zero_weight_eps=drop_zero_weight_eps,
            zvp_filter_eps=zvp_filter_eps if filter_zvp else None,
        ),
    )
