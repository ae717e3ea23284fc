"""The decoder of the Llama family with a hand-written backward pass: few kernels, and little to store.

All layers are one autograd function over the modules' own parameters. A layer keeps its input, queries, keys and values, the
attention's output, the residual stream after attention, and gate and up projection; norms and the product of gate and up
are computed again in backward. Between two layers the residual stream is a sum of two tensors, which the next norm adds up.
Results equal transformers' own modules up to rounding; `fused_decoder` compares values and gradients before it returns one.
Projections may have LoRA adapters (`adapters.py`); gradients of frozen weights are not computed.
"""

import copy
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ludic.models.adapters.adapter import AdapterProduct
from ludic.models.attention import SKIP_MASK, AttentionRules, AttentionState
from ludic.models.head import plain_model
from ludic.models.llama import LlamaAttention, is_of_family
from ludic.models.packed_attention import Gradients, PackedSequences, TreeSequences
from ludic_gpu.llama.adapters import (
    adapter_name,
    adapters_of,
    add_all,
    backward_all,
    base_linear,
    has_adapter,
    has_plain_layers,
    is_plain_linear,
)
from ludic_gpu.llama.graphs import HeldGraphs, PassGraphs
from ludic_gpu.offload import HostTape

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_MAX_DIFFERENCE = 0.02
"""Largest difference of fused and own modules, relative to their size: bf16 rounding in a layer gives less than 0.01."""
_MAX_NOISE = 4.0
"""Times what the last bit of the input changes: a layer rounds about ten times, in either way."""
_NUM_PROJECTIONS = 7
_GIVEN = torch.empty(0)
"""In place of a tensor that is given as a parameter of the pass."""

Tape = list[tuple[Any, Any, Any]]
"""For each layer: its input, the residual stream after attention, and a `_Stored`; the last two are None if they are recomputed.
Then the input of the last norm. With offload, tensors are what `HostTape.pack` returned for them."""


# Letters: T flat tokens, N hidden size, H query heads, K key/value heads, D head size, W = (H + 2K) · D.
class FusedDecoder:
    """A Llama, Qwen2, Qwen3 or Mistral decoder over flat tokens, for training."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed, self._norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        has_adapters = any(has_adapter(module) for layer in inner.layers for module in _projections(layer))
        self._layers = [_Layer.of(layer, number, has_adapters) for number, layer in enumerate(inner.layers)]
        self._first = inner.layers[0]
        self._graphs = PassGraphs()
        self._adapted = [(m, adapter_name(m)) for layer in self._layers for m in layer.projections]
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._children = [(m._modules, name, child) for m in model.modules() for name, child in m.named_children()]

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    @property
    def stored_bytes_per_token(self) -> int:
        """Bytes that all layers store for a token, in half precision."""
        layer = self._layers[0]
        hidden, gate = (layer.parameters()[i].shape[0] for i in (0, 6))  # type: ignore[union-attr]
        heads = (2 * layer.num_heads + 2 * layer.num_kv) * layer.head_dim
        return len(self._layers) * (2 * (2 * hidden + heads + 2 * gate) + 4 * layer.num_heads)

    @property
    def is_current(self) -> bool:
        """True if no module has been replaced or has got a hook since, and the same adapters are active and not merged: the fused
        pass would not notice."""
        return (
            not any(self._hooks)
            and all(found.get(name) is child for found, name, child in self._children)
            and all(adapter_name(m) == name and is_plain_linear(m) for m, name in self._adapted)
        )

    def only(self, number: int) -> "FusedDecoder":
        """The same with one of its layers and the last norm."""
        found = copy.copy(self)
        found._layers = [replace(self._layers[number], number=0)]
        found._graphs = PassGraphs()
        return found

    def hidden(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState, host: HostTape | None = None) -> Tensor:
        """Last hidden states [T, N], after the final norm. `host`: where layers keep what backward needs."""
        return self.hidden_of(self._embed(ids_T), positions_T, state, host)

    def hidden_of(
        self, x_TN: Tensor, positions_T: Tensor, state: AttentionState, host: HostTape | None = None
    ) -> Tensor:
        """The same from embeddings."""
        cosines, sines = self._rotary(x_TN, positions_T[None])
        recomputes = self._first.gradient_checkpointing and self._first.training
        run = Pass(cosines[0], sines[0], state, _kernels(x_TN), recomputes, host)
        parameters: list[Any] = []
        for layer in self._layers:
            adapters = layer.adapters(x_TN.dtype, len(x_TN))
            run.adapters.append([[own._replace(a_RN=_GIVEN, b_MR=_GIVEN) for own in found] for found in adapters])
            parameters += layer.parameters()
            parameters += [tensor for found in adapters for own in found for tensor in (own.a_RN, own.b_MR)]
        parameters.append(self._norm._parameters["weight"])
        if not torch.is_grad_enabled():
            return self.forward(run, x_TN, parameters, keeps=False)[0]
        needs = tuple(p is not None and p.requires_grad for p in parameters)
        # Adapters in the precision of the pass are new tensors each time, which a graph cannot read.
        has_graphs = _has_flash(x_TN) and not self._adapted
        held = self._graphs.take(self, run, x_TN, parameters, needs) if has_graphs else None
        out: Tensor = _Decoder.apply(self, run, held, x_TN, *parameters)
        return out

    # Outside autograd. `parameters`: of all layers, then that of the last norm.

    def forward(
        self, run: "Pass", x_TN: Tensor, parameters: Sequence[Any], *, keeps: bool = True
    ) -> tuple[Tensor, Tape]:
        """Hidden states, and if it `keeps` them, what `backward` needs."""
        tape: Tape = []
        delta_TN: Tensor | None = None
        for layer, own in zip(self._layers, self._by_layer(run, parameters), strict=True):
            input_TN, normed_TN = run.kernels.add_norm(x_TN, delta_TN, own[0], layer.epsilon)
            x_TN, stored = _until_gate(layer, run, input_TN, normed_TN, own)
            inner_TF = run.kernels.silu_mul(stored.gate_up_TE)
            delta_TN = F.linear(inner_TF, own[8])
            add_all(layer.in_pass(run, own)[6:], [delta_TN], inner_TF)
            del inner_TF
            if keeps:
                tape.append(run.kept(input_TN, x_TN, stored))
            del stored
        total_TN, out_TN = run.kernels.add_norm(x_TN, delta_TN, parameters[-1], self._norm.variance_epsilon)
        tape.append((total_TN, None, None))
        return out_TN, tape

    def backward(
        self, run: "Pass", tape: Tape, grad_TN: Tensor, parameters: Sequence[Any], needs: Sequence[bool]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Gradients of the embeddings and of the parameters, where needed. Empties the tape."""
        total_TN = tape.pop()[0]
        sums_1PN = run.kernels.new_sums(total_TN, 1)
        grad_TN = run.kernels.norm_backward(
            total_TN, parameters[-1], grad_TN.contiguous(), None, self._norm.variance_epsilon, sums_1PN[0]
        )
        found: list[list[Tensor | None]] = [[run.kernels.add_up(sums_1PN, total_TN.dtype)[0] if needs[-1] else None]]
        del total_TN
        layers = zip(self._layers, self._by_layer(run, parameters), self._by_layer(run, needs), strict=True)
        for layer, own, needs_own in reversed(list(layers)):
            input_TN, after_TN, stored = run.read(tape.pop())
            if after_TN is None or stored is None:
                normed_TN = run.kernels.add_norm(input_TN, None, own[0], layer.epsilon)[1]
                after_TN, stored = _until_gate(layer, run, input_TN, normed_TN, own)
                del normed_TN
            grad_TN, of_layer = _backward(layer, run, input_TN, after_TN, own, stored, grad_TN, needs_own)
            found.append(of_layer)
        return grad_TN, [grad for grads in reversed(found) for grad in grads]

    def _by_layer(self, run: "Pass", items: Sequence[Any]) -> list[Sequence[Any]]:
        found, start = [], 0
        for layer, adapters in zip(self._layers, run.adapters, strict=True):
            end = start + len(layer.stores) + 2 * sum(map(len, adapters))
            found.append(items[start:end])
            start = end
        return found


@dataclass(slots=True)
class Pass:
    """The state that all layers of one pass share."""

    cosines_TD: Tensor
    sines_TD: Tensor
    state: AttentionState
    kernels: Any
    recomputes: bool
    host: HostTape | None = None
    adapters: list[list[list[AdapterProduct]]] = field(default_factory=list)
    """Adapters of each layer and projection, without their tensors, which are parameters of the pass."""

    def kept(self, input_TN: Tensor, after_TN: Tensor, stored: "_Stored") -> tuple[Any, Any, Any]:
        """The tape's entry of a layer. The output of attention stays on the device: the kernel's closure reads it."""
        pack: Any = self.host.pack if self.host is not None else lambda tensor: tensor
        if self.recomputes:
            return pack(input_TN), None, None
        stored.qkv_TW, stored.gate_up_TE = pack(stored.qkv_TW), pack(stored.gate_up_TE)
        return pack(input_TN), pack(after_TN), stored

    def read(self, kept: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor | None, "_Stored | None"]:
        """The reverse, in the reverse order."""
        input_TN, after_TN, stored = kept
        if self.host is None:
            return input_TN, after_TN, stored
        if stored is not None:
            after_TN, input_TN = self.host.unpack(after_TN), self.host.unpack(input_TN)
            stored.gate_up_TE, stored.qkv_TW = self.host.unpack(stored.gate_up_TE), self.host.unpack(stored.qkv_TW)
            return input_TN, after_TN, stored
        return self.host.unpack(input_TN), None, None


@dataclass(slots=True)
class _Layer:
    """A layer's settings, and where its parameters are."""

    number: int
    epsilon: float
    num_heads: int
    num_kv: int
    head_dim: int
    head_norm_epsilon: float | None
    rules: AttentionRules
    stores: list[tuple[dict[str, Any], str]]
    """The modules' dictionaries of parameters, read in each pass: a parameter may be replaced."""
    projections: list[Any]
    """Query, key, value, output, gate, up and down projection, if the model has adapters; else none."""

    @classmethod
    def of(cls, layer: Any, number: int, has_adapters: bool) -> "_Layer":
        read = LlamaAttention.of(layer)
        linears = [base_linear(module) for module in _projections(layer)]
        weighted = [layer.input_layernorm, layer.post_attention_layernorm, *linears]
        norms = list(read.head_norms or ())
        return cls(
            number=number,
            epsilon=layer.input_layernorm.variance_epsilon,
            num_heads=read.num_heads,
            num_kv=read.num_kv,
            head_dim=read.head_dim,
            head_norm_epsilon=norms[0].variance_epsilon if norms else None,
            rules=read.rules,
            stores=[
                *((module._parameters, "weight") for module in weighted),
                *((module._parameters, "bias") for module in linears[:3]),
                *((module._parameters, "weight") for module in norms),
            ],
            projections=_projections(layer) if has_adapters else [],
        )

    def parameters(self) -> list[Tensor | None]:
        """Two norms; query, key, value, output, gate, up and down projection; three biases; with head norms, two more norms."""
        return [store[name] for store, name in self.stores]

    def adapters(self, dtype: torch.dtype, num_tokens: int) -> list[list[AdapterProduct]]:
        """Adapters of each projection. In a pass, A and B of each follow the parameters."""
        return [adapters_of(module, dtype, num_tokens) for module in self.projections]

    def in_pass(self, run: "Pass", parameters: Any) -> list[list[AdapterProduct]]:
        """The adapters of each projection, with their tensors."""
        if not self.projections:
            return [[]] * _NUM_PROJECTIONS
        tensors = iter(parameters[len(self.stores) :])
        return [
            [own._replace(a_RN=next(tensors), b_MR=next(tensors)) for own in found]
            for found in run.adapters[self.number]
        ]

    @property
    def qkv_sizes(self) -> list[int]:
        return [self.num_heads * self.head_dim, self.num_kv * self.head_dim, self.num_kv * self.head_dim]

    def qkv(self, run: Pass, normed_TN: Tensor, parameters: Any) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [T, W] before head norms, and [T, ≥ H + K, D] rotated; the same memory if there are none."""
        bias = None if parameters[9] is None else torch.cat(parameters[9:12])
        qkv_TW = F.linear(normed_TN, torch.cat(parameters[2:5]), bias)
        add_all(self.in_pass(run, parameters)[:3], qkv_TW.split(self.qkv_sizes, dim=1), normed_TN)
        return qkv_TW, self.rotated(run, qkv_TW, parameters)

    def rotated(self, run: Pass, qkv_TW: Tensor, parameters: Any) -> Tensor:
        turned = run.kernels.rotate(qkv_TW, run.cosines_TD, run.sines_TD, self.num_heads, self.head_norms(parameters))
        return turned.view(len(turned), -1, self.head_dim)

    def head_norms(self, parameters: Any) -> tuple[Tensor, Tensor, float] | None:
        return None if self.head_norm_epsilon is None else (*parameters[12:14], self.head_norm_epsilon)

    def split(self, qkv_TW: Tensor, turned_TGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        first, last = self.num_heads, self.num_heads + self.num_kv
        return turned_TGD[:, :first], turned_TGD[:, first:last], qkv_TW.view(len(qkv_TW), -1, self.head_dim)[:, last:]


def _projections(layer: Any) -> list[Any]:
    attention, mlp = layer.self_attn, layer.mlp
    of_attention = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*of_attention, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


@dataclass(slots=True, weakref_slot=True)
class _Stored:
    """Tensors that backward needs of a layer besides its input, the residual stream and its parameters."""

    qkv_TW: Tensor
    attended_TM: Tensor
    gradients: Gradients
    gate_up_TE: Tensor
    """Overwritten in backward."""


class _Decoder(torch.autograd.Function):
    """Embeddings → hidden states. `held`: the graphs to run it by."""

    @staticmethod
    def forward(
        ctx: Any, decoder: FusedDecoder, run: Pass, held: HeldGraphs | None, x_TN: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.decoder, ctx.run, ctx.held, ctx.tape = decoder, run, held, None
        ctx.save_for_backward(*parameters)
        if held is not None:
            return held.forward(run, x_TN)
        hidden_TN, ctx.tape = decoder.forward(run, x_TN, parameters)
        return hidden_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Any, ...]:
        parameters, held, tape = ctx.saved_tensors, ctx.held, ctx.tape
        ctx.held = ctx.tape = None
        if held is not None:
            grad_x_TN, grads = held.backward(grad_TN)
        elif tape is not None:
            grad_x_TN, grads = ctx.decoder.backward(ctx.run, tape, grad_TN, parameters, ctx.needs_input_grad[4:])
        else:
            raise RuntimeError("A backward pass has overwritten what the layers stored: it can run once.")
        return None, None, None, grad_x_TN if ctx.needs_input_grad[3] else None, *grads


def _until_gate(
    layer: _Layer, run: Pass, input_TN: Tensor, normed_TN: Tensor, parameters: Any
) -> tuple[Tensor, _Stored]:
    """The forward pass up to gate and up projection; first the residual stream after attention."""
    qkv_TW, turned_TGD = layer.qkv(run, normed_TN, parameters)
    attended_THD, gradients = _attend(run.state, layer, *layer.split(qkv_TW, turned_TGD))
    attended_TM = attended_THD.flatten(1)
    delta_TN = F.linear(attended_TM, parameters[5])
    adapters = layer.in_pass(run, parameters)
    add_all(adapters[3:4], [delta_TN], attended_TM)
    after_TN, normed_TN = run.kernels.add_norm(input_TN, delta_TN, parameters[1], layer.epsilon)
    gate_up_TE = normed_TN.new_empty(len(normed_TN), 2 * len(parameters[6]))
    for part, weight in zip(gate_up_TE.chunk(2, dim=1), parameters[6:8], strict=True):
        torch.mm(normed_TN, weight.t(), out=part)
    add_all(adapters[4:6], gate_up_TE.chunk(2, dim=1), normed_TN)
    return after_TN, _Stored(qkv_TW, attended_TM, gradients, gate_up_TE)


# Letters: M = H · D, E both halves of the MLP.
def _backward(
    layer: _Layer,
    run: Pass,
    input_TN: Tensor,
    after_TN: Tensor,
    parameters: Any,
    stored: _Stored,
    grad_out_TN: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of a layer's input and of its parameters, where needed."""
    kernels = run.kernels
    found: list[Tensor | None] = [None] * len(parameters)
    sums_2PN = kernels.new_sums(input_TN, 2)
    adapters = layer.in_pass(run, parameters)

    def adapter_gradients(first: int, grads: Sequence[Tensor], inner: Sequence[Sequence[Tensor]], x: Tensor) -> None:
        place = len(layer.stores) + 2 * sum(map(len, adapters[:first]))
        for own, grad_TM, of_inner in zip(adapters[first : first + len(grads)], grads, inner, strict=True):
            for adapter, grad_TR in zip(own, of_inner, strict=True):
                found[place : place + 2] = adapter.gradients(grad_TM, grad_TR, x)
                place += 2

    # The MLP, from its output to the residual stream after attention. The kernels put a product's input where its gradient was.
    grad_TF = grad_out_TN @ parameters[8]
    inner = backward_all(adapters[6:], [grad_out_TN], grad_TF)
    grad_gate_up_TE = stored.gate_up_TE
    kernels.silu_mul_backward(grad_gate_up_TE, grad_TF)
    if needs[8]:
        found[8] = grad_out_TN.t() @ grad_TF
    adapter_gradients(6, [grad_out_TN], inner, grad_TF)
    del grad_TF
    grad_TN = grad_gate_up_TE @ torch.cat(parameters[6:8])
    inner = backward_all(adapters[4:6], grad_gate_up_TE.chunk(2, dim=1), grad_TN)
    grad_after_TN = kernels.norm_backward(after_TN, parameters[1], grad_TN, grad_out_TN, layer.epsilon, sums_2PN[1])
    if needs[6] or needs[7]:
        found[6:8] = (grad_gate_up_TE.t() @ grad_TN).chunk(2)
    adapter_gradients(4, grad_gate_up_TE.chunk(2, dim=1), inner, grad_TN)
    del grad_gate_up_TE, grad_TN, stored.gate_up_TE

    # Attention.
    attended_TM, qkv_TW = stored.attended_TM, stored.qkv_TW
    grad_TM = grad_after_TN @ parameters[5]
    inner = backward_all(adapters[3:4], [grad_after_TN], grad_TM)
    adapter_gradients(3, [grad_after_TN], inner, attended_TM)
    if needs[5]:
        found[5] = grad_after_TN.t() @ attended_TM
    norms = layer.head_norms(parameters)
    turned_TGD = qkv_TW.view(len(qkv_TW), -1, layer.head_dim)
    if norms is not None:
        turned_TGD = layer.rotated(run, qkv_TW, parameters)
    grads = stored.gradients(grad_TM.view(len(grad_TM), -1, layer.head_dim), *layer.split(qkv_TW, turned_TGD))
    grad_TW, sums_2PD = kernels.rotate_backward(grads, qkv_TW, run.cosines_TD, run.sines_TD, norms)
    del stored, grad_TM, grads, turned_TGD, qkv_TW, attended_TM
    grad_TN = grad_TW @ torch.cat(parameters[2:5])
    sizes = layer.qkv_sizes
    inner = backward_all(adapters[:3], grad_TW.split(sizes, dim=1), grad_TN)
    grad_x_TN = kernels.norm_backward(input_TN, parameters[0], grad_TN, grad_after_TN, layer.epsilon, sums_2PN[0])
    if any(needs[2:5]):
        found[2:5] = (grad_TW.t() @ grad_TN).split(sizes)
    adapter_gradients(0, grad_TW.split(sizes, dim=1), inner, grad_TN)
    if parameters[9] is not None and any(needs[9:12]):
        found[9:12] = grad_TW.sum(0).split(sizes)
    if needs[0] or needs[1]:
        found[0:2] = kernels.add_up(sums_2PN, input_TN.dtype).unbind()
    if sums_2PD is not None and (needs[12] or needs[13]):
        found[12:14] = kernels.add_up(sums_2PD, input_TN.dtype).unbind()
    return grad_x_TN, [grad if is_needed else None for grad, is_needed in zip(found, needs, strict=True)]


# --- attention ---


def _attend(
    state: AttentionState, layer: _Layer, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor
) -> tuple[Tensor, Gradients]:
    """[T, H, D] and the function of its gradients."""
    if isinstance(state, PackedSequences | TreeSequences) and _has_flash(query_THD):
        return state.attend_by_hand(query_THD, key_TKD, value_TKD, layer.rules)
    inputs = query, key, value = tuple(x.detach().requires_grad_() for x in (query_THD, key_TKD, value_TKD))
    with torch.enable_grad():
        attended_THD = state.attend(layer.number, query, key, value, layer.rules)

    def gradients(grad_THD: Tensor, *_: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return torch.autograd.grad(attended_THD, inputs, grad_THD)  # type: ignore[return-value]

    return attended_THD.detach(), gradients


def _has_flash(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in _HALF


def _kernels(x: Tensor) -> Any:
    """Triton's on a GPU."""
    if x.is_cuda:
        from ludic_gpu.llama import kernels

        return kernels
    from ludic_gpu.llama import plain

    return plain


# --- whether it serves ---


def fused_decoder(model: Any) -> FusedDecoder | None:
    """The fused pass for this model, whose attention goes through `ludic_attention`; None if it is of another family, wrapped,
    not on a GPU in half precision, or if its own modules give other values or gradients."""
    model = plain_model(model)
    if not (is_of_family(model) and has_plain_layers(model)):
        return None
    weight = model.model.embed_tokens.weight
    if not weight.is_cuda or weight.dtype not in _HALF or model.config.attention_dropout > 0:
        return None
    parameters = [p for name, p in model.named_parameters() if ".lora_" not in name]
    if any(type(p) is not nn.Parameter or (p.dtype, p.device) != (weight.dtype, weight.device) for p in parameters):
        return None
    fused = FusedDecoder(model)
    if agrees(fused, model):
        return fused
    logger.warning("%s differs from its family's arithmetic; its own modules are trained", type(model).__name__)
    return None


def agrees(fused: FusedDecoder, model: Any, tolerance: float = _MAX_DIFFERENCE) -> bool:
    """True if each layer alone, fused and as a module, gives the same hidden states of sixteen tokens, and the same gradient.

    Trained models amplify rounding: after the 28 layers of a Qwen2.5-1.5B the gradients of two exact ways in bf16 differ by a
    quarter, and each by more from fp32. So layers are compared one by one, and may differ by some times what a change of the
    input by its last bit does to the module.
    """
    decoder = model.get_decoder()
    weight = decoder.embed_tokens.weight
    positions_T = torch.arange(16, device=weight.device)
    x_TN = weight[positions_T % len(weight)].detach()
    ramp_TN = torch.arange(x_TN.numel(), device=weight.device).view(x_TN.shape)
    slope_TN = ramp_TN.sin().to(weight.dtype)
    moved_TN = x_TN * (1 + torch.finfo(weight.dtype).eps * ramp_TN.cos()).to(weight.dtype)
    state, mask = PackedSequences([5, 11], weight.device), SKIP_MASK.to(weight.device)
    angles = decoder.rotary_emb(x_TN, positions_T[None])

    def by_module(layer: Any, x_TN: Tensor) -> Tensor:
        out = layer(
            x_TN[None], attention_mask=mask, position_ids=positions_T[None], position_embeddings=angles, use_cache=False,
            ludic_state=state,
        )  # fmt: skip
        found: Tensor = decoder.norm(out[0] if isinstance(out, tuple) else out)[0]
        return found

    def results(run: Callable[[Tensor], Tensor], x_TN: Tensor) -> list[Tensor]:
        x_TN = x_TN.detach().requires_grad_()
        with torch.enable_grad():
            hidden_TN = run(x_TN)
        return [hidden_TN.detach().float(), torch.autograd.grad(hidden_TN, x_TN, slope_TN)[0].float()]

    for number, layer in enumerate(decoder.layers):
        one = fused.only(number)
        ours = results(lambda x: one.hidden_of(x, positions_T, state), x_TN)  # noqa: B023 - called here
        theirs, moved = (results(lambda x: by_module(layer, x), x) for x in (x_TN, moved_TN))  # noqa: B023
        for our, their, other in zip(ours, theirs, moved, strict=True):
            allowed = tolerance * float(their.norm()) + _MAX_NOISE * float((other - their).norm())
            if not float((our - their).norm()) <= allowed:
                return False
    return True
