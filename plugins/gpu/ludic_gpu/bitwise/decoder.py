"""`BitwiseDecoder`: the forward pass that the sampler and the trainer share in bitwise mode, for the Llama family.

A token's hidden state depends on the tokens before it alone: not on the batch, on how a prompt was cut, or on what was cached.
So prefill, decoding and packed training give it the same bits on one machine.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ludic.models.attention import AttentionRules
from ludic.models.forward import is_of_family, layer_window, linears
from ludic.models.head import plain_model
from ludic_gpu.bitwise.attention import tile_rows
from ludic_gpu.bitwise.products import NotBitwise, check_functions, linear, operand_of, product
from ludic_gpu.bitwise.rows import rms_norm, silu

_TABLE = 1024
"""Positions whose rotations are computed in one call."""
_ROPE_BY_LENGTH = ("dynamic", "longrope")


class BitwiseState(Protocol):
    """Attention of one forward pass; an `AttentionState`."""

    longest: int
    """Tokens of its longest sequence."""

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor: ...


# Letters: T flat tokens, N requested positions, H query heads, K key/value heads, D head size, V vocabulary.
class BitwiseDecoder:
    """A model of the Llama family, with or without LoRA adapters, over its own parameters."""

    def __init__(self, model: Any, *, caches: bool = False) -> None:
        """Raises `NotBitwise` for a model or a machine for which the mode cannot hold.

        `caches`: keep rearranged copies of the weights until `refresh`, for many passes with the same weights.
        """
        self._model = plain_model(model)
        _check_model(self._model)
        self._operands: dict[int, Tensor] | None = {} if caches else None
        self._tables: list[Tensor] | None = None
        """Cosines and sines of all positions so far."""
        self._device = self._model.model.embed_tokens.weight.device
        self.check()

    def refresh(self) -> None:
        """Call after the weights have changed."""
        if self._operands is not None:
            self._operands.clear()

    @torch.no_grad()
    def check(self) -> None:
        """Test on this machine that products and functions of the model's shapes give a row the same bits everywhere."""
        check_functions(self._device)
        for weight in {(tuple(w.shape), w.dtype): w for w in self._weights()}.values():
            product(weight.new_zeros(1, weight.shape[1]), operand_of(weight))
        for size in {layer.self_attn.head_dim for layer in self._model.model.layers}:
            tile_rows(size, self._device)

    def _weights(self) -> list[Tensor]:
        return [w for m in linears(self._model) for w in m.parameters() if w.dim() == 2]

    def hidden(self, ids_T: Tensor, positions_T: Tensor, state: BitwiseState) -> Tensor:
        """The last hidden states [T, ·], normed; differentiable."""
        inner = self._model.model
        hidden = F.embedding(ids_T, inner.embed_tokens.weight)
        cos_T1D, sin_T1D = self._rotations(positions_T, state.longest, hidden.dtype)
        recomputes = torch.is_grad_enabled() and self._model.is_gradient_checkpointing
        for number, layer in enumerate(inner.layers):
            inputs = layer, number, hidden, cos_T1D, sin_T1D, state
            hidden = checkpoint(self._layer, *inputs, use_reentrant=False) if recomputes else self._layer(*inputs)
        return rms_norm(hidden, inner.norm.weight, inner.norm.variance_epsilon)

    @torch.no_grad()
    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V] in fp32."""
        head = self._model.lm_head
        return linear(hidden_ND, head.weight, head.bias, self._operand(head.weight)).float()

    def _layer(
        self, layer: Any, number: int, hidden: Tensor, cos_T1D: Tensor, sin_T1D: Tensor, state: BitwiseState
    ) -> Tensor:
        attention, mlp, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
        x = rms_norm(hidden, norms[0].weight, norms[0].variance_epsilon)
        query, key, value = (
            self._linear(part, x).unflatten(-1, (-1, attention.head_dim))
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if type(layer).__name__ == "Qwen3DecoderLayer":
            query, key = (
                rms_norm(part, norm.weight, norm.variance_epsilon)
                for part, norm in ((query, attention.q_norm), (key, attention.k_norm))
            )
        query, key = (part * cos_T1D + _turned(part) * sin_T1D for part in (query, key))
        rules = AttentionRules(attention.scaling, layer_window(layer))
        attended = state.attend(number, query, key, value, rules)
        hidden = hidden + self._linear(attention.o_proj, attended.flatten(1))
        x = rms_norm(hidden, norms[1].weight, norms[1].variance_epsilon)
        return hidden + self._linear(mlp.down_proj, silu(self._linear(mlp.gate_proj, x)) * self._linear(mlp.up_proj, x))

    def _linear(self, layer: Any, x: Tensor) -> Tensor:
        if type(layer) is nn.Linear:
            return linear(x, layer.weight, layer.bias, self._operand(layer.weight))
        out = self._linear(layer.base_layer, x)
        for name in () if layer.disable_adapters else layer.active_adapters:
            if name in layer.lora_A:
                inner, outer = layer.lora_A[name], layer.lora_B[name]
                delta = self._linear(outer, self._linear(inner, x.to(inner.weight.dtype))) * layer.scaling[name]
                out = (out + delta).to(out.dtype)
        return out

    def _operand(self, weight: Tensor) -> Tensor | None:
        if self._operands is None:
            return None
        if id(weight) not in self._operands:
            self._operands[id(weight)] = operand_of(weight)
        return self._operands[id(weight)]

    @torch.no_grad()
    def _rotations(self, positions_T: Tensor, longest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, 1, D]. A position's are always computed in the same call."""
        while self._tables is None or len(self._tables[0]) < longest:
            first = 0 if self._tables is None else len(self._tables[0])
            positions = torch.arange(first, first + _TABLE, device=self._device)
            probe = torch.empty(0, dtype=dtype, device=self._device)
            new = [part[0] for part in self._model.model.rotary_emb(probe, positions[None])]
            before = [part[:0] for part in new] if self._tables is None else self._tables
            self._tables = [torch.cat(parts) for parts in zip(before, new, strict=True)]
        cos_LD, sin_LD = self._tables
        return cos_LD[positions_T][:, None], sin_LD[positions_T][:, None]


def _turned(x: Tensor) -> Tensor:
    """The halves of each head swapped, the new first one negated."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _check_model(model: Any) -> None:
    """Raise unless the decoder computes all of this model."""
    name = type(model).__name__
    if not is_of_family(model):
        raise NotBitwise(
            f"bitwise covers Llama, Qwen2, Qwen3 and Mistral as transformers has them; this is {name}. Run without bitwise."
        )
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in _ROPE_BY_LENGTH:
        raise NotBitwise(
            f"{name} has rotations of the kind {rope['rope_type']!r}, which change with the longest sequence of a batch. Run "
            "without bitwise."
        )
    for layer in linears(model):
        if (problem := _layer_problem(layer)) is not None:
            raise NotBitwise(
                f"bitwise covers plain linear layers and LoRA on them; {name} has {problem}. Run without bitwise."
            )


def _layer_problem(layer: Any) -> str | None:
    if type(layer) is nn.Linear:
        kinds = {type(weight) for weight in layer.parameters()}
        return (
            None
            if kinds <= {nn.Parameter}
            else f"weights of the kind {', '.join(k.__name__ for k in kinds)} (sharded?)"
        )
    is_lora = hasattr(layer, "lora_A") and type(getattr(layer, "base_layer", None)) is nn.Linear
    if not is_lora:
        return f"a layer of the kind {type(layer).__name__}"
    if layer.merged:
        return "a merged LoRA adapter; unmerge it"
    if getattr(layer, "lora_variant", None):
        return "LoRA of another kind than the plain one (DoRA?)"
    if any(not isinstance(dropout, nn.Identity) for dropout in layer.lora_dropout.values()):
        return "LoRA with dropout; set lora_dropout=0"
    return None
