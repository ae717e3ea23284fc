"""PPO (arXiv 1707.06347): a critic, advantages over tokens or turns, a clip on token ratios."""

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import PerStepReward
from ludic.training.critic.critic import CriticKind
from ludic.training.critic.gae import TokenGAE, TurnGAE
from ludic.training.losses.base import Loss, Needs, require_positive
from ludic.training.losses.clipped import TokenClippedSurrogateLoss
from ludic.training.losses.composite import CompositeLoss, LossTerm
from ludic.training.losses.kl import EntropyBonus
from ludic.training.losses.tokens import TOKEN_MEAN, ActionTokens, Stats, sum_and_count
from ludic.types import ConfigError

Over: TypeAlias = Literal["tokens", "turns"]


class ValueLoss(Loss):
    """The critic's loss: coeff · ½ · token mean of max((V − R)², (clip(V, V_old ± ε) − R)²)."""

    needs = Needs(values=True, old_logps=False)

    def __init__(self, *, coeff: float = 0.5, clip_eps: float | None = 0.2) -> None:
        require_positive(clip_eps=clip_eps)
        self.coeff, self.clip_eps = coeff, clip_eps

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        values, returns, old = tokens.values, tokens.returns, tokens.old_values
        if values is None or returns is None or old is None:
            raise KeyError(
                "ValueLoss needs a critic's values and returns, which the Trainer computes; it cannot be used on logits alone."
            )
        error = (values - returns).square()
        if self.clip_eps is not None:
            held = old + (values - old).clamp(-self.clip_eps, self.clip_eps)
            error = torch.maximum(error, (held - returns).square())
        stats = {
            "value_mean": sum_and_count(values),
            "return_mean": sum_and_count(returns),
            "value_error": sum_and_count(error),
        }
        return self.coeff * tokens.reduce_tokens(error / 2, TOKEN_MEAN), stats


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
    behavior_cap: float | None = None,
    name: str = "ppo",
) -> RLAlgorithm:
    """Clipped surrogate and clipped value loss, both as token means. `gamma` and `lam` count what the estimate goes `over`.

    `behavior_cap` decouples the clip from the policy that sampled. The trainer makes the value head; the model of a "separate"
    critic is given to it: Trainer(critic=…).
    """
    if over not in get_args(Over):
        raise ConfigError(f"make_ppo(over={over!r}); there are {', '.join(get_args(Over))}.")
    if critic not in list(CriticKind):
        raise ConfigError(f"make_ppo(critic={critic!r}); there are {', '.join(CriticKind)}.")
    policy = TokenClippedSurrogateLoss(
        clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=TOKEN_MEAN, behavior_cap=behavior_cap
    )
    terms = [
        LossTerm(name="policy", loss=policy),
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
