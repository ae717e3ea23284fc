"""Action tokens of a batch that is worked by hand."""

from collections.abc import Sequence
from typing import Any

import torch

from ludic.training.losses import ActionTokens, BatchFacts


def by_hand(
    logps: Sequence[float], ratios: Sequence[float], weights: Sequence[float], item_index: Sequence[int], **facts: Any
) -> ActionTokens:
    """One micro-batch in fp64 whose log-probs carry a gradient; `ratios` are trained over sampled probabilities."""
    trained = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    num_items = max(item_index) + 1
    return ActionTokens(
        logps=trained,
        weights=torch.tensor(weights, dtype=torch.float64),
        old_logps=trained.detach() - torch.tensor(ratios, dtype=torch.float64).log(),
        item_index=torch.tensor(item_index),
        num_items=num_items,
        facts=BatchFacts(**{"num_items": num_items, "num_tokens": len(logps), **facts}),
    )
