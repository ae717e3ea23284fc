"""QLoRA: the frozen base of an adapter in four bits (NF4, by bitsandbytes).

`load_policy` calls `quantize_linears` before it adds the adapter. A weight takes half a byte instead of two, and is dequantised
layer by layer when it is used. Servers and exported models get dense weights: dequantised, with the adapter added.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ludic.types import ConfigError, MissingPackage


def quantize_linears(model: Any, device: torch.device) -> Any:
    """Replace the linear layers of the decoder by 4-bit ones, move the model to the device, and freeze it. Embedding and output
    layer keep their precision."""
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        how = "pip install 'bitsandbytes>=0.50'; or leave quantize_base out"
        raise MissingPackage("bitsandbytes", "quantize_base='4bit'", how) from error
    head = model.get_output_embeddings()
    layers = [(name, m) for name, m in model.named_modules() if type(m) is nn.Linear and m is not head]
    if not layers:
        raise ConfigError(f"quantize_base='4bit': {type(model).__name__} has no linear layers to quantise.")
    for name, linear in layers:
        dtype = linear.weight.dtype
        made = Linear4bit(
            linear.in_features, linear.out_features, bias=linear.bias is not None, compute_dtype=dtype, quant_type="nf4",
            device="meta",
        )  # fmt: skip
        made.weight = Params4bit(linear.weight.detach(), requires_grad=False, quant_type="nf4", module=made)
        made.bias = linear.bias
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, made.to(device))
    model.is_loaded_in_4bit = True  # peft reads it, to put its 4-bit layers on these
    return model.to(device).requires_grad_(False)


@torch.no_grad()
def dense_linear(module: Any, dtype: torch.dtype) -> nn.Linear:
    """A plain layer with the dequantised weight."""
    import bitsandbytes.functional as F

    weight: Tensor = F.dequantize_4bit(module.weight.data, module.weight.quant_state).to(dtype)
    plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, device="meta")
    plain.weight = nn.Parameter(weight, requires_grad=False)
    plain.bias = module.bias
    return plain


@torch.no_grad()
def merged_linear(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """The same of a layer with LoRA adapters: those that are active are added."""
    plain = dense_linear(layer.get_base_layer(), dtype)
    if not layer.disable_adapters:
        for name in layer.active_adapters:
            if name in layer.lora_A:
                plain.weight += layer.get_delta_weight(name).to(dtype)
    return plain
