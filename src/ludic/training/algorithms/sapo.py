"""SAPO (arXiv 2511.20347): a soft gate around ratio 1, steeper for negative weights."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import Reduction, SAPOLoss


def make_sapo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "sapo",
) -> RLAlgorithm:
    """GRPO's credit; a sigmoid in place of the clip."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=SAPOLoss(tau_pos=tau_pos, tau_neg=tau_neg, length_normalize=length_normalize, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
