"""Log-probabilities of targets at an output layer with LoRA adapters, and their gradient, for training runs.

A loss that is a function of log-probabilities has its gradient before the decoder's backward pass begins. So the output layer is
computed here by hand, outside autograd: logits that fit in memory are kept from the forward to the backward pass, tokens without a
gradient are left out of the backward pass, and the targets of one token share its logits.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ludic.models.adapters import AdapterBank
from ludic.models.adapters.bank import Spans, row_spans
from ludic.models.head import Head, chunks, raw_logits

_CHUNK_ELEMENTS, _GPU_CHUNK_ELEMENTS = 1 << 24, 1 << 28
"""Logits of one product: 64 megabytes on a CPU. Smaller ones read the layer's weight more often."""
_KEPT_ELEMENTS, _GPU_KEPT_ELEMENTS = 1 << 28, 1 << 30
"""Logits that may wait for the backward pass: a gigabyte in fp32 on a CPU, four on a GPU. More are computed again."""


class HeadAdapter(NamedTuple):
    """The adapter of the output layer on some of the tokens."""

    start: int
    end: int
    a_RD: nn.Parameter
    b_VR: nn.Parameter
    scale: float


class _Chunk(NamedTuple):
    """Some tokens and their targets."""

    tokens: slice
    targets: slice
    exponentials_CV: Tensor | None
    """e to the power of the logits minus the token's largest, for the backward pass; None: computed again."""


# Letters: T tokens, P (token, target) pairs, D hidden size, V vocabulary, R rank, C tokens of one chunk, U those with a gradient.
class TargetLogps:
    """One forward pass of the output layer, and its backward pass."""

    def __init__(
        self,
        hidden_TD: Tensor,
        head: Head,
        adapters: Sequence[HeadAdapter],
        token_P: Tensor,
        target_P: Tensor,
        *,
        for_backward: bool,
    ) -> None:
        """`token_P`: the token whose hidden state predicts each target."""
        self._head, self._adapters = head, adapters
        self._x_TD = head.inputs(hidden_TD.detach())
        self._weight_VD = head.weight_VD.detach().to(self._x_TD.dtype)
        self._order_P = torch.argsort(token_P, stable=True)
        self._token_P, self._target_P = token_P[self._order_P], target_P[self._order_P]
        num_tokens, vocab = len(hidden_TD), len(self._weight_VD)
        limits = (_GPU_CHUNK_ELEMENTS, _GPU_KEPT_ELEMENTS) if hidden_TD.is_cuda else (_CHUNK_ELEMENTS, _KEPT_ELEMENTS)
        is_kept = for_backward and num_tokens * vocab <= limits[1] and head.softcap is None
        self._normaliser_T = torch.empty(num_tokens, dtype=torch.float32, device=hidden_TD.device)
        self._largest_T = torch.empty_like(self._normaliser_T)
        slices = chunks(num_tokens, vocab, limits[0])
        ends = torch.tensor([here.stop for here in slices], device=token_P.device)
        bounds = pairwise([0, *torch.searchsorted(self._token_P, ends).tolist()])
        sorted_P = torch.empty(len(token_P), dtype=torch.float32, device=hidden_TD.device)
        self._chunks: list[_Chunk] = []
        for here, (first, last) in zip(slices, bounds, strict=True):
            own = slice(first, last)
            sorted_P[own], exponentials_CV = self._read(here, own)
            self._chunks.append(_Chunk(here, own, exponentials_CV if is_kept else None))
        self.logps_P = torch.empty_like(sorted_P).index_copy_(0, self._order_P, sorted_P)
        """In fp32, in the order of the targets."""

    def _read(self, here: slice, own: slice) -> tuple[Tensor, Tensor]:
        """The log-probs of a chunk's targets, and its exponentials."""
        logits_CV = self._logits(here)
        row_P = self._token_P[own] - here.start
        chosen_P = logits_CV[row_P, self._target_P[own]]
        largest_C = logits_CV.amax(dim=-1)
        exponentials_CV = logits_CV.sub_(largest_C[:, None]).exp_()
        self._largest_T[here] = largest_C
        self._normaliser_T[here] = largest_C + exponentials_CV.sum(dim=-1).log()
        return chosen_P - self._normaliser_T[here][row_P], exponentials_CV

    def _logits(self, here: slice) -> Tensor:
        """[C, V] in fp32."""
        logits_CV = raw_logits(self._x_TD[here], self._weight_VD, self._head.bias_V)
        for own, rows in self._within(here):
            x_CD = self._x_TD[here][rows]
            a_RD, b_VR = _narrow(own, x_CD.dtype)
            logits_CV[rows].addmm_(x_CD @ a_RD.t(), b_VR.t(), alpha=own.scale)
        logits_CV, softcap = logits_CV.float(), self._head.softcap
        return logits_CV if softcap is None else torch.tanh(logits_CV / softcap) * softcap

    def _within(self, here: slice) -> list[tuple[HeadAdapter, slice]]:
        """The adapters of a chunk's tokens, and which of these tokens have them."""
        cut = [
            (own, max(own.start, here.start) - here.start, min(own.end, here.stop) - here.start)
            for own in self._adapters
        ]
        return [(own, slice(start, end)) for own, start, end in cut if start < end]

    def backward(self, grad_P: Tensor) -> Tensor:
        """[T, D] the gradient of the hidden states, given that of `logps_P`. Gradients of adapters are added to their `.grad`.

        Once: it overwrites what the forward pass has kept.
        """
        grad_P = grad_P[self._order_P]
        grad_TD = torch.zeros_like(self._x_TD)
        for chunk in self._chunks:
            counts_P = grad_P[chunk.targets] != 0
            row_P = (self._token_P[chunk.targets] - chunk.tokens.start)[counts_P]
            if len(row_P):
                used_U, at_P = row_P.unique_consecutive(return_inverse=True)
                targets = at_P, self._target_P[chunk.targets][counts_P], grad_P[chunk.targets][counts_P]
                grad_TD[chunk.tokens].index_copy_(0, used_U, self._backward_of(chunk, used_U, *targets))
        return grad_TD if self._head.scale == 1 else grad_TD * self._head.scale

    def _backward_of(self, chunk: _Chunk, used_U: Tensor, at_P: Tensor, target_P: Tensor, grad_P: Tensor) -> Tensor:
        """[U, D] the gradient of some tokens of a chunk; `at_P`: the one of them that each target belongs to."""
        x_UD = self._x_TD[chunk.tokens].index_select(0, used_U)
        grad_U = torch.zeros(len(used_U), device=grad_P.device).index_add_(0, at_P, grad_P)
        slope_UV = self._probabilities(chunk, used_U).mul_(-grad_U[:, None])
        slope_UV.index_put_((at_P, target_P), grad_P, accumulate=True)
        if self._head.softcap is not None:
            slope_UV *= 1 - (self._logits(chunk.tokens).index_select(0, used_U) / self._head.softcap).square()
        slope_UV = slope_UV.to(x_UD.dtype)
        grad_UD = slope_UV @ self._weight_VD
        for own, rows in self._within(chunk.tokens):
            bounds = torch.tensor([rows.start, rows.stop], device=used_U.device)
            start, end = torch.searchsorted(used_U, bounds).tolist()
            a_RD, b_VR = _narrow(own, x_UD.dtype)
            own_UV, own_UD = slope_UV[start:end], x_UD[start:end]
            grad_UR = (own_UV @ b_VR).mul_(own.scale)
            grad_UD[start:end].addmm_(grad_UR, a_RD)
            _add_grad(own.a_RD, grad_UR.t() @ own_UD)
            _add_grad(own.b_VR, own_UV.t() @ (own_UD @ a_RD.t()).mul_(own.scale))
        return grad_UD

    def _probabilities(self, chunk: _Chunk, used_U: Tensor) -> Tensor:
        """[U, V] of some tokens of a chunk."""
        kept_CV = chunk.exponentials_CV
        largest_C, normaliser_C = self._largest_T[chunk.tokens], self._normaliser_T[chunk.tokens]
        if kept_CV is None:
            kept_CV, largest_C = self._logits(chunk.tokens).sub_(normaliser_C[:, None]).exp_(), normaliser_C
        is_whole = len(used_U) == len(kept_CV)
        found_UV = kept_CV if is_whole else kept_CV.index_select(0, used_U)
        return found_UV.mul_((largest_C - normaliser_C).exp().index_select(0, used_U)[:, None])


def target_logps(
    bank: AdapterBank, hidden_TD: Tensor, spans: Spans, token_P: Tensor, target_P: Tensor, *, for_backward: bool
) -> TargetLogps:
    """Log-probabilities of pairs of a token and a target that it predicts, under the adapters of these spans."""
    adapters = [
        HeadAdapter(own.start, own.end, *pair, own.adapter.scale)
        for own in row_spans(spans)[0]
        if (pair := own.adapter.weights(bank.head_name)) is not None
    ]
    return TargetLogps(hidden_TD, bank.head, adapters, token_P, target_P, for_backward=for_backward)


def _narrow(adapter: HeadAdapter, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A and B in the precision of the pass."""
    return adapter.a_RD.detach().to(dtype), adapter.b_VR.detach().to(dtype)


def _add_grad(parameter: nn.Parameter, grad: Tensor) -> None:
    grad = grad.to(parameter.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
