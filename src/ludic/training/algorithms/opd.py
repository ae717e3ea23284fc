"""On-policy distillation: the student samples, a teacher gives the probability of every token.

A token's weight is log π_teacher − log π_student at the time of sampling, so the expected gradient is that of the reverse KL at
each token; beside a task advantage it is a dense reward for GRPO. Samples must come with a teacher's log-probs
(`ludic.batch_gen.TeacherAnnotatedBatchSource`). With the teacher in the trainer's process (`Trainer(teacher=…)`), the KL can be
taken over the whole vocabulary instead (`DistillationLoss`): the exact gradient, where the sampled token gives an estimate.
"""

from typing import Literal

from torch import Tensor

from ludic.models.teacher_kl import KLDirection, VocabularyKL
from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.cispo import CISPOLoss
from ludic.training.credit_assignment import ConstantCredit, GroupNormalizedReturn, KLCreditModifier, ScaledCredit
from ludic.training.filters import compose_preprocess, validate_actor_logps
from ludic.training.losses.base import Loss, Needs, named, require_not_negative
from ludic.training.losses.clipped import TokenClippedSurrogateLoss
from ludic.training.losses.corrections import CorrectedLoss, TokenMask
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count
from ludic.types import ConfigError


class DistillationLoss(Loss):
    """coeff · mean( Σ KL over action tokens ), per token if length-normalised; the KL is that of whole distributions.

    It depends on the text before a token, not on the token sampled or its credit: so it can stand beside a loss on rewards,
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


def make_opd(
    *,
    kl: Literal["sampled", "reverse", "forward"] = "sampled",
    kl_coeff: float = 1.0,
    discount: float = 0.0,
    baseline: bool = True,
    clip_eps_high: float = 1.0,
    top_k: int | None = None,
    length_normalize: bool = True,
    name: str = "opd",
) -> RLAlgorithm:
    """Distillation without rewards. `kl="sampled"`: each token's ratio, at most 1 + `clip_eps_high`, is a factor without gradient,
    and `baseline` takes the mean of the other samples from each weight (see `KLCreditModifier`).

    "reverse" and "forward" compare whole distributions with a teacher in the trainer's process, over the vocabulary or the
    teacher's `top_k` likeliest tokens; they need no ratios, and each token answers for itself.
    """
    if kl == "sampled":
        if top_k is not None:
            raise ConfigError(f'make_opd(top_k={top_k}) is for kl="reverse" or "forward"; the sampled token is one.')
        return RLAlgorithm(
            name=name,
            credit_assigner=ConstantCredit(0.0),
            loss=CISPOLoss(clip_eps_high=clip_eps_high, length_normalize=length_normalize),
            preprocess=compose_preprocess(
                validate_actor_logps, KLCreditModifier(kl_coeff, discount, baseline=baseline)
            ),
            needs_teacher_logps=True,
        )
    if kl not in ("reverse", "forward"):
        raise ConfigError(f"make_opd(kl={kl!r}); there are 'sampled', 'reverse' and 'forward'.")
    if discount != 0 or clip_eps_high != 1.0:
        raise ConfigError(
            f'make_opd(kl="{kl}", discount={discount:g}, clip_eps_high={clip_eps_high:g}): both are for kl="sampled". A loss on '
            "whole distributions has no ratio to clip, and its tokens answer for themselves."
        )
    loss = DistillationLoss(direction=kl, top_k=top_k, coeff=kl_coeff, length_normalize=length_normalize)
    return RLAlgorithm(name=name, credit_assigner=ConstantCredit(1.0), loss=loss)


def make_grpo_opd(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    kl_coeff: float = 1.0,
    discount: float = 0.0,
    baseline: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    name: str = "grpo_opd",
) -> RLAlgorithm:
    """GRPO's advantage of the sample plus the teacher's advantage of the token, under GRPO's clip."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=group_normalize_adv),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            reduction=reduction,
        ),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount, baseline=baseline)),
        needs_teacher_logps=True,
    )


def make_mopd(
    *,
    group_size: int = 8,
    outcome_coeff: float = 1.0,
    group_normalize_adv: bool = True,
    band_low: float = 0.5,
    band_high: float = 2.0,
    baseline: bool = True,
    name: str = "mopd",
) -> RLAlgorithm:
    """Multi-teacher distillation (MiMo-V2-Flash, arXiv 2601.02780): each domain has its own teacher.

    −mean 1/N Σ_t w_t (sg(log π_T − log π_old) + α A) ℓ_t, where w_t is the ratio inside the band and 0 outside, and α is
    `outcome_coeff`. The source chooses the teacher of a sample (`ludic.batch_gen.DomainTeachers`). `baseline` is not in the paper.
    """
    inside = CISPOLoss(clip_eps_high=max(band_high - 1, 0.0), length_normalize=True)  # the mask cuts first
    return RLAlgorithm(
        name=name,
        credit_assigner=ScaledCredit(GroupNormalizedReturn(group_size, group_normalize_adv), outcome_coeff),
        loss=CorrectedLoss(inside, [TokenMask(band_low, band_high)]),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(baseline=baseline)),
        needs_teacher_logps=True,
    )
