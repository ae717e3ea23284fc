"""A second module tree over the same parameters: what the engine runs, while the trainer keeps the first.

The two share every parameter and buffer, so nothing is copied and an optimizer step on the one is a step on the other.
What they do not share is everything a forward pass depends on beside the weights: training mode and its dropout, the
choice of attention function, which adapter is switched on. And the engine can replace modules of its own tree.
"""

import copy
from typing import Any

from torch import Tensor, nn


def shared_view(model: Any) -> Any:
    """A copy of the modules, in eval mode, with the very same tensors in them."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # somebody's hooks are called, not copied
        memo |= {id(hook): hook for hook in forward_hooks(module)}
    view = copy.deepcopy(model, memo)
    return view.eval()


def forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


class WeightsWatch:
    """Notices that a model's parameters have changed."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._counted = [p for p in self._parameters if not p.is_inference()]
        self._versions = {id(p): p._version for p in self._counted}
        self._stamp = self._now()

    def is_replaced(self, model: Any) -> bool:
        """Other tensors than before: wrapped by peft meanwhile, or loaded anew. A view of it is out of date."""
        now = list(model.parameters())
        return len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True))

    def has_changed(self) -> bool:
        """Changed in place, as by an optimizer step. (Changes through `.data` leave no trace.)"""
        return self._now() != self._stamp

    def changed(self, model: Any) -> list[tuple[str, Tensor]]:
        """The parameters, by name, that are not known to be what they were; all of them where none has left a trace."""
        named = list(model.named_parameters())
        return [(name, p) for name, p in named if p.is_inference() or self._versions.get(id(p)) != p._version] or named

    def _now(self) -> int:
        return sum([p._version for p in self._counted])
