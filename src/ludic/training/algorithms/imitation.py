"""Supervised fine-tuning: imitation of recorded rollouts (SFT) or of the policy's own good ones (RFT).

What is imitated are the action tokens, or with `train_on` the messages of chosen roles.
"""

from collections.abc import Sequence
from functools import partial

from ludic.training.algorithms.algorithm import Preprocess, RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.filters import (
    checked_roles,
    compose_preprocess,
    forget_temperature,
    keep_distinct,
    keep_few_per_group,
    keep_rewarded,
    train_on_roles,
)
from ludic.training.losses import MaskedCausalLMCrossEntropyLoss, Reduction


def make_sft(
    *,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    train_on: str | Sequence[str] = (),
    name: str = "sft",
) -> RLAlgorithm:
    """Every action token counts the same, whatever temperature it was sampled at.

    With `train_on`, the texts of messages of these roles are learned instead: ("assistant", "tool") also predicts what tools
    answer.
    """
    roles = checked_roles(train_on)
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, reduction=reduction),
        preprocess=compose_preprocess(*_chosen(roles), forget_temperature),
        needs_message_spans=bool(roles),
    )


def _chosen(roles: tuple[str, ...]) -> list[Preprocess]:
    return [partial(train_on_roles, roles=roles)] if roles else []


def make_rft(
    *,
    min_reward: float = 1.0,
    distinct: bool = False,
    max_per_group: int | None = None,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    train_on: str | Sequence[str] = (),
    name: str = "rft",
) -> RLAlgorithm:
    """Rejection-sampling fine-tuning (RAFT, arXiv 2304.06767; RFT, 2308.01825): cross-entropy on rewarded samples.

    Those that earned `min_reward`, each sequence once if `distinct`, at most `max_per_group` of a prompt. `train_on` as in
    `make_sft`.
    """
    roles = checked_roles(train_on)
    steps: list[Preprocess] = [partial(keep_rewarded, min_reward=min_reward)]
    if distinct:
        steps.append(keep_distinct)
    if max_per_group is not None:
        steps.append(partial(keep_few_per_group, max_rollouts=max_per_group))
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=MaskedCausalLMCrossEntropyLoss(length_normalize=length_normalize, reduction=reduction),
        preprocess=compose_preprocess(*steps, *_chosen(roles), forget_temperature),
        needs_message_spans=bool(roles),
    )
