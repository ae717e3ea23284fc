"""Supervised fine-tuning on action tokens: imitation of recorded rollouts (SFT) or of the policy's own good ones (RFT)."""

from functools import partial

from torch import Tensor

from ludic.training.algorithms.algorithm import Preprocess, RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.filters import (
    compose_preprocess,
    forget_temperature,
    keep_distinct,
    keep_few_per_group,
    keep_rewarded,
)
from ludic.training.losses.base import Loss, Needs
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count


class MaskedCausalLMCrossEntropyLoss(Loss):
    """mean( weight · Σ NLL over action tokens ), per token if length-normalised."""

    needs = Needs(old_logps=False)

    def __init__(self, *, length_normalize: bool = True, reduction: Reduction | str | None = None) -> None:
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss = tokens.reduce_tokens(-tokens.weights * tokens.logps, self.reduction)
        return loss, {"nll_mean": sum_and_count(-tokens.logps)}


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


def make_rft(
    *,
    min_reward: float = 1.0,
    distinct: bool = False,
    max_per_group: int | None = None,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    name: str = "rft",
) -> RLAlgorithm:
    """Rejection-sampling fine-tuning (RAFT, arXiv 2304.06767; RFT, 2308.01825): cross-entropy on rewarded samples.

    Those that earned `min_reward`, each sequence once if `distinct`, at most `max_per_group` of a prompt.
    """
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
