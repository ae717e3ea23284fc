"""Dense weights of a model with adapters, without touching the model.

Merging in place and back again leaves rounding in the frozen weights, a little more every step; here the merged
weight is a new tensor.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ludic.models.head import plain_model


@torch.no_grad()
def dense_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the plain model, weight) of everything that a server needs, adapters merged."""
    inner = plain_model(model)
    if inner is model:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
        return
    merged = {name: module for name, module in inner.named_modules() if hasattr(module, "get_delta_weight")}
    for name, parameter in inner.named_parameters():
        if ".lora_" in name or ".modules_to_save." in name or ".original_module." in name:
            continue
        plain = name.replace(".base_layer.", ".")
        owner = name.rsplit(".base_layer.", 1)[0]
        weight = parameter.detach()
        if name.endswith(".base_layer.weight") and owner in merged:
            module = merged[owner]
            for adapter in module.active_adapters:
                weight = weight + module.get_delta_weight(adapter).to(weight.dtype)
        yield plain, weight


def adapter_problem(model: Any) -> str | None:
    """Why training this model's adapter would change nothing; None when it would (or there is none)."""
    if plain_model(model) is model:
        return None
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        return "none of its parameters requires a gradient (is_trainable=False?)"
    active = set(model.active_adapters) if hasattr(model, "active_adapters") else set()
    if active and not any(f".{name}." in parameter for parameter in trainable for name in active):
        return f"the active adapters {sorted(active)} are frozen; what is trainable belongs to others"
    return None
