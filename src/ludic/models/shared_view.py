"""A second module tree over the same parameters: the engine runs it while the trainer keeps the first.

Both share every parameter and buffer, so nothing is copied and an optimizer step changes both. They do not share the other
inputs of a forward pass: training mode and dropout, the attention function, the active adapter. The engine may replace
modules in its tree.
"""

import copy
from typing import Any

from torch import Tensor, nn


def shared_view(model: Any) -> Any:
    """A copy of the modules, in eval mode, over the same tensors."""
    memo: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    for module in model.modules():  # hooks are shared, not copied
        memo |= {id(hook): hook for hook in forward_hooks(module)}
    view = copy.deepcopy(model, memo)
    return view.eval()


def forward_hooks(module: nn.Module) -> list[Any]:
    return [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]


class WeightsWatch:
    """Detects that a model's parameters have changed."""

    def __init__(self, model: Any) -> None:
        self._parameters: list[Tensor] = list(model.parameters())
        self._counted = [p for p in self._parameters if not p.is_inference()]
        self._versions = {id(p): p._version for p in self._counted}
        self._stamp = self._now()

    def is_replaced(self, model: Any) -> bool:
        """Whether the tensors are others than before: wrapped by peft or reloaded. A view of them is then out of date."""
        now = list(model.parameters())
        return len(now) != len(self._parameters) or any(a is not b for a, b in zip(now, self._parameters, strict=True))

    def has_changed(self) -> bool:
        """Whether an in-place change happened, such as an optimizer step. (Changes through `.data` are not counted.)"""
        return self._now() != self._stamp

    def changed(self, model: Any) -> list[tuple[str, Tensor]]:
        """(name, parameter) of all that may have changed; all parameters if no change was counted."""
        named = list(model.named_parameters())
        return [(name, p) for name, p in named if p.is_inference() or self._versions.get(id(p)) != p._version] or named

    def _now(self) -> int:
        return sum([p._version for p in self._counted])
