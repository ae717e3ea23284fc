"""PPO (arXiv 1707.06347): a critic, advantages over tokens or turns, a clip on token ratios."""

from typing import Literal, TypeAlias, get_args

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import PerStepReward
from ludic.training.critic.critic import CriticKind
from ludic.training.critic.gae import TokenGAE, TurnGAE
from ludic.training.losses import CompositeLoss, EntropyBonus, LossTerm, Reduction, TokenClippedSurrogateLoss, ValueLoss
from ludic.types import ConfigError

Over: TypeAlias = Literal["tokens", "turns"]


def make_ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    over: Over = "tokens",
    normalize_adv: bool = True,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    critic: CriticKind | str = CriticKind.SHARED,
    value_coeff: float = 0.5,
    value_clip_eps: float | None = 0.2,
    entropy_coeff: float = 0.0,
    name: str = "ppo",
) -> RLAlgorithm:
    """Clipped surrogate and clipped value loss, both as token means. `gamma` and `lam` count what the estimate goes `over`. The
    trainer makes the value head; the model of a "separate" critic is given to it: Trainer(critic=…)."""
    if over not in get_args(Over):
        raise ConfigError(f"make_ppo(over={over!r}); there are {', '.join(get_args(Over))}.")
    if critic not in list(CriticKind):
        raise ConfigError(f"make_ppo(critic={critic!r}); there are {', '.join(CriticKind)}.")
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
    rule = TokenGAE if over == "tokens" else TurnGAE
    return RLAlgorithm(
        name=name,
        credit_assigner=PerStepReward(),
        loss=CompositeLoss(terms),
        advantages=rule(gamma=gamma, lam=lam, normalize=normalize_adv),
        critic=CriticKind(critic),
        preprocess=checked(),
    )
