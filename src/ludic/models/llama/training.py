"""The decoder of the Llama family with a hand-written backward pass: few kernels, and little to store.

Each layer is one autograd function over the modules' own parameters. It keeps its input, queries, keys and values, the
attention's output, the residual stream after attention, and gate and up projection; norms and the product of gate and up
are computed again in backward. Between two layers the residual stream is a sum of two tensors, which the next norm adds up.
Results equal transformers' own modules up to rounding; `fused_decoder` compares values and gradients before it returns one.
"""

import logging
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ludic.models.attention import SKIP_MASK, AttentionRules, AttentionState
from ludic.models.forward import has_plain_layers, is_of_family, layer_window
from ludic.models.packed_attention import Gradients, PackedSequences
from ludic.models.tree_attention import TreeSequences

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_MAX_DIFFERENCE = 0.05
"""Of fused and own modules, relative to their size: bf16 rounding in every layer gives about 0.01."""


# Letters: T flat tokens, N hidden size, H query heads, K key/value heads, D head size, W = (H + 2K) · D.
class FusedDecoder:
    """A Llama, Qwen2, Qwen3 or Mistral decoder over flat tokens, for training."""

    def __init__(self, model: Any) -> None:
        inner = model.model
        self._embed, self._norm, self._rotary, self._kernels = inner.embed_tokens, inner.norm, inner.rotary_emb, None
        self._layers = [_Layer.of(layer, number) for number, layer in enumerate(inner.layers)]
        self._first = inner.layers[0]
        self._hooks = [hooks for m in model.modules() for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._children = [(m._modules, name, child) for m in model.modules() for name, child in m.named_children()]

    @property
    def is_current(self) -> bool:
        """Whether no module has been replaced or has got a hook since: the fused pass would not notice."""
        return not any(self._hooks) and all(found.get(name) is child for found, name, child in self._children)

    def hidden(self, ids_T: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
        """Last hidden states [T, N], after the final norm."""
        return self.hidden_of(self._embed(ids_T), positions_T, state)

    def hidden_of(self, x_TN: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
        """The same from embeddings."""
        kernels = _kernels(x_TN)
        cosines, sines = self._rotary(x_TN, positions_T[None])
        recomputes = self._first.gradient_checkpointing and self._first.training
        run = _Pass(cosines[0], sines[0], state, kernels, recomputes)
        delta_TN = None
        for layer in self._layers:
            x_TN, delta_TN = _DecoderLayer.apply(layer, run, x_TN, delta_TN, *layer.parameters())
        out: Tensor = _LastNorm.apply(kernels, self._norm.variance_epsilon, x_TN, delta_TN, self._norm.weight)
        return out


@dataclass(slots=True)
class _Pass:
    """What all layers of one forward pass share."""

    cosines_TD: Tensor
    sines_TD: Tensor
    state: AttentionState
    kernels: Any
    recomputes: bool


@dataclass(slots=True)
class _Layer:
    """What a layer computes with besides its parameters, and where these are."""

    number: int
    epsilon: float
    num_heads: int
    num_kv: int
    head_dim: int
    head_norm_epsilon: float | None
    rules: AttentionRules
    stores: list[tuple[dict[str, Any], str]]
    """The modules' dictionaries of parameters, read in each pass: a parameter may be replaced."""

    @classmethod
    def of(cls, layer: Any, number: int) -> "_Layer":
        attention, mlp = layer.self_attn, layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        weighted = [layer.input_layernorm, layer.post_attention_layernorm, *projections, attention.o_proj]
        weighted += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        has_norms = type(layer).__name__ == "Qwen3DecoderLayer"
        norms = [attention.q_norm, attention.k_norm] if has_norms else []
        return cls(
            number=number,
            epsilon=layer.input_layernorm.variance_epsilon,
            num_heads=attention.q_proj.out_features // attention.head_dim,
            num_kv=attention.k_proj.out_features // attention.head_dim,
            head_dim=attention.head_dim,
            head_norm_epsilon=attention.q_norm.variance_epsilon if has_norms else None,
            rules=AttentionRules(attention.scaling, layer_window(layer)),
            stores=[
                *((module._parameters, "weight") for module in weighted),
                *((module._parameters, "bias") for module in projections),
                *((module._parameters, "weight") for module in norms),
            ],
        )

    def parameters(self) -> list[Tensor | None]:
        """Two norms; query, key, value, output, gate, up and down projection; three biases; with head norms, two more norms."""
        return [store[name] for store, name in self.stores]

    def qkv(self, run: _Pass, normed_TN: Tensor, parameters: list[Any]) -> tuple[Tensor, Tensor]:
        """Queries, keys and values [T, W] before head norms, and [T, ≥ H + K, D] rotated; the same memory if there are none."""
        bias = None if parameters[9] is None else torch.cat(parameters[9:12])
        qkv_TW = F.linear(normed_TN, torch.cat(parameters[2:5]), bias)
        return qkv_TW, self.rotated(run, qkv_TW, parameters)

    def rotated(self, run: _Pass, qkv_TW: Tensor, parameters: list[Any]) -> Tensor:
        turned = run.kernels.rotate(qkv_TW, run.cosines_TD, run.sines_TD, self.num_heads, self.head_norms(parameters))
        return turned.view(len(turned), -1, self.head_dim)

    def head_norms(self, parameters: list[Any]) -> tuple[Tensor, Tensor, float] | None:
        return None if self.head_norm_epsilon is None else (*parameters[12:14], self.head_norm_epsilon)

    def split(self, qkv_TW: Tensor, turned_TGD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values."""
        first, last = self.num_heads, self.num_heads + self.num_kv
        return turned_TGD[:, :first], turned_TGD[:, first:last], qkv_TW.view(len(qkv_TW), -1, self.head_dim)[:, last:]


@dataclass(slots=True, weakref_slot=True)
class _Stored:
    """What backward needs of a layer besides its input, the residual stream and its parameters."""

    qkv_TW: Tensor
    attended_TM: Tensor
    gradients: Gradients
    gate_up_TE: Tensor
    """Overwritten in backward."""


class _DecoderLayer(torch.autograd.Function):
    """(x, delta), whose sum is the layer's input → (x after attention, what the MLP adds to it)."""

    @staticmethod
    def forward(
        ctx: Any, layer: _Layer, run: _Pass, x_TN: Tensor, delta_TN: Tensor | None, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        input_TN, normed_TN = run.kernels.add_norm(x_TN, delta_TN, parameters[0], layer.epsilon)
        after_TN, stored = _until_gate(layer, run, input_TN, normed_TN, parameters)
        out_TN = F.linear(run.kernels.silu_mul(stored.gate_up_TE), parameters[8])
        ctx.layer, ctx.run = layer, run
        ctx.stored = None if run.recomputes else stored
        ctx.save_for_backward(input_TN, None if run.recomputes else after_TN, *parameters)
        return after_TN, out_TN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_after_TN: Tensor, grad_out_TN: Tensor) -> tuple[Any, ...]:
        layer, run, stored = ctx.layer, ctx.run, ctx.stored
        input_TN, after_TN, *parameters = ctx.saved_tensors
        if run.recomputes:
            normed_TN = run.kernels.add_norm(input_TN, None, parameters[0], layer.epsilon)[1]
            after_TN, stored = _until_gate(layer, run, input_TN, normed_TN, parameters)
        elif stored is None:
            raise RuntimeError("A backward pass has overwritten what this layer stored: it can run once.")
        ctx.stored = None
        grads = grad_after_TN.contiguous(), grad_out_TN.contiguous()
        return (
            None,
            None,
            *_backward(layer, run, input_TN, after_TN, parameters, stored, *grads, ctx.needs_input_grad[2:]),
        )


def _until_gate(
    layer: _Layer, run: _Pass, input_TN: Tensor, normed_TN: Tensor, parameters: Any
) -> tuple[Tensor, _Stored]:
    """The forward pass up to gate and up projection; first the residual stream after attention."""
    qkv_TW, turned_TGD = layer.qkv(run, normed_TN, parameters)
    attended_THD, gradients = _attend(run.state, layer, *layer.split(qkv_TW, turned_TGD))
    attended_TM = attended_THD.flatten(1)
    delta_TN = F.linear(attended_TM, parameters[5])
    after_TN, normed_TN = run.kernels.add_norm(input_TN, delta_TN, parameters[1], layer.epsilon)
    gate_up_TE = normed_TN.new_empty(len(normed_TN), 2 * len(parameters[6]))
    for part, weight in zip(gate_up_TE.chunk(2, dim=1), parameters[6:8], strict=True):
        torch.mm(normed_TN, weight.t(), out=part)
    return after_TN, _Stored(qkv_TW, attended_TM, gradients, gate_up_TE)


# Letters: M = H · D, E both halves of the MLP.
def _backward(
    layer: _Layer,
    run: _Pass,
    input_TN: Tensor,
    after_TN: Tensor,
    parameters: list[Any],
    stored: _Stored,
    grad_after_TN: Tensor,
    grad_out_TN: Tensor,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, delta and the parameters. `needs`: which of them."""
    kernels, of_weights = run.kernels, needs[2:]
    found: list[Tensor | None] = [None] * len(parameters)
    sums_2PN = kernels.new_sums(input_TN, 2)

    # The MLP, from its output to the residual stream after attention.
    grad_TF = grad_out_TN @ parameters[8]
    grad_gate_up_TE = stored.gate_up_TE
    kernels.silu_mul_backward(grad_gate_up_TE, grad_TF)
    if of_weights[8]:
        found[8] = grad_out_TN.t() @ grad_TF
    del grad_TF
    grad_TN = grad_gate_up_TE @ torch.cat(parameters[6:8])
    grad_after_TN = kernels.norm_backward(after_TN, parameters[1], grad_TN, grad_after_TN, layer.epsilon, sums_2PN[1])
    if of_weights[6] or of_weights[7]:
        found[6:8] = (grad_gate_up_TE.t() @ grad_TN).chunk(2)
    del grad_gate_up_TE, grad_TN, stored.gate_up_TE

    # Attention.
    attended_TM, qkv_TW = stored.attended_TM, stored.qkv_TW
    grad_TM = grad_after_TN @ parameters[5]
    if of_weights[5]:
        found[5] = grad_after_TN.t() @ attended_TM
    norms = layer.head_norms(parameters)
    turned_TGD = qkv_TW.view(len(qkv_TW), -1, layer.head_dim)
    if norms is not None:
        turned_TGD = layer.rotated(run, qkv_TW, parameters)
    grads = stored.gradients(grad_TM.view(len(grad_TM), -1, layer.head_dim), *layer.split(qkv_TW, turned_TGD))
    grad_TW, sums_P2D = kernels.rotate_backward(grads, qkv_TW, run.cosines_TD, run.sines_TD, norms)
    del stored, grad_TM, grads, turned_TGD, qkv_TW, attended_TM
    grad_TN = grad_TW @ torch.cat(parameters[2:5])
    grad_x_TN = kernels.norm_backward(input_TN, parameters[0], grad_TN, grad_after_TN, layer.epsilon, sums_2PN[0])
    sizes = [layer.num_heads * layer.head_dim, layer.num_kv * layer.head_dim, layer.num_kv * layer.head_dim]
    if any(of_weights[2:5]):
        found[2:5] = (grad_TW.t() @ grad_TN).split(sizes)
    if parameters[9] is not None and any(of_weights[9:12]):
        found[9:12] = grad_TW.sum(0).split(sizes)
    if of_weights[0] or of_weights[1]:
        found[0:2] = sums_2PN.sum(1).to(input_TN.dtype).unbind()
    if sums_P2D is not None and (of_weights[12] or of_weights[13]):
        found[12:14] = sums_P2D.sum(0).to(input_TN.dtype).unbind()
    return tuple(
        grad if is_needed else None for grad, is_needed in zip((grad_x_TN, grad_x_TN, *found), needs, strict=True)
    )


class _LastNorm(torch.autograd.Function):
    """The final norm of x + delta."""

    @staticmethod
    def forward(ctx: Any, kernels: Any, epsilon: float, x_TN: Tensor, delta_TN: Tensor, weight_N: Tensor) -> Tensor:
        total_TN, out_TN = kernels.add_norm(x_TN, delta_TN, weight_N, epsilon)
        ctx.kernels, ctx.epsilon = kernels, epsilon
        ctx.save_for_backward(total_TN, weight_N)
        out: Tensor = out_TN
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Any, ...]:
        total_TN, weight_N = ctx.saved_tensors
        sums_1PN = ctx.kernels.new_sums(total_TN, 1)
        grad = ctx.kernels.norm_backward(total_TN, weight_N, grad_TN.contiguous(), None, ctx.epsilon, sums_1PN[0])
        of_weight = sums_1PN[0].sum(0).to(weight_N.dtype) if ctx.needs_input_grad[4] else None
        return None, None, grad, grad, of_weight


# --- attention ---


def _attend(
    state: AttentionState, layer: _Layer, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor
) -> tuple[Tensor, Gradients]:
    """[T, H, D] and how its gradient goes on."""
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
        from ludic.models.llama import kernels  # imports triton, which needs a GPU machine

        return kernels
    from ludic.models.llama import plain

    return plain


# --- whether it serves ---


def fused_decoder(model: Any) -> FusedDecoder | None:
    """The fused pass for this model, whose attention goes through `ludic_attention`; None if it is of another family, wrapped,
    not on a GPU in half precision, or if its own modules give other values or gradients."""
    if not (is_of_family(model) and has_plain_layers(model)):
        return None
    weight = model.model.embed_tokens.weight
    if not weight.is_cuda or weight.dtype not in _HALF or model.config.attention_dropout > 0:
        return None
    parameters = list(model.parameters())
    if any(type(p) is not nn.Parameter or (p.dtype, p.device) != (weight.dtype, weight.device) for p in parameters):
        return None
    fused = FusedDecoder(model)
    if agrees(fused, model):
        return fused
    logger.warning("%s differs from its family's arithmetic; its own modules are trained", type(model).__name__)
    return None


def agrees(fused: FusedDecoder, model: Any, tolerance: float = _MAX_DIFFERENCE) -> bool:
    """Whether fused pass and modules give the same hidden states of sixteen tokens, and the same gradient of their embeddings."""
    decoder = model.get_decoder()
    weight = decoder.embed_tokens.weight
    positions_T = torch.arange(16, device=weight.device)
    x_TN = weight[positions_T % len(weight)].detach().requires_grad_()
    state = PackedSequences([5, 11], weight.device)
    found = []
    with torch.enable_grad():
        for is_fused in (True, False):
            if is_fused:
                hidden_TN = fused.hidden_of(x_TN, positions_T, state)
            else:
                hidden_TN = decoder(
                    inputs_embeds=x_TN[None], position_ids=positions_T[None], attention_mask=SKIP_MASK.to(weight.device),
                    use_cache=False, ludic_state=state,
                ).last_hidden_state[0]  # fmt: skip
            seed = torch.arange(hidden_TN.numel(), device=weight.device).view(hidden_TN.shape).sin().to(weight.dtype)
            found.append((hidden_TN.detach().float(), torch.autograd.grad(hidden_TN, x_TN, seed)[0].float()))
    return all(
        float((ours - theirs).norm()) <= tolerance * float(theirs.norm()) for ours, theirs in zip(*found, strict=True)
    )
