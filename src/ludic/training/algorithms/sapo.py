"""SAPO (arXiv 2511.20347): a soft gate in place of the clip, steeper for negative weights.

The further a ratio is from 1, the less its token moves the policy.
"""

import torch
from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses.base import Loss, common_stats, require_positive
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count


class SAPOLoss(Loss):
    """−mean Σ_t (4/τ) σ(τ (ρ_t − 1)) A_t, τ by the sign of A; the gradient's weight is 4 p (1 − p), 1 at ρ = 1."""

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


def make_sapo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "sapo",
) -> RLAlgorithm:
    """GRPO's credit; a sigmoid in place of the clip."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, group_normalize_adv, positive_only),
        loss=SAPOLoss(tau_pos=tau_pos, tau_neg=tau_neg, length_normalize=length_normalize, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
