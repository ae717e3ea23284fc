"""On-policy distillation: the student samples, a teacher gives the probability of every token.

A token's weight is log π_teacher − log π_student at the time of sampling, so the expected gradient is that of the reverse KL at
each token; next to a task advantage it is a dense reward for GRPO. Samples must come with a teacher's log-probs
(`ludic.batch_gen.TeacherAnnotatedBatchSource`). With the teacher in the trainer's process (`Trainer(teacher=…)`), the KL can be
taken over the whole vocabulary instead (`DistillationLoss`): the exact gradient, where the sampled token gives an estimate.
"""

from typing import Literal

from ludic.training.algorithms.algorithm import Preprocess, Preset, RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit, GroupNormalizedReturn, KLCreditModifier, ScaledCredit
from ludic.training.filters import compose_preprocess, validate_actor_logps
from ludic.training.losses import CISPOLoss, CorrectedLoss, DistillationLoss, TokenClippedSurrogateLoss, TokenMask
from ludic.types import ConfigError


def _in_group(group_size: int, group_normalize_adv: bool) -> GroupNormalizedReturn:
    return GroupNormalizedReturn(group_size, group_normalize_adv)


def _with_teacher(kl_coeff: float = 1.0, discount: float = 0.0, *, baseline: bool) -> Preprocess:
    """Require the sampler's log-probs, then add the teacher's advantage of each token."""
    return compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount, baseline=baseline))


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
            preprocess=_with_teacher(kl_coeff, discount, baseline=baseline),
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


make_grpo_opd = Preset(
    name="grpo_opd",
    doc="""GRPO's advantage of the sample plus the teacher's advantage of the token, under GRPO's clip.""",
    credit=_in_group,
    credit_settings={"group_size": 8, "group_normalize_adv": True},
    loss=TokenClippedSurrogateLoss,
    loss_settings={
        "clip_eps_low": 0.2,
        "clip_eps_high": 0.2,
        "length_normalize": False,
        "reduction": None,
        "ratio_clip": None,
    },
    preprocess=_with_teacher,
    preprocess_settings={"kl_coeff": 1.0, "discount": 0.0, "baseline": True},
    facts={"needs_teacher_logps": True},
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
        preprocess=_with_teacher(baseline=baseline),
        needs_teacher_logps=True,
    )
