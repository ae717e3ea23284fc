"""One forward pass over flat tokens for the embedded inference engine on a CPU: from token ids to the requested logits.

Three implementations, from general to fast, with equal results up to rounding:

- the model's own modules,
- the model's own modules with packed linear layers,
- for the Llama family: the same arithmetic in fewer, larger operations (`FusedLlama`).

A product of few rows with a large matrix spends most of its time rearranging that matrix. PyTorch rearranges on every call,
because training changes the weights; between two policy versions once is enough. A row should have the same result whatever
other rows are in the batch. Math libraries promise no such thing: they choose kernels by processor, dtype, shape, number of
rows and threads. So `keeps_rows` tries the shapes that a model has, and a layer takes the first layout that holds.
"""

import logging
import platform
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ludic.models.attention import SKIP_MASK, AttentionRules, AttentionState
from ludic.models.llama import LlamaAttention, is_of_family, linears

MIN_ROWS_PACKED = 2
"""A product with a single row takes another path through the libraries."""
MIN_ROWS_PLAIN = 16
ROWS_PER_THREAD = 4
"""Threads divide the rows of a plain product; one with fewer rows rounds otherwise (MKL, 1 to 16 threads)."""
_LARGE = 1 << 18
"""Elements from which oneDNN's layout is faster; measured on Neoverse-N1 with 1 to 64 rows."""
_PROBED_BATCHES = (2, 3, 5, 9, 16, 17, 20, 24, 33, 40, 64, 100, 130)
_PROBED_ROWS = 260
_PROBED_OUTPUTS = 8192
"""A head has as many outputs as there are tokens; trying all of them would take seconds and a gigabyte."""
_PERIOD = 100_003
"""Different values in a probed matrix."""


class Layout(Enum):
    """The order in which a matrix is stored for its products."""

    PLAIN = "plain"
    """The order of `nn.Linear`."""
    TRANSPOSED = "transposed"
    """Faster for small matrices, where oneDNN's fixed cost per call dominates."""
    BLOCKED = "blocked"
    """oneDNN's layout."""

    def arrange(self, weight: Tensor) -> Tensor:
        if self is Layout.BLOCKED:
            blocked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, MIN_ROWS_PLAIN)
            return blocked
        return weight.t().contiguous() if self is Layout.TRANSPOSED else weight

    def product(self, x: Tensor, arranged: Tensor, bias: Tensor | None) -> Tensor:
        """`x` times the transposed weight, plus the bias."""
        if self is Layout.BLOCKED:
            out: Tensor = torch.ops.mkldnn._linear_pointwise(x, arranged, bias, "none", [], "")
            return out
        if self is Layout.PLAIN:
            return F.linear(x, arranged, bias)
        flat = x.reshape(-1, x.shape[-1])
        out = torch.mm(flat, arranged) if bias is None else torch.addmm(bias, flat, arranged)
        return out.view(*x.shape[:-1], arranged.shape[1])


def keeps_rows(layout: Layout, num_in: int, num_out: int, dtype: torch.dtype, min_rows: int) -> bool:
    """True if products of this shape, on this processor and with this number of threads, give a row the same result in all of
    the tried batches of at least `min_rows` rows."""
    return _keeps_rows(layout, num_in, num_out, dtype, min_rows, torch.get_num_threads())


@cache
@torch.inference_mode()
def _keeps_rows(layout: Layout, num_in: int, num_out: int, dtype: torch.dtype, min_rows: int, num_threads: int) -> bool:
    values = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)).to(dtype)
    x, weight = (
        values.repeat(-(-size * num_in // _PERIOD))[: size * num_in].view(size, num_in)
        for size in (_PROBED_ROWS, min(num_out, _PROBED_OUTPUTS))
    )
    arranged = layout.arrange(weight)
    everything = layout.product(x, arranged, None)
    return all(
        torch.equal(layout.product(x[:count].contiguous(), arranged, None), everything[:count])
        for count in _PROBED_BATCHES
        if count >= min_rows
    )


class PackedLinear(nn.Module):
    """One or several `nn.Linear` with the same input, over a rearranged private copy of their weights.

    Call `refresh` after the weights have changed. The outputs of several linears are concatenated.
    """

    def __init__(self, *linears: nn.Linear, layout: Layout | None = None) -> None:
        """`layout`: the one to take, untried; by default the fastest that keeps rows."""
        super().__init__()
        self._linears = linears  # a tuple: unregistered, so that parameters are not counted twice
        self.weight = linears[0].weight
        self.bias = linears[0].bias if len(linears) == 1 else None
        """Some modules read weight and bias of their layers without calling them."""
        self.in_features = linears[0].in_features
        self.out_features = sum(linear.out_features for linear in linears)
        layouts = _layouts(self.in_features * self.out_features, self.weight.dtype)
        shape = self.in_features, self.out_features, self.weight.dtype, MIN_ROWS_PACKED
        found = None if layout else next((layout for layout in layouts if keeps_rows(layout, *shape)), None)
        self.keeps_rows = found is not None
        """True if a row, from two rows on, has the same result whatever other rows are in the batch."""
        self._layout = layout or found or layouts[0]
        self._packed: Tensor
        self._bias: Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the current weights."""
        biases = [linear.bias.detach() for linear in self._linears if linear.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._packed = self._layout.arrange(_joined([linear.weight.detach() for linear in self._linears]))

    def forward(self, x: Tensor, first_row: int = 0) -> Tensor:
        """`first_row`: the place in the pass of the first row of `x`, for layers that treat rows differently."""
        return self._layout.product(x, self._packed, self._bias)


Pack: TypeAlias = Callable[..., PackedLinear]
"""Makes a packed layer of linear layers with the same input."""


def _layouts(num_elements: int, dtype: torch.dtype) -> list[Layout]:
    """Layouts of a matrix of this size, the fastest first."""
    if not torch.backends.mkldnn.is_available():
        return [Layout.TRANSPOSED]
    if dtype is torch.bfloat16:
        return [Layout.BLOCKED]
    found = [Layout.TRANSPOSED, Layout.BLOCKED]
    return found[::-1] if num_elements >= _LARGE else found


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def is_packable(module: nn.Module) -> bool:
    """True if a linear layer is in fp32, or in bf16 where oneDNN computes in it."""
    return type(module) is nn.Linear and (
        module.weight.dtype is torch.float32 or (module.weight.dtype is torch.bfloat16 and _has_bf16())
    )


@cache
def _has_bf16() -> bool:
    is_x86 = platform.machine() in ("x86_64", "AMD64")  # not tried on others
    return is_x86 and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


_MLP_ROWS = 256
"""Rows that pass an MLP at a time: what lies between its matrices stays in the processor's cache."""


def can_fuse(model: Any) -> bool:
    """True if the model belongs to the family, its layers are unwrapped, and its norms may be summed in its dtype."""
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


logger = logging.getLogger(__name__)


# Letters: T flat tokens, N requested positions, V vocabulary.
class Forward(Protocol):
    """The interface that the runner calls."""

    @property
    def min_rows(self) -> int:
        """Minimum rows of a batch for a row's result to be independent of the other rows."""
        ...

    @property
    def keeps_rows(self) -> bool:
        """True if the result is independent on this processor, as tried with the shapes of the model's matrix products. Mixtures
        promise nothing: False, without a try."""
        ...

    def logits(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState, where_N: Tensor) -> Tensor:
        """[N, V] at the flat positions `where_N`."""
        ...

    def refresh(self) -> None:
        """Call after the weights have changed."""
        ...


def make_forward(view: Any, *, pack: bool, packed: Pack | None = None) -> Forward:
    """The fastest implementation for this model. It may replace modules of `view`, which must be the caller's own tree.

    `packed` makes its packed layers, if they are other than `PackedLinear`."""
    if not pack:
        return ModuleForward(view, [])
    if can_fuse(view):
        fused = FusedLlama(view, packed or PackedLinear)
        if _agree(fused, ModuleForward(view, []), view.config.vocab_size):
            return fused
        logger.warning("%s differs from its family's arithmetic; its own modules are used", type(view).__name__)
    return ModuleForward(view, _pack_linears(view, packed or PackedLinear))


def packed_bytes(model: nn.Module) -> int:
    """Memory of the packed copies."""
    linears = [m for m in model.modules() if isinstance(m, nn.Linear) and is_packable(m)]
    return sum(linear.weight.numel() * linear.weight.element_size() for linear in linears)


class ModuleForward:
    """Through transformers' own modules."""

    def __init__(self, model: Any, packed: list[PackedLinear]) -> None:
        self._model = model
        self._packed = packed
        plain = [module for module in model.modules() if type(module) is nn.Linear]
        self._plain_shapes = {(layer.in_features, layer.out_features, layer.weight.dtype) for layer in plain}
        self._has_other_products = not _computes_by(model, PackedLinear, nn.Linear)
        is_packed = packed and _computes_by(model, PackedLinear)
        self.min_rows = MIN_ROWS_PACKED if is_packed else max(MIN_ROWS_PLAIN, ROWS_PER_THREAD * torch.get_num_threads())

    @property
    def keeps_rows(self) -> bool:
        return (
            not self._has_other_products
            and all(layer.keeps_rows for layer in self._packed)
            and all(keeps_rows(Layout.PLAIN, *shape, self.min_rows) for shape in self._plain_shapes)
        )

    def logits(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState, where_N: Tensor) -> Tensor:
        out: Tensor = self._model(
            input_ids=ids_T[None],
            position_ids=positions_T[None],
            attention_mask=SKIP_MASK.to(ids_T.device),
            use_cache=False,
            logits_to_keep=where_N,
            ludic_state=state,
        ).logits[0]
        return out

    def refresh(self) -> None:
        for layer in self._packed:
            layer.refresh()


def _pack_linears(model: nn.Module, pack: Pack = PackedLinear) -> list[PackedLinear]:
    """Replace every linear layer of this tree by a packed one."""
    packed = []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if is_packable(child):
                layer = pack(child)
                setattr(parent, name, layer)
                packed.append(layer)
    return packed


def _computes_by(model: nn.Module, *kinds: type[nn.Module]) -> bool:
    """True if layers of these kinds do every matrix product (mixtures of experts have others)."""
    known = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, *kinds))}
    return all(id(p) in known for p in model.parameters() if p.dim() >= 2)


class _SelfAttention:
    """Attention of each token to itself alone: enough to compare two implementations, without a cache."""

    def __init__(self) -> None:
        self.rules: dict[int, AttentionRules] = {}

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        self.rules[layer] = rules
        group = query_THD.shape[1] // value_TKD.shape[1]
        weight = torch.sigmoid((query_THD * key_TKD.repeat_interleave(group, dim=1)).sum(-1, keepdim=True))
        return weight * value_TKD.repeat_interleave(group, dim=1)


@torch.inference_mode()
def _agree(one: Forward, other: Forward, vocab_size: int) -> bool:
    """True if two implementations pass the same attention rules and return the same logits."""
    ids_T, positions_T = torch.arange(16) % vocab_size, torch.arange(0, 48, 3)
    states = _SelfAttention(), _SelfAttention()
    a, b = (w.logits(ids_T, positions_T, s, torch.arange(16)) for w, s in zip((one, other), states, strict=True))
    return states[0].rules == states[1].rules and torch.allclose(
        a, b, rtol=1e-3, atol=1e-3 * float(b.nan_to_num().std()) + 1e-6, equal_nan=True
    )
