"""DAPO (arXiv 2503.14476): GRPO with a higher upper clip, a token mean, and no groups that all did the same.

Its dynamic sampling (fresh prompts in place of such groups) is a matter of the batch source: see
`ludic.batch_gen.dynamic_sampling`; here they are at least filtered out.
"""

from ludic.training.algorithms.algorithm import RLAlgorithm
from ludic.training.algorithms.common import checked
from ludic.training.credit_assignment import GroupNormalizedReturn
from ludic.training.losses import Reduction, TokenClippedSurrogateLoss


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
