"""The Llama family on a CPU, for the embedded engine: the arithmetic of its modules in fewer, larger operations."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import AttentionState
from ludic.models.llama.modules import LlamaAttention, is_of_family, linears
from ludic.models.packed_linear import MIN_ROWS_PACKED, Pack, PackedLinear, is_packable

_MLP_ROWS = 256
"""Rows that pass an MLP at a time: what lies between its matrices stays in the processor's cache."""


def can_fuse(model: Any) -> bool:
    """Whether the model belongs to the family, its layers are unwrapped, and its norms may be summed in its dtype."""
    return is_of_family(model) and all(is_packable(m) and m.weight.dtype is torch.float32 for m in linears(model))


# Letters: T flat tokens, H query heads, K key/value heads, D head size.
class FusedLlama:
    """A decoder of the Llama family in as few operations as PyTorch allows. Llama, Qwen2, Qwen3 and Mistral differ in biases and
    in a norm on queries and keys.

    A step of a small model is mostly per-operation overhead, so the three attention projections are one product, the two of
    the MLP another, and rotary embedding takes three operations. `make_forward` compares it with the model's own modules.
    """

    min_rows = MIN_ROWS_PACKED

    def __init__(self, model: Any, pack: Pack = PackedLinear) -> None:
        self._embedding = model.model.embed_tokens.weight
        self._rotary = model.model.rotary_emb
        self._layers = [_Layer(layer, number, pack) for number, layer in enumerate(model.model.layers)]
        self._norm = _Norm(model.model.norm)
        self._head = pack(model.lm_head)
        self._packed = [self._head, *(packed for layer in self._layers for packed in layer.packed)]
        self.keeps_rows = all(packed.keeps_rows for packed in self._packed)

    def refresh(self) -> None:
        for packed in self._packed:
            packed.refresh()

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
    def __init__(self, layer: Any, number: int, pack: Pack) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._number = number
        read = LlamaAttention.of(layer)
        self._head_dim, self._num_kv, self._num_q, self._rules = read.head_dim, read.num_kv, read.num_heads, read.rules
        self._norms = _Norm(layer.input_layernorm), _Norm(layer.post_attention_layernorm)
        self._head_norms = None if read.head_norms is None else tuple(map(_Norm, read.head_norms))
        self._qkv = pack(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = pack(attention.o_proj)
        self._gate_up = pack(mlp.gate_proj, mlp.up_proj)
        self._down = pack(mlp.down_proj)
        self.packed = self._qkv, self._out, self._gate_up, self._down

    def __call__(self, hidden: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, state: AttentionState) -> Tensor:
        qkv = self._qkv.forward(self._norms[0](hidden)).view(hidden.shape[0], -1, self._head_dim)
        qk, value_TKD = qkv[:, : -self._num_kv], qkv[:, -self._num_kv :]
        if self._head_norms is not None:
            q_norm, k_norm = self._head_norms
            qk = torch.cat((q_norm(qk[:, : self._num_q]), k_norm(qk[:, self._num_q :])), dim=1)
        qk = (qk * cos_T1D).addcmul_(qk.roll(self._head_dim // 2, -1), sin_T1D)
        attended = state.attend(self._number, qk[:, : self._num_q], qk[:, self._num_q :], value_TKD, self._rules)
        hidden = self._out.forward(attended.reshape(hidden.shape[0], -1)).add_(hidden)
        first = 0
        for part in hidden.tensor_split(-(-hidden.shape[0] // _MLP_ROWS)):  # equal parts: none has a single row
            gate, up = self._gate_up.forward(self._norms[1](part), first).chunk(2, dim=-1)
            part += self._down.forward(F.silu(gate).mul_(up), first)
            first += len(part)
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
