"""On-policy distillation: the student samples, a teacher says of every token how likely it would have been.

The token's weight is log π_teacher − log π_student when it was sampled, so the expected gradient is that of the reverse KL
at each token; with a task advantage beside it, the same is a dense reward for GRPO. Samples must come with a teacher's log-probs
(`ludic.batch_gen.TeacherAnnotatedBatchSource`). With the teacher in the trainer's process, the KL can be had over the whole
vocabulary instead (`Trainer(teacher=…)`).
"""

from typing import Literal

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit, GroupNormalizedReturn
from ludic.training.credit_assignment.returns import ScaledCredit
from ludic.training.credit_assignment.shaping import KLCreditModifier
from ludic.training.losses import (
    CISPOLoss,
    CorrectedLoss,
    DistillationLoss,
    Reduction,
    TokenClippedSurrogateLoss,
    TokenMask,
)
from ludic.training.preprocess import compose_preprocess, validate_actor_logps
from ludic.types import ConfigError


def make_opd(
    *,
    kl: Literal["sampled", "reverse", "forward"] = "sampled",
    kl_coeff: float = 1.0,
    discount: float = 0.0,
    clip_eps_high: float = 1.0,
    top_k: int | None = None,
    length_normalize: bool = True,
    name: str = "opd",
) -> RLAlgorithm:
    """Rewards play no part. `kl="sampled"`: each token's ratio, at most 1 + `clip_eps_high`, is a factor without a gradient.

    "reverse" and "forward" compare whole distributions with a teacher in the trainer's process, over the vocabulary or the
    teacher's `top_k` likeliest tokens; they need no ratios, and each token answers for itself.
    """
    if kl == "sampled":
        if top_k is not None:
            raise ConfigError(f'make_opd(top_k={top_k}) is for kl="reverse" or "forward"; the sampled token is one.')
        return _sampled_opd(kl_coeff, discount, clip_eps_high, length_normalize, name)
    if kl not in ("reverse", "forward"):
        raise ConfigError(f"make_opd(kl={kl!r}); there are 'sampled', 'reverse' and 'forward'.")
    if discount != 0 or clip_eps_high != 1.0:
        raise ConfigError(
            f'make_opd(kl="{kl}", discount={discount:g}, clip_eps_high={clip_eps_high:g}): both are for kl="sampled". A loss on '
            "whole distributions has no ratio to clip, and its tokens answer for themselves."
        )
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(1.0),
        loss=DistillationLoss(direction=kl, top_k=top_k, coeff=kl_coeff, length_normalize=length_normalize),
    )


def _sampled_opd(
    kl_coeff: float, discount: float, clip_eps_high: float, length_normalize: bool, name: str
) -> RLAlgorithm:
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(0.0),
        loss=CISPOLoss(clip_eps_high=clip_eps_high, length_normalize=length_normalize),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount)),
        needs_teacher_logps=True,
    )


def make_grpo_opd(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    kl_coeff: float = 1.0,
    discount: float = 0.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    name: str = "grpo_opd",
) -> RLAlgorithm:
    """GRPO's advantage of the sample plus the teacher's of the token, under GRPO's clip."""
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
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount)),
        needs_teacher_logps=True,
    )


# MOPD, multi-teacher on-policy distillation (MiMo-V2-Flash, arXiv 2601.02780): each domain has its own teacher.
# Which teacher scores a sample is the source's business (`ludic.batch_gen.DomainTeachers`). Here: the teacher's advantage of each
# token plus α times the group's, and ratios between trainer and sampler that count only inside a band.


def make_mopd(
    *,
    group_size: int = 8,
    outcome_coeff: float = 1.0,
    group_normalize_adv: bool = True,
    band_low: float = 0.5,
    band_high: float = 2.0,
    name: str = "mopd",
) -> RLAlgorithm:
    """−mean 1/N Σ_t w_t (sg(log π_T − log π_old) + α A) ℓ_t, w_t the ratio inside the band, 0 outside."""
    inside = CISPOLoss(clip_eps_high=max(band_high - 1, 0.0), length_normalize=True)  # the mask cuts first
    return RLAlgorithm(
        name=name,
        credit_assigner=ScaledCredit(
            GroupNormalizedReturn(group_size, normalize_adv=group_normalize_adv), outcome_coeff
        ),
        loss=CorrectedLoss(inside, [TokenMask(band_low, band_high)]),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier()),
        needs_teacher_logps=True,
    )
