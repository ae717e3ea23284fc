"""REINFORCE++ (arXiv 2501.03262): no groups; weights are normalised over the whole batch, under PPO's clip.

The KL to a frozen reference, if asked for, is k2: the same gradient as subtracting it from the reward.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import MonteCarloReturn
from ludic.training.losses import BatchNormalized, CompositeLoss, Loss, LossTerm, TokenClippedSurrogateLoss, TokenKLLoss


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
