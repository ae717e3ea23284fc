"""REINFORCE, plain and with a baseline: of the batch, of the siblings (RLOO), or normalised under PPO's clip (REINFORCE++).

Data that another version (or another kernel) sampled is corrected by the ratio of the whole sample's probability. That
ratio is a product over tokens: a mismatch of 0.05 nats a token over 400 tokens would weigh a sample by 5 · 10⁸, so it is
capped.
"""

from torch import Tensor

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import LeaveOneOutReturn, MonteCarloReturn
from ludic.training.losses.base import BatchNormalized, Loss, capped, common_stats, require_positive
from ludic.training.losses.clipped import TokenClippedSurrogateLoss
from ludic.training.losses.composite import CompositeLoss, LossTerm
from ludic.training.losses.kl import TokenKLLoss
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, sum_and_count


class ReinforceLoss(Loss):
    """−mean( sg(min(r, cap)) · Σ A_t ℓ_t ), r the ratio of the sample's probability (its geometric mean if normalised)."""

    def __init__(
        self,
        *,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
    ) -> None:
        require_positive(ratio_clip=ratio_clip)
        self.length_normalize, self.ratio_clip = length_normalize, ratio_clip
        self.reduction = Reduction.of(reduction, length_normalize=length_normalize)

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio_B = tokens.item_ratio(tokens.log_ratio(self).detach(), mean=self.length_normalize)
        used_B = capped(ratio_B, self.ratio_clip)
        terms_A = -tokens.spread(used_B) * tokens.weights * tokens.logps
        stats = {
            **common_stats(tokens),
            "ratio_mean": sum_and_count(ratio_B),
            "ratio_clip_frac": sum_and_count((used_B < ratio_B).float()),
        }
        return tokens.reduce_tokens(terms_A, self.reduction), stats


class ReinforceBaselineLoss(ReinforceLoss):
    """REINFORCE with the batch's mean weight subtracted; `normalize` divides by the standard deviation too."""

    def __init__(
        self,
        *,
        normalize: bool = False,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
    ) -> None:
        super().__init__(length_normalize=length_normalize, ratio_clip=ratio_clip, reduction=reduction)
        self.normalize = normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss, stats = super().__call__(tokens.center(scaled=self.normalize))
        return loss, {**stats, "baseline": (tokens.logps.new_tensor(tokens.facts.weight_mean), 1.0)}


def make_reinforce(
    *,
    gamma: float = 1.0,
    reduction: Reduction | str | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "reinforce",
) -> RLAlgorithm:
    """Each turn is weighted by its return-to-go, discounted per turn."""
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
    """REINFORCE with the batch's mean as a baseline."""
    return RLAlgorithm(
        name=name,
        credit_assigner=MonteCarloReturn(gamma),
        loss=ReinforceBaselineLoss(normalize=normalize_adv, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


def make_reinforce_pp(
    *,
    gamma: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    kl_coeff: float = 0.0,
    name: str = "reinforce_pp",
) -> RLAlgorithm:
    """REINFORCE++ (arXiv 2501.03262): returns centred and scaled by the batch, PPO's clip, a token mean; no groups.

    With `kl_coeff`, a KL to a frozen reference is added. It is k2: the same gradient as subtracting it from the reward.
    """
    policy: Loss = BatchNormalized(
        TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction="token_mean")
    )
    if kl_coeff:
        kl = TokenKLLoss(coeff=kl_coeff, to="reference", estimator="k2", reduction="token_mean")
        policy = CompositeLoss([LossTerm(name="policy", loss=policy), LossTerm(name="kl", loss=kl)])
    return RLAlgorithm(name=name, credit_assigner=MonteCarloReturn(gamma), loss=policy, preprocess=checked())


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
    """RLOO (arXiv 2402.14740): REINFORCE on whole samples, each against the mean of the others in its group."""
    return RLAlgorithm(
        name=name,
        credit_assigner=LeaveOneOutReturn(group_size),
        loss=ReinforceLoss(length_normalize=length_normalize, ratio_clip=ratio_clip, reduction=reduction),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )
