"""GRPO (arXiv 2402.03300): a group of samples per prompt, each weighed against its siblings, under PPO's clip."""

from ludic.training.algorithms.algorithm import RLAlgorithm, checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import Reduction, TokenClippedSurrogateLoss


def make_grpo(
    *,
    group_size: int = 8,
    group_normalize_adv: bool = True,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    length_normalize: bool = False,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "grpo",
) -> RLAlgorithm:
    """Return minus the group's mean, over its standard deviation; token ratios clipped to 0.8 … 1.2."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(
            group_size, normalize_adv=group_normalize_adv, positive_only=positive_only
        ),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            length_normalize=length_normalize,
            ratio_clip=ratio_clip,
            reduction=reduction,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


# Dr. GRPO (arXiv 2503.20783): GRPO without its two biases, the division by the group's deviation and by length.


def make_dr_grpo(
    *,
    group_size: int = 8,
    positive_only: bool = False,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.2,
    constant_length: int | None = None,
    reduction: Reduction | str | None = None,
    ratio_clip: float | None = None,
    drop_zero_weight: bool = False,
    drop_zero_weight_eps: float = 1e-4,
    name: str = "dr_grpo",
) -> RLAlgorithm:
    """Return minus the group's mean; token sums, divided by a constant length if one is given (the paper's max_tokens)."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=False, positive_only=positive_only),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low,
            clip_eps_high=clip_eps_high,
            ratio_clip=ratio_clip,
            reduction=Reduction.CONSTANT if reduction is None and constant_length is not None else reduction,
            constant_length=constant_length,
        ),
        preprocess=checked(drop_zero_weight=drop_zero_weight, drop_zero_weight_eps=drop_zero_weight_eps),
    )


# DAPO (arXiv 2503.14476): GRPO with a higher upper clip, a token mean, and no groups that all did the same.
# Its dynamic sampling (fresh prompts in place of such groups) is a matter of the batch source: see
# `ludic.batch_gen.sources.rollouts`; here they are at least filtered out.


def make_dapo(
    *,
    group_size: int = 8,
    clip_eps_low: float = 0.2,
    clip_eps_high: float = 0.28,
    filter_zvp: bool = True,
    zvp_filter_eps: float = 1e-6,
    name: str = "dapo",
) -> RLAlgorithm:
    """GRPO's credit; clip 0.8 … 1.28; every token of the batch counts the same."""
    return RLAlgorithm(
        name=name,
        credit_assigner=GroupNormalizedReturn(group_size, normalize_adv=True),
        loss=TokenClippedSurrogateLoss(
            clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high, reduction=Reduction.TOKEN_MEAN
        ),
        preprocess=checked(zvp_filter_eps=zvp_filter_eps if filter_zvp else None),
    )
