"""Supervised fine-tuning on action tokens: imitation with the same trainer."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.losses import MaskedCausalLMCrossEntropyLoss, Reduction
from ludic.training.preprocess import forget_temperature


def make_sft(
    *, length_normalize: bool = False, reduction: Reduction | str | None = None, name: str = "sft"
) -> RLAlgorithm:
    """Every action token counts the same, whatever temperature it was sampled at."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, reduction=reduction),
        preprocess=forget_temperature,
    )
