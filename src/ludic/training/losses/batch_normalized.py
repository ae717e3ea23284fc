"""Weights centred and scaled by the whole batch before another loss sees them."""

from torch import Tensor

from ludic.training.losses.base import Loss, as_loss
from ludic.training.losses.tokens import ActionTokens, Stats


class BatchNormalized(Loss):
    """(A − batch mean) / batch standard deviation, over samples; then the inner loss."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss = as_loss(loss)
        self.needs_entropy, self.needs_reference = loss.needs_entropy, loss.needs_reference
        self.needs_old_logps, self.needs_values = loss.needs_old_logps, loss.needs_values
        self.distils, self.needs_logits = loss.distils, loss.needs_logits

    def of(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        return self.loss.of(tokens.centred())
