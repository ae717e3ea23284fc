"""GiGPO (arXiv 2505.10978): GRPO, and within the group a second comparison of turns taken in the same state."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import StateFn, StateGroupReturn, observation_before
from ludic.training.losses import Reduction, TokenClippedSurrogateLoss


def make_gigpo(
    *,
    group_size: int = 8,
    gamma: float = 0.95,
    step_weight: float = 1.0,
    state_of: StateFn = observation_before,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "gigpo",
) -> RLAlgorithm:
    """Episodes against their siblings plus turns against turns from the same state; token ratios clipped to 0.8 … 1.2."""
    return RLAlgorithm(
        name=name,
        credit_assigner=StateGroupReturn(group_size, gamma=gamma, step_weight=step_weight, state_of=state_of),
        loss=TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
