"""REINFORCE, plain and with the batch mean as a baseline."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.training.losses import Reduction, ReinforceBaselineLoss, ReinforceLoss


def make_reinforce(
    *,
    gamma: float = 1.0,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce",
) -> RLAlgorithm:
    """Each turn is weighed by what followed it, discounted per turn."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MonteCarloReturn(gamma),
        loss=ReinforceLoss(reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_reinforce_baseline(
    *,
    gamma: float = 1.0,
    normalize_adv: bool = False,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce_baseline",
) -> RLAlgorithm:
    """The same, minus the batch's mean."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MonteCarloReturn(gamma),
        loss=ReinforceBaselineLoss(normalize=normalize_adv, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
