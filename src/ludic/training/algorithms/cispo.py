"""CISPO (MiniMax-M1, arXiv 2506.13585): REINFORCE whose importance weight is clipped and carries no gradient.

Every token keeps a gradient, also where PPO's clip would remove it.
"""

from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked, with_kl
from ludic.training.credit_assignment import GroupNormalizedReturn, HybridNormalizedReturn
from ludic.training.losses.base import Bound, Loss, clipped, common_stats, require_not_negative
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count


class CISPOLoss(Loss):
    """−mean Σ_t sg(clip(ρ_t, 1 − low, 1 + high)) A_t ℓ_t; without a lower bound by default."""

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
        credit_assigner=GroupNormalizedReturn(group_size, group_normalize_adv, positive_only),
        loss=with_kl(loss, kl_coeff),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


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
    """ScaleRL (arXiv 2510.13786): CISPO with group-centred, batch-scaled returns, without groups of equal returns."""
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
