"""REINFORCE, plain and with the batch's mean as a baseline.

Data that another version (or another kernel) sampled is corrected by the ratio of the whole sample's probability. That
ratio is a product over tokens: a mismatch of 0.05 nats a token over 400 tokens would weigh a sample by 5 · 10⁸, so it is
capped.
"""

from torch import Tensor

from ludic.training.losses.base import Loss, capped, common_stats, require_positive
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
