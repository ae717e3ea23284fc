"""LoRA inside the hand-written passes: which layers with an adapter they can compute, and its products by hand.

A projection with an adapter gives W x + scale · B (A x). Its base weight stays as it is: merging B A into a weight of half
precision would round small adapters away. Adapters that are kept in fp32 are used in the precision of the pass, as under
autocast. Of an `AdapterBank`, several adapters take part in a pass, each on its own tokens. On a GPU their matrices are stacked,
and what belongs to other tokens is set to zero between the products: few large products instead of many small ones. There a NaN
of one adapter can reach the others, so the caller computes a pass that was not finite again, one adapter at a time.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ludic.models.adapters.adapter import AdapterProduct
from ludic.models.adapters.bank import AdaptedLinear
from ludic.models.llama import linears


def base_linear(module: Any) -> Any:
    """The linear layer under an adapter, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def adapter_name(module: Any) -> str | None:
    """The name of a layer's active adapter, also while adapters are disabled; None without one."""
    names = [name for name in getattr(module, "active_adapters", ()) if name in module.lora_A]
    return names[0] if names else None


def is_plain_linear(module: Any) -> bool:
    """True if it is a linear layer, one of an `AdapterBank`, or one with at most one active LoRA adapter of peft of the plain kind:
    not merged, without dropout."""
    if type(module) in (nn.Linear, AdaptedLinear):
        return True
    if (type(module).__module__, type(module).__name__) != ("peft.tuners.lora.layer", "Linear"):
        return False
    names = [name for name in module.active_adapters if name in module.lora_A]
    return (
        type(module.get_base_layer()) is nn.Linear
        and len(names) <= 1
        and not module.merged_adapters
        and not module.fan_in_fan_out
        and not any(name in module.lora_variant for name in names)
        and all(isinstance(module.lora_dropout[name], nn.Identity) for name in names)
        and all(module.lora_A[name].bias is None and module.lora_B[name].bias is None for name in names)
    )


def has_plain_layers(model: Any) -> bool:
    """True if a model of the family has linear layers of one dtype, with biases at most for queries, keys and values. All but the
    head may have a LoRA adapter."""
    found = linears(model)
    layers = model.model.layers
    others = [model.lm_head, *(m for x in layers for m in (x.self_attn.o_proj, x.mlp.gate_proj, x.mlp.up_proj))]
    others += [layer.mlp.down_proj for layer in layers]
    return (
        type(model.lm_head) is nn.Linear
        and all(is_plain_linear(m) and type(m.weight) is nn.Parameter for m in found)
        and all(m.bias is None for m in others)
        and len({m.weight.dtype for m in found}) == 1
    )


def has_adapter(module: Any) -> bool:
    """True if a layer may have adapters in some pass."""
    return isinstance(module, AdaptedLinear) or adapter_name(module) is not None


def adapter_of(module: Any, dtype: Any) -> AdapterProduct | None:
    """The active adapter of a layer of peft in this precision; None without one, or while adapters are disabled."""
    name = adapter_name(module)
    if name is None or module.disable_adapters:
        return None
    return AdapterProduct(module.lora_A[name].weight, module.lora_B[name].weight, float(module.scaling[name])).to(dtype)


def adapters_of(module: Any, dtype: Any, num_tokens: int) -> list[AdapterProduct]:
    """The layer's adapters in a pass over these tokens, in this precision; none while adapters are disabled."""
    if isinstance(module, AdaptedLinear):
        found = module.in_pass(num_tokens)
        if module.weight.is_cuda and len(found) > 1:
            return [stacked(module, num_tokens, dtype)]
        return [own.to(dtype) for own in found]
    own = adapter_of(module, dtype)
    return [] if own is None else [own]


def stacked(module: AdaptedLinear, num_tokens: int, dtype: Any) -> AdapterProduct:
    """All adapters of a pass as one of the sum of their ranks."""
    found = module.in_pass(num_tokens)
    scales = {own.scale for own in found}
    common = scales.pop() if len(scales) == 1 else None
    a_RN = torch.cat([own.a_RN for own in found])
    b_MR = torch.cat([own.b_MR if common is not None else own.b_MR * own.scale for own in found], dim=1)
    spans = tuple((own.rows.start, own.rows.stop, len(own.a_RN)) for own in found)
    return AdapterProduct(a_RN, b_MR, common or 1.0, others_TR=module.others(spans, num_tokens)).to(dtype)


def add_all(adapters: Sequence[Sequence[AdapterProduct]], outs: Sequence[Tensor], x_TN: Tensor) -> None:
    """`AdapterProduct.add` of projections with the same input."""
    for own, out_TM in zip(adapters, outs, strict=True):
        for adapter in own:
            adapter.add(out_TM, x_TN)


def backward_all(
    adapters: Sequence[Sequence[AdapterProduct]], grads: Sequence[Tensor], grad_x_TN: Tensor
) -> list[list[Tensor]]:
    """`AdapterProduct.backward` of projections with the same input."""
    return [
        [adapter.backward(grad_TM, grad_x_TN) for adapter in own] for own, grad_TM in zip(adapters, grads, strict=True)
    ]
