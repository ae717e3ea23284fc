"""The critic's loss: clipped squared error, as PPO has it."""

import torch
from torch import Tensor

from ludic.training.losses.base import Loss, require_positive
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class ValueLoss(Loss):
    """coeff · ½ · token mean of max((V − R)², (clip(V, V_old ± ε) − R)²)."""

    needs_values = True
    needs_old_logps = False

    def __init__(self, *, coeff: float = 0.5, clip_eps: float | None = 0.2) -> None:
        require_positive(clip_eps=clip_eps)
        self.coeff, self.clip_eps = coeff, clip_eps

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        values, returns, old = tokens.values, tokens.returns, tokens.old_values
        if values is None or returns is None or old is None:
            raise KeyError(
                "ValueLoss needs a critic's values and returns, which the Trainer computes; it cannot be used on logits alone."
            )
        error = (values - returns).square()
        if self.clip_eps is not None:
            held = old + (values - old).clamp(-self.clip_eps, self.clip_eps)
            error = torch.maximum(error, (held - returns).square())
        loss = self.coeff * tokens.reduce_tokens(error / 2, Reduction.TOKEN_MEAN)
        stats = {
            "value_mean": over_tokens(values),
            "return_mean": over_tokens(returns),
            "value_error": over_tokens(error),
        }
        return loss, stats
