"""`RLAlgorithm`: a credit rule and a loss under one name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor

from ludic.models.head import whole_logits
from ludic.training.credit_assignment import EpisodeCredit
from ludic.training.critic.critic import CriticKind
from ludic.training.critic.gae import Advantages
from ludic.training.filters import (
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)
from ludic.training.losses import CompositeLoss, Loss, LossTerm, TokenKLLoss, as_loss
from ludic.types import CreditAssigner, SAWBatch

Preprocess: TypeAlias = Callable[[SAWBatch], SAWBatch]


@dataclass(frozen=True, kw_only=True, slots=True)
class RLAlgorithm:
    """What to learn from a batch of rollouts."""

    name: str
    credit_assigner: CreditAssigner
    """From rollouts to one weight per step."""
    loss: Loss
    """From action tokens and their weights to a scalar. An object with `compute(logits, batch)`, or a callable, is wrapped in a
    `ForeignLoss`."""
    advantages: Advantages | None = None
    """For algorithms with a critic: how its values turn rewards into weights, just before the update."""
    critic: CriticKind = CriticKind.SHARED
    """For algorithms with a critic: what it looks at."""
    preprocess: Preprocess | None = None
    """Checks and filters on the samples before they become tensors."""
    needs_teacher_logps: bool = False
    """Whether samples must come with a teacher's log-probs."""
    needs_message_spans: bool = False
    """Whether samples must say which message each token came from (`InferenceSpec.message_spans`)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", as_loss(self.loss))

    def compute_loss(self, model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one padded batch with a single forward pass; the trainer packs instead."""
        return self.loss.compute(whole_logits(model, batch["input_ids"], batch["attention_mask"]), batch)


def with_episode_credit(algorithm: RLAlgorithm) -> RLAlgorithm:
    """The algorithm with one credit per episode (`EpisodeCredit`), for agents whose sessions have several threads."""
    rule = algorithm.credit_assigner
    return algorithm if isinstance(rule, EpisodeCredit) else replace(algorithm, credit_assigner=EpisodeCredit(rule))


def checked(
    *, drop_zero_weight: bool = False, drop_zero_weight_eps: float = 1e-4, zvp_filter_eps: float | None = None
) -> Preprocess:
    """The preprocessing of most presets: drop zero-variance groups and zero weights, then require the sampler's log-probs."""
    steps: list[Preprocess] = []
    if zvp_filter_eps is not None:
        steps.append(partial(filter_zero_variance_groups, eps=zvp_filter_eps))
    if drop_zero_weight:
        steps.append(partial(drop_zero_weight_samples, eps=drop_zero_weight_eps))
    return compose_preprocess(*steps, validate_actor_logps)


def with_kl(loss: Loss, kl_coeff: float) -> Loss:
    """The loss, and a KL term to the policy that sampled, if asked for."""
    kl = TokenKLLoss(coeff=kl_coeff)
    return CompositeLoss([LossTerm(name="policy", loss=loss), LossTerm(name="kl", loss=kl)]) if kl_coeff else loss
