"""CISPO: REINFORCE whose importance weight is clipped and carries no gradient, so that every token keeps its own."""

from torch import Tensor

from ludic.training.losses.base import Loss, chosen_reduction, common_stats, require_not_negative
from ludic.training.losses.corrections import log_ratio
from ludic.training.losses.tokens import ActionTokens, Reduction, Stats, over_tokens


class CISPOLoss(Loss):
    """−mean Σ_t sg(clip(ρ_t, 1 − low, 1 + high)) A_t ℓ_t; without a lower bound by default."""

    def __init__(
        self,
        *,
        clip_eps_low: float = 1e6,
        clip_eps_high: float = 0.2,
        length_normalize: bool = True,
        reduction: Reduction | str | None = None,
        constant_length: int | None = None,
    ) -> None:
        require_not_negative(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
        self.clip_eps_low, self.clip_eps_high = clip_eps_low, clip_eps_high
        self.reduction = chosen_reduction(length_normalize, reduction, constant_length)
        self.constant_length = constant_length

    def __call__(self, tokens: ActionTokens) -> tuple[Tensor, Stats]:
        ratio = log_ratio(tokens, type(self).__name__).detach().exp()
        held = ratio.clamp(1 - self.clip_eps_low, 1 + self.clip_eps_high)
        loss = -tokens.reduce_tokens(held * tokens.weights * tokens.logps, self.reduction, self.constant_length)
        stats = {
            **common_stats(tokens),
            "ratio_mean": over_tokens(ratio),
            "clip_frac": over_tokens((held != ratio).float()),
        }
        return loss, stats
