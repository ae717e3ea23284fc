"""LoRA inside the hand-written passes: which layers with an adapter they can compute, and its products by hand.

A projection with an adapter gives W x + scale · B (A x). Its base weight stays as it is: merging B A into a weight of half
precision would round small adapters away. Adapters that are kept in fp32 are used in the precision of the pass, as under
autocast. Of an `AdapterBank`, several adapters take part in a pass, each on its own tokens. On a GPU their matrices are stacked,
and what belongs to other tokens is set to zero between the products: few large products instead of many small ones. There a NaN
of one adapter can reach the others, so the caller computes a pass that was not finite again, one adapter at a time.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ludic.models.adapters.bank import AdaptedLinear
from ludic.models.llama.modules import linears

_ALL = slice(None)


# Letters: T flat tokens, N inputs of a projection, M its outputs, R the rank.
class Adapter(NamedTuple):
    """The adapter of one projection in one pass."""

    a_RN: Tensor
    b_MR: Tensor
    scale: float
    rows: slice = _ALL
    """The tokens that have this adapter."""
    others_TR: Tensor | None = None
    """For several adapters as one: where a token and a row of A belong to different adapters."""

    def add(self, out_TM: Tensor, x_TN: Tensor) -> None:
        """Add what the adapter gives to what the base weight gave."""
        out_TM[self.rows].addmm_(self._inner(x_TN[self.rows]), self.b_MR.t(), alpha=self.scale)

    def _inner(self, x_TN: Tensor) -> Tensor:
        """A x."""
        inner_TR = x_TN @ self.a_RN.t()
        return inner_TR if self.others_TR is None else inner_TR.masked_fill_(self.others_TR, 0.0)

    def backward(self, grad_TM: Tensor, grad_x_TN: Tensor) -> Tensor:
        """Add to the gradient of the projection's input; returns that of A x, [its tokens, R]."""
        grad_TR = (grad_TM[self.rows] @ self.b_MR).mul_(self.scale)
        if self.others_TR is not None:
            grad_TR.masked_fill_(self.others_TR, 0.0)
        grad_x_TN[self.rows].addmm_(grad_TR, self.a_RN)
        return grad_TR

    def gradients(self, grad_TM: Tensor, grad_TR: Tensor, x_TN: Tensor) -> tuple[Tensor, Tensor]:
        """Of A and B."""
        own_TM, own_TN = grad_TM[self.rows], x_TN[self.rows]
        return grad_TR.t() @ own_TN, (own_TM.t() @ self._inner(own_TN)).mul_(self.scale)


def base_linear(module: Any) -> Any:
    """The linear layer under an adapter, or the module itself."""
    return module.get_base_layer() if hasattr(module, "get_base_layer") else module


def adapter_name(module: Any) -> str | None:
    """The name of a layer's active adapter, also while adapters are disabled; None without one."""
    names = [name for name in getattr(module, "active_adapters", ()) if name in module.lora_A]
    return names[0] if names else None


def is_plain_linear(module: Any) -> bool:
    """Whether it is a linear layer, one of an `AdapterBank`, or one with at most one active LoRA adapter of peft of the plain kind:
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
    """Whether a model of the family has linear layers of one dtype, with biases at most for queries, keys and values. All but the
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
    """Whether a layer may have adapters in some pass."""
    return isinstance(module, AdaptedLinear) or adapter_name(module) is not None


def adapter_of(module: Any, dtype: Any) -> Adapter | None:
    """The active adapter of a layer of peft in this precision; None without one, or while adapters are disabled."""
    name = adapter_name(module)
    if name is None or module.disable_adapters:
        return None
    a_RN, b_MR = module.lora_A[name].weight, module.lora_B[name].weight
    return Adapter(a_RN.to(dtype), b_MR.to(dtype), float(module.scaling[name]))


def adapters_of(module: Any, dtype: Any, num_tokens: int) -> list[Adapter]:
    """The layer's adapters in a pass over these tokens, in this precision; none while adapters are disabled."""
    if isinstance(module, AdaptedLinear):
        if module.weight.is_cuda and len(module.in_pass(num_tokens)) > 1:
            return [stacked(module, num_tokens, dtype)]
        return [
            Adapter(a_RN.to(dtype), b_MR.to(dtype), scale, slice(start, end))
            for start, end, scale, a_RN, b_MR in module.in_pass(num_tokens)
        ]
    own = adapter_of(module, dtype)
    return [] if own is None else [own]


def stacked(module: AdaptedLinear, num_tokens: int, dtype: Any) -> Adapter:
    """All adapters of a pass as one of the sum of their ranks."""
    found = module.in_pass(num_tokens)
    scales = {scale for *_, scale, _, _ in found}
    common = scales.pop() if len(scales) == 1 else None
    a_RN = torch.cat([a_RN for *_, a_RN, _ in found])
    b_MR = torch.cat([b_MR if common is not None else b_MR * scale for *_, scale, _, b_MR in found], dim=1)
    spans = tuple((start, end, len(a_RN)) for start, end, _, a_RN, _ in found)
    return Adapter(a_RN.to(dtype), b_MR.to(dtype), common or 1.0, others_TR=module.others(spans, num_tokens))


def add_all(adapters: Sequence[Sequence[Adapter]], outs: Sequence[Tensor], x_TN: Tensor) -> None:
    """`Adapter.add` of projections with the same input."""
    for own, out_TM in zip(adapters, outs, strict=True):
        for adapter in own:
            adapter.add(out_TM, x_TN)


def backward_all(
    adapters: Sequence[Sequence[Adapter]], grads: Sequence[Tensor], grad_x_TN: Tensor
) -> list[list[Tensor]]:
    """`Adapter.backward` of projections with the same input."""
    return [
        [adapter.backward(grad_TM, grad_x_TN) for adapter in own] for own, grad_TM in zip(adapters, grads, strict=True)
    ]
