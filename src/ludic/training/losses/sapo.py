"""SAPO: a soft gate in place of the clip. The further a ratio is from 1, the less its token moves the policy."""

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction, common_stats, require_positive
from ludic.training.losses.corrections import log_ratio
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class SAPOLoss(Loss):
    """−mean Σ_t (4/τ) σ(τ (ρ_t − 1)) A_t, τ by the sign of A; the gradient's weight is 4 p (1 − p), 1 at ρ = 1."""

    def __init__(
        self,
        *,
        tau_pos: float = 1.0,
        tau_neg: float = 1.05,
        length_normalize: bool = False,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        require_positive(tau_pos=tau_pos, tau_neg=tau_neg)
        self.tau_pos, self.tau_neg = tau_pos, tau_neg
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio = log_ratio(tokens, type(self).__name__).exp()
        tau = torch.where(tokens.weights > 0, self.tau_pos, self.tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1))
        loss = -tokens.reduce_tokens(4 / tau * gate * tokens.weights, self.reduction, self.constant_length)
        stats = {
            **common_stats(tokens),
            "ratio_mean": over_tokens(ratio),
            "grad_weight_mean": over_tokens(4 * gate * (1 - gate)),
        }
        return loss, stats
