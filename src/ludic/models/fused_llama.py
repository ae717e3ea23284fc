"""Decoders of the Llama family in as few operations as PyTorch allows, and the packed linear layers they use.

Llama, Qwen2, Qwen3 and Mistral differ in biases and in a norm on queries and keys. A step of a small model is
mostly per-operation overhead, so the three attention projections are one product, the two of the MLP another, and
rotary embedding takes three operations. `make_forward` compares the result with the model's own modules before using it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.models.attention import AttentionRules, AttentionState
from ludic.models.shared_view import forward_hooks

# Packed linear layers: a product of few rows with a large matrix spends most of its time rearranging that matrix. PyTorch
# rearranges on every call, because training changes the weights; between two policy versions once is enough. Large
# matrices are kept in oneDNN's blocked layout, small ones transposed (there oneDNN's fixed cost per call dominates). The
# choice depends on the shape alone, never on a measurement, so that the same model rounds the same way in every process.
# Both layouts give a row the same result whatever other rows are in the batch (with at least two rows: a single row takes
# another path through the library). Plain `nn.Linear` does not, below nine rows.

_LARGE = 1 << 18
"""Elements from which oneDNN's layout is faster; measured on Neoverse-N1 with 1 to 64 rows."""
MIN_ROWS_PACKED = 2
MIN_ROWS_PLAIN = 16


class PackedLinear(nn.Module):
    """One or several `nn.Linear` with the same input, over a rearranged private copy of their weights.

    Call `refresh` after the weights have changed. The outputs of several linears are concatenated.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        super().__init__()
        self._linears = linears  # a tuple: unregistered, so that parameters are not counted twice
        self.weight = linears[0].weight
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        is_large = self.in_features * self.out_features >= _LARGE
        self._is_large = is_large and torch.backends.mkldnn.is_available()
        self._packed: Tensor
        self._bias: Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights."""
        weight = _joined([linear.weight.detach() for linear in self._linears])
        biases = [linear.bias.detach() for linear in self._linears if linear.bias is not None]
        self._bias = _joined(biases) if biases else None
        if self._is_large:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS_PLAIN)
        else:
            self._packed = weight.t().contiguous()

    def forward(self, x: Tensor) -> Tensor:
        if self._is_large:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
            return out
        flat = x.reshape(-1, self.in_features)
        out = torch.mm(flat, self._packed) if self._bias is None else torch.addmm(self._bias, flat, self._packed)
        return out.view(*x.shape[:-1], self.out_features)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def is_packable(module: nn.Module) -> bool:
    return type(module) is nn.Linear and module.weight.dtype is torch.float32


def packed_bytes(model: nn.Module) -> int:
    """Memory of the packed copies."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_packable(m)]
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)


_FAMILY = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


def can_fuse(model: Any) -> bool:
    """Whether the model belongs to the family and its layers are unwrapped."""
    return (
        type(model).__module__.startswith("transformers.models.")
        and type(model).__name__ in _FAMILY
        and model.config.hidden_act == "silu"
        and all(is_packable(m) for m in _linears(model))
        and not any(forward_hooks(module) for module in model.modules())
    )


def _linears(model: Any) -> list[nn.Module]:
    found = [model.lm_head]
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        found += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        found += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return found


# Letters: T flat tokens, H query heads, K key/value heads, D head size.
class FusedLlama:
    """Computes logits from token ids."""

    min_rows = MIN_ROWS_PACKED

    def __init__(self, model: Any) -> None:
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._layers = [_Layer(layer, number) for number, layer in enumerate(model.model.layers)]
        self._norm = _Norm(model.model.norm)
        self._head = PackedLinear(model.lm_head)

    def refresh(self) -> None:
        self._head.refresh()
        for layer in self._layers:
            layer.refresh()

    def logits(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState, where_N: Tensor) -> Tensor:
        hidden = F.embedding(ids_T, self._embedding)
        cos, sin = self._rotary(hidden[None], positions_T[None])
        cos_T1D, sin_T1D = cos[0, :, None], sin[0, :, None]
        # Rotation swaps the halves of a head and negates one: the sign goes into the sines, the swap is a roll.
        half = sin_T1D.shape[-1] // 2
        sin_T1D = torch.cat((-sin_T1D[..., :half], sin_T1D[..., half:]), dim=-1)
        for layer in self._layers:
            hidden = layer(hidden, cos_T1D, sin_T1D, state)
        out = self._head.forward(self._norm(hidden[where_N]))
        return out


class _Layer:
    def __init__(self, layer: Any, number: int) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        self._head_dim = attention.head_dim
        self._num_kv = attention.k_proj.out_features // self._head_dim
        self._num_q = attention.q_proj.out_features // self._head_dim
        self._rules = AttentionRules(attention.scaling, _window(layer))
        has_norms = type(layer).__name__ == "Qwen3DecoderLayer"
        self._norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if has_norms else None
        self._qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = PackedLinear(attention.o_proj)
        self._gate_up = PackedLinear(mlp.gate_proj, mlp.up_proj)
        self._down = PackedLinear(mlp.down_proj)

    def refresh(self) -> None:
        for packed in (self._qkv, self._out, self._gate_up, self._down):
            packed.refresh()

    def __call__(self, hidden: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, state: AttentionState) -> Tensor:
        qkv = self._qkv.forward(self._norms[0](hidden)).view(hidden.shape[0], -1, self._head_dim)
        qk, value_TKD = qkv[:, : -self._num_kv], qkv[:, -self._num_kv :]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            qk = torch.cat((q_norm(qk[:, : self._num_q]), k_norm(qk[:, self._num_q :])), dim=1)
        qk = torch.addcmul(qk * cos_T1D, qk.roll(self._head_dim // 2, -1), sin_T1D)
        attended = state.attend(self._number, qk[:, : self._num_q], qk[:, self._num_q :], value_TKD, self._rules)
        hidden = hidden + self._out.forward(attended.reshape(hidden.shape[0], -1))
        gate_up = self._gate_up.forward(self._norms[1](hidden))
        gate, up = gate_up.chunk(2, dim=-1)
        hidden += self._down.forward(F.silu(gate).mul_(up))
        return hidden


class _Norm:
    """RMS norm in few operations (PyTorch's takes eight on a CPU)."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._epsilon = torch.tensor(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self._weight)


def _window(layer: Any) -> int | None:
    """The layer's sliding window: Qwen stores it on the layer, Mistral in the config, Llama has none."""
    attention = layer.self_attn
    if type(layer).__name__.startswith("Qwen"):
        window: int | None = attention.sliding_window
        return window
    return attention.config.sliding_window if type(layer).__name__ == "MistralDecoderLayer" else None
