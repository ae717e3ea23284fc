"""How far the policy that sampled is from the policy that is trained: what every step reports of it.

Even at the same version the two differ a little (other kernels, other precision); when data is older they differ more. What
can be done about it is in `corrections`.
"""

import torch
from torch import Tensor

from ludic.training.losses.tokens import ActionTokens, Stats, over_items, over_tokens

MAX_LOG_RATIO = 20.0
"""e^20 is beyond anything that a correction would let through, and far from overflow."""
NUM_PARTS = 4
"""A sample's action tokens are looked at in so many parts of equal length."""

_SQUARES = {"ratio_token": "ess", "ratio_sequence": "ess_sequence", "correction": "correction_ess"}
"""Whose mean and mean square become which effective share."""


def log_ratio(tokens: ActionTokens, who: str) -> Tensor:
    """[A] log of trained over sampled probability, bounded so that its exponential is finite."""
    return (tokens.logps - tokens.require_old_logps(who)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_log_ratio(tokens: ActionTokens, difference_A: Tensor) -> Tensor:
    """[B] log of the ratio of a whole sample's probability, bounded too."""
    return tokens.item_sum(difference_A).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def mismatch_stats(tokens: ActionTokens) -> Stats:
    """KL(sampler ‖ trainer) per token, overall and along the samples, and what the effective sample sizes are made of."""
    if tokens.old_logps is None:
        return {}
    tokens = tokens.with_known_old_logps()
    assert tokens.old_logps is not None, "some are known"
    difference = (tokens.logps.detach() - tokens.old_logps).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = difference.exp()
    sequence_ratio = sequence_log_ratio(tokens, difference).exp()
    k3 = ratio - 1 - difference
    return {
        "kl_actor_policy": over_tokens(k3),
        "kl_actor_policy_k1": over_tokens(-difference),
        **_along(tokens, k3),
        "logp_difference_abs": over_tokens(difference.abs()),
        "ratio_geometric_mean": over_items(tokens.item_mean(difference).exp()),
        **moments("ratio_token", ratio),
        **moments("ratio_sequence", sequence_ratio),
    }


def _along(tokens: ActionTokens, values_A: Tensor) -> Stats:
    """The mean over the first, second, … part of every sample's action tokens."""
    part_A = part_of_sample(tokens)
    values_A = values_A.float()
    sums = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, values_A)
    counts = values_A.new_zeros(NUM_PARTS).index_add(0, part_A, torch.ones_like(values_A))
    return {f"kl_actor_policy_q{part + 1}": (sums[part], counts[part]) for part in range(NUM_PARTS)}


def part_of_sample(tokens: ActionTokens) -> Tensor:
    """[A] which of NUM_PARTS parts of its sample's action tokens each lies in."""
    order_A = tokens.item_index.argsort(stable=True)
    lengths_B = tokens.item_sum(torch.ones_like(tokens.logps.detach())).long()
    starts_B = lengths_B.cumsum(0) - lengths_B
    place_A = torch.empty_like(order_A)
    place_A[order_A] = torch.arange(len(order_A), device=order_A.device)
    place_A = place_A - tokens.spread(starts_B)
    return place_A * NUM_PARTS // tokens.spread(lengths_B)


def moments(name: str, values: Tensor) -> Stats:
    """Mean and mean square, of which `effective_share` makes an effective sample size when all are added up."""
    return {f"{name}_mean": over_items(values), f"{name}_square_mean": over_items(values.square())}


def effective_share(stats: dict[str, float]) -> dict[str, float]:
    """In place of mean squares, Kish's (Σ r)² / (n Σ r²): the share of tokens or samples that counts after weighting by r.

    `ess` by the ratios of tokens, `ess_sequence` by those of whole samples, `correction_ess` by what corrections have left.
    """
    out = dict(stats)
    for name, square in stats.items():
        path, _, own = name.rpartition("/")
        base = own.removesuffix("_square_mean")
        if base == own or base not in _SQUARES:
            continue
        prefix = f"{path}/" if path else ""
        del out[name]
        out[prefix + _SQUARES[base]] = stats[f"{prefix}{base}_mean"] ** 2 / max(square, 1e-12)
    return out
