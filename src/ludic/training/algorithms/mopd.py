"""MOPD, multi-teacher on-policy distillation (MiMo-V2-Flash, arXiv 2601.02780): each domain has a teacher of its own.

Which teacher scores a sample is the source's business (`ludic.batch_gen.DomainTeachers`). Here: the teacher's advantage of each
token plus α times the group's, and ratios between trainer and sampler that count only inside a band.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.credit_assignment.kl_modifier import KLCreditModifier
from ludic.training.credit_assignment.scaled import ScaledCredit
from ludic.training.losses import CISPOLoss, CorrectedLoss, TokenMask
from ludic.training.preprocess import compose_preprocess, validate_actor_logps


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
