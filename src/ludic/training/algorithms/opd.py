"""On-policy distillation: the student samples, a teacher says of every token how likely it would have been.

The token's weight is log π_teacher − log π_student when it was sampled, so the expected gradient is that of the reverse KL
at each token; with a task advantage beside it, the same is a dense reward for GRPO. Samples must come with a teacher's log-probs
(`ludic.batch_gen.TeacherAnnotatedBatchSource`).
"""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.credit_assignment import ConstantCredit, GroupNormalizedReturn
from ludic.training.credit_assignment.kl_modifier import KLCreditModifier
from ludic.training.losses import CISPOLoss, TokenClippedSurrogateLoss
from ludic.training.preprocess import compose_preprocess, validate_actor_logps


def make_opd(
    *,
    kl_coeff: float = 1.0,
    discount: float = 0.0,
    clip_eps_high: float = 1.0,
    length_normalize: bool = True,
    name: str = "opd",
) -> RLAlgorithm:
    """Rewards play no part. The ratio of each token, at most 1 + `clip_eps_high`, is a factor without a gradient."""
    return RLAlgorithm(
        name=name,
        credit_assigner=ConstantCredit(0.0),
        loss=CISPOLoss(clip_eps_high=clip_eps_high, length_normalize=length_normalize),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount)),
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
        ),
        preprocess=compose_preprocess(validate_actor_logps, KLCreditModifier(kl_coeff, discount)),
    )
