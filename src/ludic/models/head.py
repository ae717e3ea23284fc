"""The output layer: log-probabilities of chosen tokens, computed in chunks of logits.

All logits of 16k tokens over a vocabulary of 152k take ten gigabytes, and their gradient as much again. So the forward pass
keeps two numbers per token, and the backward pass recomputes the logits of each chunk.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ludic.models.attention import AttentionState
from ludic.models.kinds import part_if_installed
from ludic.types import ConfigError


# Letters: A positions, S candidates of all positions, C positions of one chunk, V vocabulary.
@dataclass(frozen=True, slots=True)
class CandidateMask:
    """Candidate tokens of each position, concatenated; all other tokens have probability zero there. A position without
    candidates allows the whole vocabulary."""

    ids_S: Tensor
    row_S: Tensor
    """Position of each candidate."""
    starts: tuple[int, ...]
    """Offset of each position's candidates, and the total at the end; on the host, where chunks are cut."""

    def mask(self, here: slice, vocab: int) -> Tensor | None:
        """[C, V], True for candidates; None if every position allows the whole vocabulary."""
        own = slice(self.starts[here.start], self.starts[here.stop])
        if own.start == own.stop:
            return None
        num_rows = here.stop - here.start
        rows = self.row_S[own] - here.start
        mask_CV = torch.zeros(num_rows, vocab, dtype=torch.bool, device=rows.device)
        mask_CV[rows, self.ids_S[own]] = True
        is_whole_C = torch.ones(num_rows, dtype=torch.bool, device=rows.device)
        is_whole_C[rows] = False
        return mask_CV | is_whole_C[:, None]

    def select(self, rows: Sequence[int | None]) -> "CandidateMask":
        """The candidates of these positions, in this order; None is one that allows the whole vocabulary."""
        spans = [range(0) if row is None else range(self.starts[row], self.starts[row + 1]) for row in rows]
        ends = list(itertools.accumulate(map(len, spans), initial=0))
        device = self.ids_S.device
        taken_S = torch.tensor([place for span in spans for place in span], dtype=torch.long, device=device)
        row_S = torch.tensor([row for row, span in enumerate(spans) for _ in span], dtype=torch.long, device=device)
        return CandidateMask(self.ids_S.index_select(0, taken_S), row_S, tuple(ends))


T = TypeVar("T")
EntropyMode: TypeAlias = Literal["watch", "train"]
_CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 1 << 27, 1 << 28
"""Logits in memory at a time: half a gigabyte, in fp32 on a CPU, in half precision on a GPU."""


@dataclass(frozen=True, slots=True)
class Head:
    """The output layer, from the last hidden state to logits."""

    source: nn.Linear | Tensor
    """The layer, or its weight [V, D]. A sharded model gathers parameters around each computation, so a layer's weight is
    read only at use."""
    softcap: float | None = None
    """Gemma 2 squashes its logits: softcap · tanh(logits / softcap)."""
    scale: float = 1.0
    """Granite and Falcon-H1 multiply their logits; here the hidden states are multiplied."""

    @property
    def weight_VD(self) -> Tensor:
        """The full weight, also if ranks share the layer (tensor parallel)."""
        return whole(self.source if isinstance(self.source, Tensor) else self.source.weight)

    @property
    def bias_V(self) -> Tensor | None:
        """Set for Phi and GPT-J."""
        bias = None if isinstance(self.source, Tensor) else self.source.bias
        return None if bias is None else whole(bias)

    @property
    def shape(self) -> tuple[int, int]:
        """(vocabulary, hidden size)."""
        weight = self.source if isinstance(self.source, Tensor) else self.source.weight
        return weight.shape[0], weight.shape[1]

    def inputs(self, hidden: Tensor) -> Tensor:
        """The hidden states as the layer takes them."""
        return hidden if self.scale == 1 else hidden * self.scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of these hidden states, in fp32."""
        logits = raw_logits(self.inputs(hidden), self.weight_VD, self.bias_V).float()
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def whole(weight: Tensor) -> Tensor:
    """Gathered from all ranks if it is sharded."""
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


def raw_logits(hidden: Tensor, weight_VD: Tensor, bias_V: Tensor | None) -> Tensor:
    """The output layer, in the precision of the hidden states."""
    return F.linear(hidden, weight_VD.to(hidden.dtype), None if bias_V is None else bias_V.to(hidden.dtype))


@runtime_checkable
class GathersWeights(Protocol):
    """A model whose weights are gathered only while it computes, such as a sharded one."""

    def ludic_compute(self, work: Callable[[], Any]) -> Any:
        """Run `work` with gathered weights and return its result."""
        ...


def compute(model: Any, work: Callable[[], T]) -> T:
    """Run `work`, which reads the model's weights (forward passes of its parts included), and return its result."""
    if isinstance(model, GathersWeights):
        result: T = model.ludic_compute(work)
        return result
    return work()


def plain_model(model: Any) -> Any:
    """The transformers model inside a peft wrapper (adapters are part of its layers), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def find_head(model: Any) -> Head:
    """The model's head, checked: applied to the decoder's output it gives the model's own logits."""
    inner = plain_model(model)
    linear = inner.get_output_embeddings()
    if linear is None or type(linear) is not torch.nn.Linear:
        raise ConfigError(
            f"{type(inner).__name__} has no plain output layer (found {type(linear).__name__}); its log-probabilities cannot be "
            "computed in chunks."
        )
    settings = inner.config.get_text_config().to_dict()
    scale = (
        settings.get("lm_head_multiplier") or settings.get("logit_scale") or 1 / (settings.get("logits_scaling") or 1)
    )
    head = Head(linear, settings.get("final_logit_softcapping"), scale)
    with torch.no_grad():
        compute(model, lambda: _check_head(inner, head))
    return head


def _check_head(model: Any, head: Head) -> None:
    device = model.get_input_embeddings().weight.device
    if device.type == "meta":
        return
    was_training = model.training
    model.eval()
    ids = torch.arange(4, device=device)[None] % head.shape[0]
    ours = head.logits(decoder_of(model)(input_ids=ids, use_cache=False).last_hidden_state)
    theirs = model(input_ids=ids, use_cache=False).logits.float()
    model.train(was_training)
    if not torch.allclose(
        ours, theirs, rtol=1e-2, atol=1e-2 * float(theirs.nan_to_num().abs().max()) + 1e-6, equal_nan=True
    ):
        raise ConfigError(
            f"{type(model).__name__} transforms its logits in a way that Ludic does not know (a scale, a shift), so its "
            "log-probabilities cannot be computed in chunks."
        )


def hidden_states(model: Any, ids_T: Tensor, positions_T: Tensor, state: AttentionState) -> Tensor:
    """The decoder's last hidden states [T, D] of flat tokens."""
    out = decoder_of(model)(
        input_ids=ids_T[None],
        position_ids=positions_T[None],
        attention_mask=torch.empty(0, 0, 0, 0, device=ids_T.device),
        use_cache=False,
        ludic_state=state,
    )
    hidden_TD: Tensor = out.last_hidden_state[0]
    return hidden_TD


def decoder_of(model: Any) -> Any:
    """The module whose output is the last hidden states."""
    inner = plain_model(model)
    found = inner.get_decoder()
    return inner.model if found is inner else found  # Llama 4 names itself


def is_decoder(model: Any) -> bool:
    """True if this is a transformers model with a decoder and an output layer."""
    inner = plain_model(model)
    return hasattr(getattr(inner, "config", None), "get_text_config") and hasattr(inner, "get_decoder")


# Letters: B samples, L tokens of the longest, V vocabulary.
def whole_logits(model: Any, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
    """[B, L, V] from any module that returns logits: alone, first in a tuple, or as `.logits`. It gets a mask if it takes one."""
    forward = getattr(model, "_orig_mod", model).forward  # torch.compile hides what it wraps
    takes = inspect.signature(forward).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in takes.values())
    options = {"attention_mask": mask_BL} if takes_any or "attention_mask" in takes else {}
    by_name = takes_any or "input_ids" in takes
    out = model(input_ids=ids_BL, **options) if by_name else model(ids_BL, **options)
    logits = _logits_in(out)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[:2] != ids_BL.shape:
        what = f"a tensor of {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
        raise ConfigError(
            f"{type(model).__name__} was given token ids of {tuple(ids_BL.shape)} and returned {what}; logits of "
            f"({ids_BL.shape[0]}, {ids_BL.shape[1]}, vocabulary) are needed: as a tensor, first in a tuple, or as .logits."
        )
    return logits


def _logits_in(out: Any) -> Any:
    if hasattr(out, "logits"):
        return out.logits
    if isinstance(out, Mapping):
        return out.get("logits")
    return out[0] if isinstance(out, (tuple, list)) and out else out


# Letters: A chosen tokens, D hidden size, V vocabulary, C tokens of one chunk.
def chosen_logps(
    hidden_AD: Tensor,
    head: Head,
    targets_A: Tensor,
    inverse_temperature_A: Tensor | None = None,
    *,
    entropy: EntropyMode | None = None,
    candidates: CandidateMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and optionally the entropy of its distribution; fp32, differentiable.

    With `candidates` the distribution covers only these tokens; a target must be among its position's candidates. The entropy
    mode "watch" computes no gradient, which is cheaper.
    """
    scale = torch.ones_like(targets_A, dtype=torch.float32) if inverse_temperature_A is None else inverse_temperature_A
    if torch.is_autocast_enabled(hidden_AD.device.type):
        dtype = torch.get_autocast_dtype(hidden_AD.device.type)
        hidden_AD = hidden_AD.to(dtype)  # the weight is converted inside: its gradient stays unrounded
    logps, entropies = _ChosenLogps.apply(
        head.inputs(hidden_AD), head.weight_VD, head.bias_V, targets_A, scale, head.softcap, entropy, candidates
    )
    return logps, entropies if entropy is not None else None


def logps_of_logits(
    logits_AV: Tensor,
    targets_A: Tensor,
    inverse_temperature_A: Tensor,
    *,
    entropy: EntropyMode | None = None,
    candidates: CandidateMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """`chosen_logps` for a model that returns logits only."""
    mask = _chunk_mask(candidates, slice(0, logits_AV.shape[0]), logits_AV)
    _, logps, entropies = _read(logits_AV, mask, targets_A, inverse_temperature_A, None, entropy is not None)
    return logps, entropies.detach() if entropies is not None and entropy == "watch" else entropies


class _ChosenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        softcap: float | None,
        mode: EntropyMode | None,
        candidates: CandidateMask | None,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, with_entropy = hidden.shape[0], mode is not None
        narrow_weight = weight.to(hidden.dtype)
        normaliser = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
        logps = torch.empty_like(normaliser)
        entropy = torch.empty_like(normaliser) if with_entropy else torch.empty(0, device=hidden.device)
        kernels = _kernels(hidden, softcap, candidates)
        read = _fused(_read) if hidden.is_cuda and kernels is None else _read
        for here in chunks(num_tokens, weight.shape[0], GPU_CHUNK_ELEMENTS if hidden.is_cuda else _CHUNK_ELEMENTS):
            logits = raw_logits(hidden[here], narrow_weight, bias)
            if kernels is not None:
                found = kernels.read_chunk(logits, targets[here], scale[here], with_entropy)
            else:
                found = read(
                    logits, _chunk_mask(candidates, here, logits), targets[here], scale[here], softcap, with_entropy
                )
            normaliser[here], logps[here], own = found
            if own is not None:
                entropy[here] = own
        ctx.save_for_backward(hidden, weight, bias, targets, scale, normaliser, entropy)
        ctx.softcap, ctx.with_entropy, ctx.candidates = softcap, mode == "train", candidates
        if mode != "train":
            ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, grad_logps: Tensor, grad_entropy: Tensor) -> Any:
        hidden, weight, bias, targets, scale, normaliser, entropy = ctx.saved_tensors
        kernels = _kernels(hidden, ctx.softcap, ctx.candidates)
        slope = _fused(_logits_slope) if hidden.is_cuda and kernels is None else _logits_slope

        def grad_of(here: slice, logits: Tensor) -> Tensor:
            of_entropy = (entropy[here], grad_entropy[here]) if ctx.with_entropy else None
            if kernels is not None:
                in_place: Tensor = kernels.slope_in_place(
                    logits, targets[here], scale[here], normaliser[here], grad_logps[here], of_entropy
                )
                return in_place
            mask = _chunk_mask(ctx.candidates, here, logits)
            grad: Tensor = slope(
                logits, mask, targets[here], scale[here], normaliser[here], grad_logps[here], of_entropy, ctx.softcap
            )
            return grad

        elements = GPU_CHUNK_ELEMENTS if hidden.is_cuda else _CHUNK_ELEMENTS
        grads = layer_grads(hidden, weight, bias, ctx.needs_input_grad, elements, grad_of)
        return *grads, None, None, None, None, None


def layer_grads(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    needed: tuple[bool, ...],
    elements: int,
    grad_of: Callable[[slice, Tensor], Tensor],
    logits_of: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias. `grad_of`: (chunk, its raw logits) → the gradient of these logits.
    `logits_of`: how raw logits are computed; the default is `raw_logits`."""
    need_hidden, need_weight, need_bias = needed[:3]
    narrow_weight = weight.to(hidden.dtype)
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
    grad_bias = torch.zeros_like(bias, dtype=torch.float32) if bias is not None and need_bias else None
    for here in chunks(hidden.shape[0], weight.shape[0], elements):
        raw = raw_logits(hidden[here], narrow_weight, bias) if logits_of is None else logits_of(hidden[here])
        grad = grad_of(here, raw)
        if grad_hidden is not None:
            grad_hidden[here] = grad @ narrow_weight
        if grad_weight is not None:
            _add_product(grad_weight, grad.t(), hidden[here])
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=torch.float32)
    # Both are accumulated in fp32.
    return (
        grad_hidden,
        None if grad_weight is None else grad_weight.to(weight.dtype),
        None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a · b to an fp32 matrix. On a GPU the product of half-precision matrices is never rounded to half precision."""
    if total.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)
    else:
        total += a @ b


def _kernels(hidden: Tensor, softcap: float | None, candidates: CandidateMask | None) -> Any:
    """The Triton kernels, where they serve."""
    if not hidden.is_cuda or softcap is not None or candidates is not None:
        return None
    return part_if_installed("head_kernels")


def chunks(num_tokens: int, vocab: int, elements: int) -> list[slice]:
    """Slices of tokens whose logits have at most `elements` values."""
    size = max(1, elements // vocab)
    return [slice(start, min(start + size, num_tokens)) for start in range(0, num_tokens, size)]


def _chunk_mask(candidates: CandidateMask | None, here: slice, logits_CV: Tensor) -> Tensor | None:
    return None if candidates is None else candidates.mask(here, logits_CV.shape[1])


def _read(
    logits_CV: Tensor,
    mask_CV: Tensor | None,
    targets_C: Tensor,
    scale_C: Tensor,
    softcap: float | None,
    with_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log of the normaliser, log-prob of the target, entropy) of a chunk."""
    x = masked(scaled(logits_CV, scale_C, softcap), mask_CV)
    normaliser_C = x.logsumexp(dim=-1)
    chosen_C = x.gather(-1, targets_C[:, None])[:, 0] - normaliser_C
    if not with_entropy:
        return normaliser_C, chosen_C, None
    log_probs = x - normaliser_C[:, None]
    return normaliser_C, chosen_C, -_times_log(log_probs.exp(), log_probs).sum(dim=-1)


def _logits_slope(
    logits_CV: Tensor,
    mask_CV: Tensor | None,
    targets_C: Tensor,
    scale_C: Tensor,
    normaliser_C: Tensor,
    grad_logps_C: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    softcap: float | None,
) -> Tensor:
    """Gradient with respect to a chunk's raw logits, in their dtype."""
    x = scaled(logits_CV, scale_C, softcap)
    log_probs = masked(x, mask_CV) - normaliser_C[:, None]
    probs = log_probs.exp()
    is_target = torch.arange(x.shape[1], device=x.device)[None] == targets_C[:, None]
    grad = (is_target.float() - probs) * grad_logps_C[:, None]
    if of_entropy is not None:
        entropy_C, grad_entropy_C = of_entropy
        # d entropy / d logit = −p · (log p + entropy)
        grad = grad - (_times_log(probs, log_probs) + probs * entropy_C[:, None]) * grad_entropy_C[:, None]
    grad = grad * scale_C[:, None]
    if softcap is not None:
        grad = grad * (1 - (x / (scale_C[:, None] * softcap)).square())
    return grad.to(logits_CV.dtype)


def scaled(logits_CV: Tensor, scale_C: Tensor, softcap: float | None) -> Tensor:
    """Logits in fp32, soft-capped, times the inverse temperature."""
    x = logits_CV.float()
    if softcap is not None:
        x = torch.tanh(x / softcap) * softcap
    return x * scale_C[:, None]


def masked(x_CV: Tensor, mask_CV: Tensor | None) -> Tensor:
    return x_CV if mask_CV is None else x_CV.masked_fill(~mask_CV, float("-inf"))


def _times_log(probs: Tensor, log_probs: Tensor) -> Tensor:
    """p · log p, and 0 where p = 0."""
    return torch.where(probs > 0, probs * log_probs, 0.0)


@cache
def _fused(function: Any) -> Any:
    """Compiled into one kernel at the first use on a GPU, instead of a dozen passes over memory. Importing the compiler alone takes
    a second and a half."""
    return torch.compile(function, dynamic=True)
