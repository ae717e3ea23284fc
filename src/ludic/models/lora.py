"""Dense weights of a model with adapters, without touching the model.

Merging in place and back again leaves rounding in the frozen weights, a little more every step; here the merged
weight is a new tensor.
"""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ludic.models.head import plain_model


@torch.no_grad()
def dense_parameters(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(name in the plain model, weight) of everything that a server needs, adapters merged; tied weights once."""
    inner = plain_model(model)
    if inner is model:
        yield from ((name, parameter.detach()) for name, parameter in model.named_parameters())
    else:
        yield from _dense(inner, "", {id(parameter): 1 for parameter in inner.parameters()})


def _dense(module: nn.Module, prefix: str, left: dict[int, int]) -> Iterator[tuple[str, Tensor]]:
    """`left` is 1 for each of the model's own parameters that has not been given out; merged copies are not in it."""
    plain = _without_adapter(module)
    for name, parameter in plain.named_parameters(recurse=False):
        if left.get(id(parameter), 1):
            if id(parameter) in left:
                left[id(parameter)] = 0
            yield prefix + name, parameter.detach()
    for name, child in plain.named_children():
        yield from _dense(child, f"{prefix}{name}.", left)


def _without_adapter(module: nn.Module) -> nn.Module:
    """What would stand here in a model without adapters: peft merges into a copy of the one layer."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    if isinstance(module, ModulesToSaveWrapper):
        active = [name for name in module.active_adapters if name in module.modules_to_save]
        is_on = active and not module.disable_adapters
        return module.modules_to_save[active[0]] if is_on else module.original_module
    if isinstance(module, TrainableTokensWrapper):
        module = module.token_adapter
    if not isinstance(module, BaseTunerLayer):
        return module
    merged = copy.deepcopy(module)
    if not merged.disable_adapters and set(merged.active_adapters) - set(merged.merged_adapters):
        merged.merge()
    base: nn.Module = merged.get_base_layer()
    return base


def adapter_problem(model: Any) -> str | None:
    """Why training this model's adapter would change nothing; None when it would (or there is none)."""
    if plain_model(model) is model:
        return None
    prompts = [name for name, config in model.peft_config.items() if config.is_prompt_learning]
    if prompts:
        return f"{prompts} are learned prompts, which packed training does not put before its samples; use LoRA"
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        return "none of its parameters requires a gradient (is_trainable=False?)"
    active = set(model.active_adapters) if hasattr(model, "active_adapters") else set()
    if active and not any(f".{name}." in parameter for parameter in trainable for name in active):
        return f"the active adapters {sorted(active)} are frozen; what is trainable belongs to others"
    return None
