"""REINFORCE: the log-probability of what was done, weighted by how well it went.

Data that another version (or another kernel) sampled is corrected by the ratio of the whole sample's probability. That
ratio is a product over tokens: a mismatch of 0.05 nats a token over 400 tokens would weigh a sample by 5 · 10⁸, so it is
capped.
"""

from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction, common_stats, require_positive
from ludic.training.losses.corrections import log_ratio
from ludic.training.losses.tokens import MAX_LOG_RATIO, ActionTokens, Reduction, Stats, over_items


class ReinforceLoss(Loss):
    """−mean( sg(min(r, cap)) · Σ A_t ℓ_t ), r the ratio of the sample's probability (its geometric mean if normalised)."""

    def __init__(
        self,
        *,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        require_positive(ratio_clip=ratio_clip)
        self.length_normalize, self.ratio_clip = length_normalize, ratio_clip
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        difference = log_ratio(tokens, type(self).__name__).detach()
        total_B = tokens.item_mean(difference) if self.length_normalize else tokens.item_sum(difference)
        ratio_B = total_B.clamp(max=MAX_LOG_RATIO).exp()
        used_B = ratio_B if self.ratio_clip is None else ratio_B.clamp(max=self.ratio_clip)
        terms_A = -tokens.spread(used_B) * tokens.weights * tokens.logps
        loss = tokens.reduce_tokens(terms_A, self.reduction, self.constant_length)
        stats = {
            **common_stats(tokens),
            "ratio_mean": over_items(ratio_B),
            "ratio_clip_frac": over_items((used_B < ratio_B).float()),
        }
        return loss, stats


class ReinforceBaselineLoss(ReinforceLoss):
    """REINFORCE with the batch's mean weight subtracted; `normalize` divides by the standard deviation too."""

    def __init__(
        self,
        *,
        normalize: bool = False,
        length_normalize: bool = False,
        ratio_clip: float | None = 2.0,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        super().__init__(
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            reduction=reduction,
            constant_length=constant_length,
        )
        self.normalize = normalize

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        loss, stats = super().__call__(tokens.center(scaled=self.normalize))
        baseline = tokens.logps.new_tensor(tokens.facts.weight_mean)
        return loss, {**stats, "baseline": (baseline, 1.0)}
