"""Checks that weights are finite, by one fused reduction that can be read together with other numbers.

The trainer checks after each optimizer step, the engine at each new version, and both check all weights at load.
The loss cannot show it: on x86_64 torch's CPU attention returns zeros for NaN queries, so training would continue.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ludic.types import NotFinite

_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NUM_NAMED = 3


class FiniteCheck:
    """Checks the current values of tensors; of a sharded tensor each rank checks its own shard.

    Construction does not synchronise with the GPU; calling `names` does.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = [(name, _local(tensor)) for name, tensor in tensors]
        self._tensors = {name: tensor for name, tensor in own if tensor.dtype in _CHECKED and tensor.numel()}
        norms = torch._foreach_norm(list(self._tensors.values())) if self._tensors else []
        place = norms[0].device if norms else torch.device("cpu")
        self._norms_N = torch.stack([norm.to(place, torch.float64) for norm in norms]) if norms else torch.zeros(0)

    @property
    def num_suspects(self) -> Tensor:
        """Number of tensors with a non-finite norm, as an unread tensor. Very large finite values can also overflow the norm."""
        return (~self._norms_N.isfinite()).sum().float()

    @torch.no_grad()
    def names(self) -> list[str]:
        """The tensors that hold NaN or infinity."""
        suspects = (~self._norms_N.isfinite()).tolist()
        return [
            name
            for (name, tensor), is_suspect in zip(self._tensors.items(), suspects, strict=True)
            if is_suspect and not bool(tensor.isfinite().all())
        ]


def not_finite(what: str, names: Sequence[str], advice: str) -> NotFinite:
    """An error that names the tensors."""
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return NotFinite(f"{what}: NaN or infinity in {', '.join(names[:_NUM_NAMED])}{more}. {advice}")


def _local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return own.detach()
