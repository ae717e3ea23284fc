"""A reward for being undecided."""

from torch import Tensor

from ludic.training.losses.base import Loss
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class EntropyBonus(Loss):
    """−coeff · mean entropy over action tokens."""

    needs_entropy = True
    needs_old_logps = False

    def __init__(self, *, coeff: float = 0.01) -> None:
        self.coeff = coeff

    def of(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        assert tokens.entropy is not None, "needs_entropy says so"
        loss = -self.coeff * tokens.reduce_tokens(tokens.entropy, Reduction.TOKEN_MEAN)
        return loss, {"entropy_mean": over_tokens(tokens.entropy)}
