"""Cross-entropy on action tokens: supervised fine-tuning, weighted by credit."""

from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class MaskedCausalLMCrossEntropyLoss(Loss):
    """mean( weight · Σ NLL over action tokens ), per token if length-normalised."""

    needs_old_logps = False

    def __init__(
        self,
        *,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss = tokens.reduce_tokens(-tokens.weights * tokens.logps, self.reduction, self.constant_length)
        return loss, {"nll_mean": over_tokens(-tokens.logps)}
