"""The forward pass of the Llama family on a GPU, in nine or ten kernels per layer.

Queries, keys and values come from one matrix product, gate and up projection from another; both use joined copies of the
weights, which `refresh` renews. Triton kernels do the rest of a layer. Nothing is compiled for a batch size, so a new size
costs a capture of a CUDA graph and no more. Results equal transformers' own modules up to rounding; `fused_forward`
compares the two before it returns one. A LoRA adapter of peft is two more products beside each of the four, with joined copies
too; adapters that requests name are in `AdapterSlots`.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import SKIP_MASK, AttentionRules
from ludic.models.head import plain_model
from ludic.models.llama import LlamaAttention, is_of_family, linears
from ludic.models.packed_attention import PackedSequences
from ludic_gpu.cuda.adapter_slots import AdapterSlots, StackedProduct
from ludic_gpu.cuda.kernels import rms_norm, rotate_and_store, row_product
from ludic_gpu.llama.adapters import adapter_of, base_linear, has_plain_layers
from ludic_gpu.llama.kernels import silu_mul

logger = logging.getLogger(__name__)

_MAX_DIFFERENCE = 0.05
"""Largest difference of the logits of fused and own modules, relative to their size: bf16 rounding gives about 0.01."""

# Letters: T flat tokens, H query heads, K key/value heads, D head size, S slots.
Attend = Callable[[int, Tensor, Tensor, Tensor, AttentionRules], Tensor]
"""(layer, queries [T, H, D], keys [T, K, D], values, rules) → [T, H, D]."""


@dataclass(slots=True)
class _Layer:
    norm: Tensor
    mlp_norm: Tensor
    epsilon: float
    qkv: Tensor
    qkv_bias: Tensor | None
    out: Tensor
    gate_up: Tensor
    down: Tensor
    num_heads: int
    head_norms: tuple[Tensor, Tensor, float] | None
    rules: AttentionRules
    joined: list[tuple[Tensor, list[Tensor]]]
    """Copies, and the weights they join."""
    adapters: "list[_JoinedAdapter | None]"
    """The adapters of the products qkv, out, gate_up and down."""


class _JoinedAdapter:
    """The adapters of projections with the same input as two matrices: x → A x for all of them, and what each adds to its part."""

    def __init__(self, modules: list[Any]) -> None:
        self._modules = modules
        weight, sizes = base_linear(modules[0]).weight, [base_linear(module).out_features for module in modules]
        found = [adapter_of(module, weight.dtype) for module in modules]
        ranks = [0 if adapter is None else len(adapter.a_RN) for adapter in found]
        self._a_RN, self._b_MR = weight.new_zeros(sum(ranks), weight.shape[1]), weight.new_zeros(sum(sizes), sum(ranks))
        self._parts = list(
            zip(
                self._a_RN.split(ranks),
                (m.split(ranks, 1)[i] for i, m in enumerate(self._b_MR.split(sizes))),
                strict=True,
            )
        )
        self.refresh()

    def refresh(self) -> None:
        for module, (a_RN, b_MR) in zip(self._modules, self._parts, strict=True):
            adapter = adapter_of(module, torch.float32)
            if adapter is not None:
                a_RN.copy_(adapter.a_RN)
                b_MR.copy_(adapter.b_MR * adapter.scale)

    def add(self, out_TM: Tensor, x_TN: Tensor) -> Tensor:
        return out_TM.addmm_(F.linear(x_TN, self._a_RN), self._b_MR.t())


@dataclass(frozen=True, slots=True)
class RowSlots:
    """The slots of adapters of a pass: of its rows, and the number of slots among which they are."""

    slots_T: Tensor
    num_slots: int

    @property
    def parts(self) -> tuple[Tensor, int]:
        return self.slots_T, self.num_slots

    def select(self, where_N: Tensor) -> "RowSlots":
        return RowSlots(self.slots_T.index_select(0, where_N), self.num_slots)


class FusedForward:
    """A Llama, Qwen2, Qwen3 or Mistral decoder over flat tokens."""

    def __init__(self, model: Any, max_length: int, *, has_slots: bool = False) -> None:
        """`has_slots`: rows may have adapters of `self.slots`."""
        inner = model.model
        self.embedding, self._head, self._norm = inner.embed_tokens.weight, model.lm_head.weight, inner.norm
        with torch.no_grad():
            positions_1L = torch.arange(max_length, device=self.embedding.device)[None]
            cosines, sines = inner.rotary_emb(self.embedding[:1, None], positions_1L)
            self._cosines_LD, self._sines_LD = cosines[0].contiguous(), sines[0].contiguous()
            self._layers = [_read_layer(layer) for layer in inner.layers]
        self.has_windows = any(layer.rules.sliding_window is not None for layer in self._layers)
        self._has_adapters = any(adapter is not None for layer in self._layers for adapter in layer.adapters)
        self._stacked = (
            [_stacked_products(number, layer) for number, layer in enumerate(inner.layers)] if has_slots else []
        )
        self._stacked_head = StackedProduct(["lm_head"], [len(self._head)], self._head)
        self.slots = AdapterSlots([*(p for products in self._stacked for p in products), self._stacked_head])

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights. Buffers stay where they are, since captured graphs read them."""
        for layer in self._layers:
            for copy, parts in layer.joined:
                torch.cat(parts, out=copy)
            for adapter in layer.adapters:
                if adapter is not None:
                    adapter.refresh()

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: Attend,
        store: Callable[[int], tuple[Tensor, Tensor, Tensor]] | None,
        rows: RowSlots | None = None,
    ) -> Tensor:
        """Last hidden states, before the final norm. `store`: for a layer, (keys [S, K, D], values, slots of the new tokens).
        `rows`: the adapters of the tokens."""
        x = F.embedding(ids_T, self.embedding)
        num_tokens, size = x.shape[0], self._cosines_LD.shape[1]
        is_single = num_tokens == 1 and not self._has_adapters and rows is None
        for number, layer in enumerate(self._layers):
            adds = self._adds(number, rows)
            if is_single:
                qkv = row_product(x, layer.qkv, layer.qkv_bias, norm=(layer.norm, layer.epsilon))
            else:
                normed = rms_norm(x, layer.norm, layer.epsilon)
                qkv = adds(0, F.linear(normed, layer.qkv, layer.qkv_bias), normed)
            rotate_and_store(
                qkv, positions_T, self._cosines_LD, self._sines_LD, layer.num_heads, layer.head_norms,
                store(number) if store is not None else None,
            )  # fmt: skip
            heads = qkv.view(num_tokens, -1, size)
            num_kv = (heads.shape[1] - layer.num_heads) // 2
            query, key, value = heads.split([layer.num_heads, num_kv, num_kv], dim=1)
            attended = attend(number, query, key, value, layer.rules).reshape(num_tokens, -1)
            if is_single:
                row_product(attended, layer.out, add_to=x)
                gated = row_product(x, layer.gate_up, norm=(layer.mlp_norm, layer.epsilon), is_gated=True)
                row_product(gated, layer.down, add_to=x)
            else:
                adds(1, x.addmm_(attended, layer.out.t()), attended)
                normed = rms_norm(x, layer.mlp_norm, layer.epsilon)
                gated = silu_mul(adds(2, F.linear(normed, layer.gate_up), normed))
                adds(3, x.addmm_(gated, layer.down.t()), gated)
        return x

    def logits(self, hidden_ND: Tensor, rows: RowSlots | None = None) -> Tensor:
        normed = rms_norm(hidden_ND, self._norm.weight, self._norm.variance_epsilon)
        out = F.linear(normed, self._head)
        return out if rows is None else self._stacked_head.add(out, normed, *rows.parts)

    def _adds(self, number: int, rows: RowSlots | None) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Adds to one of the four products of a layer what adapters give: (product, its result, its input) → the result."""

        def add(product: int, out_TM: Tensor, x_TN: Tensor) -> Tensor:
            own = self._layers[number].adapters[product]
            if own is not None:
                own.add(out_TM, x_TN)
            return out_TM if rows is None else self._stacked[number][product].add(out_TM, x_TN, *rows.parts)

        return add


def _stacked_products(number: int, layer: Any) -> list[StackedProduct]:
    """The products qkv, out, gate_up and down, as `_read_layer` joins them."""
    attention, mlp = layer.self_attn, layer.mlp
    found = {
        "self_attn": [
            {"q_proj": attention.q_proj, "k_proj": attention.k_proj, "v_proj": attention.v_proj},
            {"o_proj": attention.o_proj},
        ],
        "mlp": [{"gate_proj": mlp.gate_proj, "up_proj": mlp.up_proj}, {"down_proj": mlp.down_proj}],
    }
    return [
        StackedProduct(
            [f"model.layers.{number}.{block}.{name}" for name in linears],
            [linear.out_features for linear in linears.values()],
            next(iter(linears.values())).weight,
        )
        for block, products in found.items()
        for linears in products
    ]


def _read_layer(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    outer = [attention.q_proj, attention.k_proj, attention.v_proj]
    products = [outer, [attention.o_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]]
    projections, (out,), gate_up, (down,) = ([base_linear(module) for module in modules] for modules in products)
    joined = [
        (torch.cat(parts), parts)
        for parts in (
            [linear.weight.detach() for linear in projections],
            [linear.weight.detach() for linear in gate_up],
            [linear.bias.detach() for linear in projections if linear.bias is not None],
        )
        if parts
    ]
    read = LlamaAttention.of(layer)
    norms = None
    if read.head_norms is not None:
        q_norm, k_norm = read.head_norms
        norms = q_norm.weight, k_norm.weight, q_norm.variance_epsilon
    return _Layer(
        norm=layer.input_layernorm.weight,
        mlp_norm=layer.post_attention_layernorm.weight,
        epsilon=layer.input_layernorm.variance_epsilon,
        qkv=joined[0][0],
        qkv_bias=joined[2][0] if len(joined) > 2 else None,
        out=out.weight,
        gate_up=joined[1][0],
        down=down.weight,
        num_heads=read.num_heads,
        head_norms=norms,
        rules=read.rules,
        joined=joined,
        adapters=[
            _JoinedAdapter(modules) if any(adapter_of(m, torch.float32) is not None for m in modules) else None
            for modules in products
        ],
    )


def fused_bytes(model: Any) -> int:
    """An upper bound of the memory of the joined copies: that of all linear layers."""
    found = linears(plain_model(model)) if can_fuse(model) else []
    return sum(m.weight.numel() * m.weight.element_size() for m in found)


def can_fuse(model: Any) -> bool:
    """True if the model belongs to the family and its layers are plain, but for LoRA adapters."""
    model = plain_model(model)
    return is_of_family(model) and has_plain_layers(model)


@torch.inference_mode()
def fused_forward(model: Any, max_length: int, *, has_slots: bool = False) -> FusedForward | None:
    """The fused pass for this model, whose attention goes through `ludic_attention`; None if the two give different logits."""
    model = plain_model(model)
    with torch.inference_mode(False), torch.no_grad():
        fused = FusedForward(model, max_length, has_slots=has_slots)
    ids_T = torch.arange(16, device=fused.embedding.device) % model.config.vocab_size
    positions_T = torch.arange(16, device=ids_T.device)
    state = PackedSequences([16], ids_T.device)
    ours = fused.logits(fused.hidden(ids_T, positions_T, state.attend, None)).float()
    theirs = model(
        input_ids=ids_T[None], position_ids=positions_T[None], attention_mask=SKIP_MASK.to(ids_T.device), use_cache=False,
        ludic_state=state,
    ).logits[0].float()  # fmt: skip
    if float((ours - theirs).norm()) <= _MAX_DIFFERENCE * float(theirs.norm()):
        return fused
    logger.warning("%s differs from its family's arithmetic; its own modules are used", type(model).__name__)
    return None
