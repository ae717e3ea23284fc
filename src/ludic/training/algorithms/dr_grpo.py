"""Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the group's deviation and by length."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import Reduction, TokenClippedSurrogateLoss


def make_dr_grpo(
    *,
    group_size: int = 8,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    constant_length: int | None = None,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "dr_grpo",
) -> RLAlgorithm:
    """Return minus the group's mean; token sums, divided by a constant length if one is given (the paper's max_tokens)."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=False, positive_only=positive_only),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            ratio_clip=ratio_clip,
            reduction=Reduction.CONSTANT if reduction is None and constant_length is not None else reduction,
            constant_length=constant_length,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
