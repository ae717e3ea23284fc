"""RLOO (arXiv 2402.14740): each sample against the mean of the others in its group; no clip, no deviation."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import LeaveOneOutReturn
from ludic.training.losses import Reduction, ReinforceLoss


def make_rloo(
    *,
    group_size: int = 4,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = 2.0,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "rloo",
) -> RLAlgorithm:
    """An unbiased baseline from the siblings, and REINFORCE on whole samples."""
    return RLAlgorithm(
        name=name,
        credit_assigner=LeaveOneOutReturn(group_size),
        loss=ReinforceLoss(length_normalize=length_normalize, ratio_clip=ratio_clip, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
