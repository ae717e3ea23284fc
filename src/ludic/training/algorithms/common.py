"""What the presets share: which checks and filters run before a batch is used."""

from functools import partial

from ludic.training.algorithms.algorithm import Preprocess
from ludic.training.losses import CompositeLoss, Loss, LossTerm, TokenKLLoss
from ludic.training.preprocess import (
    compose_preprocess,
    drop_zero_weight_samples,
    filter_zero_variance_groups,
    validate_actor_logps,
)


def checked(
    *, drop_zero_weight: bool = False, drop_zero_weight_eps: float = 1e-4, zvp_filter_eps: float | None = None
) -> Preprocess:
    """Zero-variance groups out, zero weights out, then the log-probs that the loss needs must be there."""
    steps: list[Preprocess] = []
    if zvp_filter_eps is not None:
        steps.append(partial(filter_zero_variance_groups, eps=zvp_filter_eps))
    if drop_zero_weight:
        steps.append(partial(drop_zero_weight_samples, eps=drop_zero_weight_eps))
    return compose_preprocess(*steps, validate_actor_logps)


def with_kl(loss: Loss, kl_coeff: float) -> Loss:
    """The loss, and a KL term to the policy that sampled, if asked for."""
    if kl_coeff == 0:
        return loss
    return CompositeLoss([LossTerm(name="policy", loss=loss), LossTerm(name="kl", loss=TokenKLLoss(coeff=kl_coeff))])
