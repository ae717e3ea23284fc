"""PPO (arXiv 1707.06347) with a value head on the policy's own hidden states and advantages token by token."""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import PerStepReward
from ludic.training.critic import TokenGAE
from ludic.training.losses import CompositeLoss, EntropyBonus, LossTerm, Reduction, TokenClippedSurrogateLoss, ValueLoss


def make_ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    normalize_adv: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    value_coeff: float = 0.5,
    value_clip_eps: float | None = 0.2,
    entropy_coeff: float = 0.0,
    name: str = "ppo",
) -> RLAlgorithm:
    """Clipped surrogate and clipped value loss, both as token means; the trainer makes the value head."""
    terms = [
        LossTerm(
            name="policy",
            loss=TokenClippedSurrogateLoss(
                clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=Reduction.TOKEN_MEAN
            ),
        ),
        LossTerm(name="value", loss=ValueLoss(coeff=value_coeff, clip_eps=value_clip_eps)),
    ]
    if entropy_coeff:
        terms.append(LossTerm(name="entropy", loss=EntropyBonus(coeff=entropy_coeff)))
    return RLAlgorithm(
        name=name,
        credit_assigner=PerStepReward(),
        loss=CompositeLoss(terms),
        advantages=TokenGAE(gamma=gamma, lam=lam, normalize=normalize_adv),
        preprocess=checked(),
    )
