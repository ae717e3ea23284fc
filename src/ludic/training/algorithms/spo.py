"""SPO (arXiv 2509.13232): one sample per prompt, compared with what that prompt earned before, under PPO's clip.

The tracker of prompt values is shared: a curriculum prefers prompts whose value is uncertain.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import BetaValueTracker, TrackedValueReturn
from ludic.training.losses import BatchNormalized, TokenClippedSurrogateLoss


def make_spo(
    *,
    tracker: BetaValueTracker | None = None,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    name: str = "spo",
) -> tuple[RLAlgorithm, BetaValueTracker]:
    """Reward minus the prompt's tracked value, centred and scaled by the batch; token mean. Returns the tracker too."""
    tracker = tracker if tracker is not None else BetaValueTracker()
    loss = TokenClippedSurrogateLoss(clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction="token_mean")
    rule = TrackedValueReturn(tracker)
    return RLAlgorithm(name=name, credit_assigner=rule, loss=BatchNormalized(loss), preprocess=checked()), tracker


def spo_algorithm(
    *,
    d_half: float = 0.1,
    rho_min: float = 0.875,
    rho_max: float = 0.96,
    low: float = 0.0,
    high: float = 1.0,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    name: str = "spo",
) -> RLAlgorithm:
    """`make_spo` from plain settings, for the registry; the tracker is `credit_assigner.tracker`."""
    tracker = BetaValueTracker(d_half=d_half, rho_min=rho_min, rho_max=rho_max, low=low, high=high)
    return make_spo(tracker=tracker, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, name=name)[0]
