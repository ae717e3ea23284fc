"""AdamW for weights in half precision: the optimizer keeps each of them in fp32 and hands out what rounding leaves.

An update of 1e-5 on a weight of 0.02 is less than half of bfloat16's last digit: added to the weight itself it is lost, step
after step. Here it is added to the copy, and shows in the weight as soon as enough of it has come together.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# ----------------------------------------------------------------------------------------------------
# AdamW on the part of a sharded weight that is on this rank.
# ----------------------------------------------------------------------------------------------------
# AdamW is elementwise, so every rank can update its own part by itself. Over DTensors torch dispatches tensor by tensor, in
# Python: a hundred times what the arithmetic takes. The state stays made of DTensors, so that checkpoints know how it is cut.


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


_NARROW = (torch.bfloat16, torch.float16)


class FullPrecisionAdamW(LocalAdamW):
    """`param_groups` hold the copies; whoever looks for gradients before the step finds them at the model's parameters."""

    def __init__(self, parameters: Iterable[nn.Parameter], **settings: Any) -> None:
        self._served = list(parameters)
        self._is_narrow = [p.dtype in _NARROW for p in self._served]
        super().__init__([_copy(p) if n else p for p, n in zip(self._served, self._is_narrow, strict=True)], **settings)

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        copies = [p for group in self.param_groups for p in group["params"]]
        return [(s, c) for s, c, n in zip(self._served, copies, self._is_narrow, strict=True) if n]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        pairs = self._pairs()
        for served, copy in pairs:
            copy.grad = None if served.grad is None else served.grad.float()
        result = super().step(closure)
        if pairs:
            torch._foreach_copy_([local_part(served) for served, _ in pairs], [local_part(copy) for _, copy in pairs])
        for _, copy in pairs:
            copy.grad = None
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        for served in self._served:
            served.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "copies": [copy.detach() for _, copy in self._pairs()]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        copies = state_dict["copies"]
        super().load_state_dict({name: value for name, value in state_dict.items() if name != "copies"})
        for (_, copy), saved in zip(self._pairs(), copies, strict=True):
            copy.copy_(saved)


def is_narrow(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether any of them would lose small updates."""
    return any(p.dtype in _NARROW for p in parameters)


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float())
