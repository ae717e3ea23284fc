"""Losses whose target is given: recorded tokens, the env's answers (ECHO), a teacher's distribution, a critic's returns."""

import torch
from torch import Tensor

from ludic.models.teacher_kl import KLDirection, VocabularyKL
from ludic.training.losses.base import Loss, Needs, named, require_not_negative, require_positive
from ludic.training.losses.tokens import TOKEN_MEAN, ActionTokens, Reduction, Stats, sum_and_count


class MaskedCausalLMCrossEntropyLoss(Loss):
    """mean( weight · Σ NLL over action tokens ), per token if length-normalised."""

    needs = Needs(old_logps=False)

    def __init__(self, *, length_normalize: bool = True, reduction: Reduction | str | None = None) -> None:
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss = tokens.reduce_tokens(-tokens.weights * tokens.logps, self.reduction)
        return loss, {"nll_mean": sum_and_count(-tokens.logps)}


class ObservationLoss(Loss):
    """−coeff · mean ℓ over the observation tokens of the batch.

    Every rollout counts, also one whose weight is 0. Observations were not sampled: there are no ratios, and no temperature.
    """

    needs = Needs(observations=True, old_logps=False)

    def __init__(self, *, coeff: float = 1.0) -> None:
        require_not_negative(coeff=coeff)
        self.coeff = coeff

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        if tokens.observed is None:
            raise KeyError("ObservationLoss needs log-probs of observation tokens, which the Trainer computes for it.")
        logps = tokens.observed.logps
        loss = -self.coeff * logps.sum() / max(tokens.facts.num_observed, 1)
        return loss, {
            "observation_logp_mean": sum_and_count(logps),
            "avg_observation_tokens": (logps.new_full((), logps.shape[0]), float(tokens.num_items)),
        }


class DistillationLoss(Loss):
    """coeff · mean( Σ KL over action tokens ), per token if length-normalised; the KL is that of whole distributions.

    It depends on the text before a token, not on the token sampled or its credit: so it can be added to a loss on rewards,
    and there are no ratios. A correction around it (`CorrectedLoss`) weights the tokens.
    """

    def __init__(
        self,
        *,
        direction: KLDirection | str = KLDirection.REVERSE,
        top_k: int | None = None,
        coeff: float = 1.0,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
    ) -> None:
        """`top_k`: compare the teacher's k likeliest tokens one by one and all others as one; None compares all."""
        require_not_negative(coeff=coeff)
        self.coeff, self.kl = coeff, VocabularyKL(named(KLDirection, direction, "direction"), top_k)
        self.needs = Needs(old_logps=False, teacher_kl=self.kl)
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        if tokens.teacher_kl is None:
            raise KeyError(
                "DistillationLoss needs the KL to a teacher, which the Trainer computes: Trainer(teacher=…). It cannot be used on "
                "logits alone."
            )
        terms = tokens.teacher_kl if tokens.correction is None else tokens.correction * tokens.teacher_kl
        name = "teacher_kl" if self.kl.direction is KLDirection.REVERSE else "teacher_kl_forward"
        return self.coeff * tokens.reduce_tokens(terms, self.reduction), {name: sum_and_count(tokens.teacher_kl)}


class ValueLoss(Loss):
    """The critic's loss: coeff · ½ · token mean of max((V − R)², (clip(V, V_old ± ε) − R)²)."""

    needs = Needs(values=True, old_logps=False)

    def __init__(self, *, coeff: float = 0.5, clip_eps: float | None = 0.2) -> None:
        require_positive(clip_eps=clip_eps)
        self.coeff, self.clip_eps = coeff, clip_eps

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        values, returns, old = tokens.values, tokens.returns, tokens.old_values
        if values is None or returns is None or old is None:
            raise KeyError(
                "ValueLoss needs a critic's values and returns, which the Trainer computes; it cannot be used on logits alone."
            )
        error = (values - returns).square()
        if self.clip_eps is not None:
            held = old + (values - old).clamp(-self.clip_eps, self.clip_eps)
            error = torch.maximum(error, (held - returns).square())
        stats = {
            "value_mean": sum_and_count(values),
            "return_mean": sum_and_count(returns),
            "value_error": sum_and_count(error),
        }
        return self.coeff * tokens.reduce_tokens(error / 2, TOKEN_MEAN), stats
