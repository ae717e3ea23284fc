"""Supervised fine-tuning on action tokens: imitation with the same trainer."""

from functools import partial

from ludic.training.algorithms.algorithm import Preprocess, RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.losses import MaskedCausalLMCrossEntropyLoss, Reduction
from ludic.training.preprocess import (
    compose_preprocess,
    forget_temperature,
    keep_distinct,
    keep_few_per_group,
    keep_rewarded,
)


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


# Rejection-sampling fine-tuning: imitate what the policy itself did well (RAFT, arXiv 2304.06767; RFT, 2308.01825).


def make_rft(
    *,
    min_reward: float = 1.0,
    distinct: bool = False,
    max_per_group: int | None = None,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    name: str = "rft",
) -> RLAlgorithm:
    """Samples that earned `min_reward`, each sequence once if `distinct`, few of each prompt; then cross-entropy."""
    steps: list[Preprocess] = [partial(keep_rewarded, min_reward=min_reward)]
    if distinct:
        steps.append(keep_distinct)
    if max_per_group is not None:
        steps.append(partial(keep_few_per_group, max_rollouts=max_per_group))
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, reduction=reduction),
        preprocess=compose_preprocess(*steps, forget_temperature),
    )
