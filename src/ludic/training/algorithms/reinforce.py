"""REINFORCE, plain and with the batch mean as a baseline."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import LeaveOneOutReturn, MonteCarloReturn
from ludic.training.losses import (
    BatchNormalized,
    CompositeLoss,
    Loss,
    LossTerm,
    Reduction,
    ReinforceBaselineLoss,
    ReinforceLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)


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


# REINFORCE++ (arXiv 2501.03262): no groups; weights are normalised over the whole batch, under PPO's clip.
# The KL to a frozen reference, if asked for, is k2: the same gradient as subtracting it from the reward.


def make_reinforce_pp(
    *,
    gamma: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    kl_coeff: float = 0.0,
    name: str = "reinforce_pp",
) -> RLAlgorithm:
    """Monte-Carlo returns, centred and scaled by the batch; token mean."""
    policy: Loss = BatchNormalized(
        TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction="token_mean")
    )
    if kl_coeff:
        kl = TokenKLLoss(coeff=kl_coeff, to="reference", estimator="k2", reduction="token_mean")
        policy = CompositeLoss([LossTerm(name="policy", loss=policy), LossTerm(name="kl", loss=kl)])
    return RLAlgorithm(name=name, credit_assigner=MonteCarloReturn(gamma), loss=policy, preprocess=checked())


# RLOO (arXiv 2402.14740): each sample against the mean of the others in its group; no clip, no deviation.


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
