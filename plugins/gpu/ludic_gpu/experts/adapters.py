"""LoRA on the experts of a mixture: which parameters to target, and merged copies for the embedded engine.

transformers holds the experts of a layer as one tensor per matrix, which peft adapts by `target_parameters`. Its wrapper adds
the adapter to all experts in every forward pass, through state that all threads of a process share (`parametrize.cached`).
The engine computes in another thread than the trainer, and for one token at a time; it runs on merged copies instead, renewed
with every version of the weights.
"""

import copy
from typing import Any

import torch
from torch import nn

from ludic.models.kinds import adapts_experts

_EXPERTS = "experts"


def expert_parameters(model: Any) -> list[str]:
    """Names of the matrices of experts, for LoraConfig(target_parameters=…); empty if the model is no mixture."""
    return sorted(
        {
            f"{_EXPERTS}.{own}"
            for name, module in model.named_modules()
            if name.split(".")[-1] == _EXPERTS
            for own, parameter in module.named_parameters(recurse=False)
            if parameter.dim() == 3
        }
    )


class MergedExperts:
    """Experts of one layer with their adapters added, in the place of peft's wrappers."""

    def __init__(self, wrapper: Any) -> None:
        base = wrapper.get_base_layer()
        self._wrappers = _nested(wrapper)
        self.plain: nn.Module = copy.deepcopy(base, {id(p): p for p in base.parameters()})
        for each in self._wrappers:
            merged = nn.Parameter(each.get_param().detach().clone(), requires_grad=False)
            setattr(self.plain, each.parameter_name, merged)
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Add the adapters to the base weights as they are now."""
        for each in self._wrappers:
            merged = self.plain.get_parameter(each.parameter_name)
            merged.copy_(each.get_param())
            if not each.disable_adapters:
                for name in each.active_adapters:
                    if name in each.lora_A and name not in each.merged_adapters:
                        merged.add_(each.get_delta_weight(name))


def merge_experts(view: Any) -> list[MergedExperts]:
    """Replace adapted experts of a module tree, which must be the caller's alone, by merged copies."""
    made = []
    for parent in list(view.modules()):
        for name, child in parent.named_children():
            if adapts_experts(child) and not adapts_experts(parent):
                merged = MergedExperts(child)
                setattr(parent, name, merged.plain)
                made.append(merged)
    return made


def _nested(wrapper: Any) -> list[Any]:
    """One wrapper per adapted parameter, each inside the one before."""
    found = []
    while adapts_experts(wrapper):
        found.append(wrapper)
        wrapper = wrapper.base_layer
    return found
