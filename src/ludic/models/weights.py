"""Tools for the weights of a model: a second module tree over them, a watch for changes, a check for NaN and infinity."""

import copy
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.types import NotFinite

_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_NUM_NAMED = 3


def shared_view(model: Any) -> Any:
    """A copy of the modules, in eval mode, over the same parameters and buffers: the inference engine runs it while the trainer
    keeps the first.

    An optimizer step changes both. They do not share the other inputs of a forward pass: training mode and dropout, the
    attention function, the active adapter. The inference engine may replace modules in its tree.
    """
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # hooks are shared, not copied
        memo |= {id(hook): hook for hook in forward_hooks(module)}
    return without_own_hooks(copy.deepcopy(model, memo).eval())


def forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


class HookOfOneTree:
    """A forward hook that belongs to one module tree: a copy of the tree does not have it."""


def without_own_hooks(copied: Any) -> Any:
    """A copied tree without the hooks that belong to the original."""
    for module in copied.modules():
        for number in [n for n, hook in module._forward_hooks.items() if isinstance(hook, HookOfOneTree)]:
            del module._forward_hooks[number]
            module._forward_hooks_with_kwargs.pop(number, None)
    return copied


class WeightsWatch:
    """Detects that a model's parameters have changed."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._counted = [p for p in self._parameters if not p.is_inference()]
        self._versions = {id(p): p._version for p in self._counted}
        self._stamp = self._now()

    def is_replaced(self, model: Any) -> bool:
        """True if the tensors are others than before: wrapped by peft or reloaded. A view of them is then out of date."""
        now = list(model.parameters())
        return len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True))

    def has_changed(self) -> bool:
        """True if an in-place change happened, such as an optimizer step. (Changes through `.data` are not counted.)"""
        return self._now() != self._stamp

    def changed(self, model: Any) -> list[tuple[str, Tensor]]:
        """(name, parameter) of all that may have changed; all parameters if no change was counted."""
        named = list(model.named_parameters())
        return [(name, p) for name, p in named if p.is_inference() or self._versions.get(id(p)) != p._version] or named

    def _now(self) -> int:
        return sum([p._version for p in self._counted])


class FiniteCheck:
    """Checks that tensors are finite, by one fused reduction; of a sharded tensor each rank checks its own shard.

    The trainer checks after each optimizer step, the inference engine at each new version, and both check all weights at load.
    The loss cannot show it: on x86_64 torch's CPU attention returns zeros for NaN queries, so training would continue.
    Construction does not synchronise with the GPU; calling `names` does.
    """

    @torch.no_grad()
    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        own = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors}
        self._tensors = {name: t.detach() for name, t in own.items() if t.dtype in _CHECKED and t.numel()}
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
