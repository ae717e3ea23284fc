"""Decoders of the Llama family, computed with as few operations as PyTorch allows.

Llama, Qwen2, Qwen3 and Mistral differ in little: biases, and a norm on queries and keys. A step of a small model is
mostly the overhead of its many operations, so here the three projections of attention are one product, as are the two
of the MLP, and rotary embedding takes three operations. Before it is used it is compared with the model's own modules.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.models.attention import AttentionRules, AttentionState
from ludic.models.packing import MIN_ROWS_PACKED, PackedLinear, is_packable
from ludic.models.view import forward_hooks

_FAMILY = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM")


def is_lean(model: Any) -> bool:
    """Whether this is a plain member of the family, with nothing wrapped around its layers."""
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
class LeanForward:
    """Token ids to logits."""

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
        # Rotating swaps the halves of a head and negates one; the sign goes into the sines, the swap is a roll.
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
        self._norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms = (_Norm(attention.q_norm), _Norm(attention.k_norm)) if _has_head_norms(layer) else None
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
    """RMS norm in few operations (PyTorch's own takes eight on a CPU)."""

    def __init__(self, norm: Any) -> None:
        self._weight = norm.weight
        self._epsilon = torch.tensor(norm.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.addcmul(self._epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self._weight)


def _has_head_norms(layer: Any) -> bool:
    return type(layer).__name__ == "Qwen3DecoderLayer"


def _window(layer: Any) -> int | None:
    """Where the family keeps a layer's sliding window: Qwen on the layer, Mistral in the config, Llama nowhere."""
    attention = layer.self_attn
    if type(layer).__name__.startswith("Qwen"):
        window: int | None = attention.sliding_window
        return window
    return attention.config.sliding_window if type(layer).__name__ == "MistralDecoderLayer" else None
