"""AdamW on the part of a sharded weight that is on this rank.

AdamW is elementwise, so every rank can update its own part by itself. Over DTensors torch dispatches tensor by tensor, in
Python: a hundred times what the arithmetic takes. The state stays made of DTensors, so that checkpoints know how it is cut.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class LocalAdamW(torch.optim.AdamW):
    """The same as AdamW where nothing is sharded."""

    def _init_group(self, group: dict[str, Any], *collected: list[Tensor]) -> bool:
        """torch collects weights, gradients and state here; what it computes with are the local parts, in the same memory."""
        has_complex = super()._init_group(group, *collected)
        weights, grads = collected[:2]
        grads[:] = [_cut_alike(grad, weight) for grad, weight in zip(grads, weights, strict=True)]
        for tensors in collected:
            tensors[:] = [local_part(tensor) for tensor in tensors]
        return bool(has_complex)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cut_alike(grad: Tensor, weight: Tensor) -> Tensor:
    """Under tensor parallel a gradient may come whole, or as terms of a sum, where its weight is cut."""
    if isinstance(grad, DTensor) and isinstance(weight, DTensor) and grad.placements != weight.placements:
        return grad.redistribute(placements=weight.placements)
    return grad
