"""Distillation with all of the teacher's mind: at each token the KL over the vocabulary, and not only of the token sampled.

The teacher is a frozen model in the trainer's process (`Trainer(teacher=…)`). The gradient is exact where a weight of the
sampled token (`KLCreditModifier`) estimates it: its expectation without the noise.
"""

from torch import Tensor

from ludic.models.teacher_kl import KLDirection, VocabularyKL
from ludic.training.losses.base import Loss, chosen_reduction, named, require_not_negative
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class DistillationLoss(Loss):
    """coeff · mean( Σ KL over action tokens ), per token if length-normalised.

    Neither which token was sampled nor what credit it got plays a part, only the text before it: so it can stand beside a loss on
    rewards, and there are no ratios. A correction around it (`CorrectedLoss`) weighs the tokens.
    """

    needs_old_logps = False

    def __init__(
        self,
        *,
        direction: KLDirection | str = KLDirection.REVERSE,
        top_k: int | None = None,
        coeff: float = 1.0,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        """`top_k`: compare the teacher's k likeliest tokens one by one and all others as one; None compares all."""
        require_not_negative(coeff=coeff)
        self.teacher_kl = self.kl = VocabularyKL(named(KLDirection, direction, "direction"), top_k)
        self.coeff = coeff
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        if tokens.teacher_kl is None:
            raise KeyError(
                "DistillationLoss needs the KL to a teacher, which the Trainer computes: Trainer(teacher=…). It cannot be used on "
                "logits alone."
            )
        terms = tokens.teacher_kl if tokens.correction is None else tokens.correction * tokens.teacher_kl
        loss = self.coeff * tokens.reduce_tokens(terms, self.reduction, self.constant_length)
        name = "teacher_kl" if self.kl.direction is KLDirection.REVERSE else "teacher_kl_forward"
        return loss, {name: over_tokens(tokens.teacher_kl)}
