"""Attention over a `TokenTree`, exact and differentiable, in two ways.

Merged: every chain attends to itself, and every branch to the part of a chain that it continues, by slices of the keys. The
results are merged by their log-sum-exp. The gradient of each call is flash attention's own backward pass, given the merged
output and log-sum-exp.

Gathered: the keys of a chain's ancestors are copied in front of the chain's, for one call; sliding windows and soft-caps need this.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.models.attention import AttentionRules, with_sinks
from ludic.models.packed_attention import Gradients, LengthGroup, attend_groups, length_groups, to_device
from ludic.models.prefix_tree import TokenTree

aten = torch.ops.aten
_MAX_GATHERED = 1.5
"""On a GPU, keys are gathered while they are at most this many times the tree's tokens: one call costs less than several."""


# Letters: T tokens of the tree, Q tokens that ask in one call, L tokens that they see, H query heads, K key/value heads,
# D head size; N sequences of one padded call, M the longest of them.
class TreeSequences:
    """`AttentionState` of a forward pass over a `TokenTree`."""

    def __init__(self, tree: TokenTree, device: torch.device, *, merges: bool | None = None) -> None:
        self._tree = tree
        self._device = device
        self._merges = merges
        """Whether full attention is merged; None decides by cost."""
        self._longest = int(tree.positions_T.max()) + 1

    @torch.compiler.disable  # the calls differ from batch to batch
    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        # Under autocast the rotary embedding returns queries and keys in fp32; only values are in half precision.
        query_THD, key_TKD = query_THD.to(value_TKD.dtype), key_TKD.to(value_TKD.dtype)
        inputs = query_THD, key_TKD, value_TKD
        window = self._window(rules)
        if query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16) and rules.softcap is None:
            return self.attend_varlen(*inputs, rules.scaling, window, rules.sinks_H)
        if not query_THD.is_cuda and rules.softcap is None and window is None and self._is_merged:
            out: Tensor = _Attention.apply(*inputs, rules.sinks_H, *self._padded_calls, rules.scaling)
            return out
        return attend_groups(self._gathered_groups, *inputs, rules)

    def attend_varlen(
        self,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        scaling: float,
        window: int | None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """On a GPU in half precision."""
        out: Tensor = _Attention.apply(query_THD, key_TKD, value_TKD, sinks_H, *self._calls(window), scaling)
        return out

    def attend_by_hand(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> tuple[Tensor, Gradients]:
        """The same outside autograd: [T, H, D], and how its gradient goes on."""
        first, further = self._calls(self._window(rules))
        out_THD, lse_TH = _merged(query_THD, key_TKD, value_TKD, first, further, rules.scaling)

        def gradients(grad_THD: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _gradients((grad_THD.contiguous(), *inputs, out_THD, lse_TH), first, further, rules.scaling)

        return out_THD, gradients

    def _window(self, rules: AttentionRules) -> int | None:
        """None where it is no limit."""
        return rules.sliding_window if (rules.sliding_window or self._longest) < self._longest else None

    def _calls(self, window: int | None) -> "tuple[list[_VarlenCall], list[_VarlenCall]]":
        if window is None and self._is_merged:
            return self._varlen_calls
        return [replace(self._gathered_call, window_left=-1 if window is None else window - 1)], []

    @cached_property
    def _is_merged(self) -> bool:
        if self._merges is not None:
            return self._merges
        # On a CPU, gathered keys need a mask: up to 1.4 times slower, and at best (prompts of 32 tokens) a tenth faster.
        num_tokens = self._tree.num_tokens
        return self._device.type == "cpu" or sum(map(len, self._tree.before_C)) > (_MAX_GATHERED - 1) * num_tokens

    @cached_property
    def _lengths(self) -> list[int]:
        return (self._tree.stops_C - self._tree.starts_C).tolist()

    @cached_property
    def _padded_calls(self) -> "tuple[list[_PaddedCall], list[_PaddedCall]]":
        chains = [_PaddedCall(group, group, is_causal=True) for group in length_groups(self._lengths, self._device)]
        branches = [
            _PaddedCall(_one_sequence(b.start, b.stop), _one_sequence(b.chain_start, b.chain_stop), is_causal=False)
            for level in self._tree.levels
            for b in level
        ]
        return chains, branches

    @cached_property
    def _varlen_calls(self) -> "tuple[list[_VarlenCall], list[_VarlenCall]]":
        chains = [np.arange(*bounds) for bounds in zip(self._tree.starts_C, self._tree.stops_C, strict=True)]
        branches = [
            self._varlen_call(
                [np.arange(b.start, b.stop) for b in level], [np.arange(b.chain_start, b.chain_stop) for b in level]
            )
            for level in self._tree.levels
        ]
        return [self._varlen_call(chains, chains, is_causal=True)], branches

    @cached_property
    def _gathered_call(self) -> "_VarlenCall":
        chains = [np.arange(*bounds) for bounds in zip(self._tree.starts_C, self._tree.stops_C, strict=True)]
        paths = [np.concatenate(both) for both in zip(self._tree.before_C, chains, strict=True)]
        return self._varlen_call(chains, paths, is_causal=True)

    @cached_property
    def _gathered_groups(self) -> list[LengthGroup]:
        return length_groups(self._lengths, self._device, self._tree.above_C.tolist(), self._tree.before_C)

    def _varlen_call(self, asks: list[np.ndarray], sees: list[np.ndarray], *, is_causal: bool = False) -> "_VarlenCall":
        (cu_q, longest_q), (cu_k, longest_k) = (self._bounds(list(map(len, places))) for places in (asks, sees))
        return _VarlenCall(
            self._where(np.concatenate(asks)),
            self._where(np.concatenate(sees)),
            cu_q,
            cu_k,
            longest_q,
            longest_k,
            is_causal,
        )

    def _where(self, places: np.ndarray) -> slice | Tensor:
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 == len(places) and (np.diff(places) == 1).all():
            return slice(first, last + 1)
        return to_device(places, self._device)

    def _bounds(self, lengths: list[int]) -> tuple[Tensor, int]:
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return to_device(bounds, self._device), max(lengths)


def _one_sequence(start: int, stop: int) -> LengthGroup:
    return LengthGroup(start, stop, (stop - start,), None)


class _Call(Protocol):
    """One attention call over some of the tree's tokens."""

    @property
    def asks(self) -> slice | Tensor: ...

    @property
    def sees(self) -> slice | Tensor: ...

    def attend(self, query_QHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """[Q, H, D] and its log-sum-exp [Q, H]."""
        ...

    def gradients(self, grad_QHD: Tensor, *saved: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        """Of queries, keys and values, from these, the merged output and its log-sum-exp."""
        ...


@dataclass(frozen=True, slots=True)
class _PaddedCall:
    """On a CPU: neighbouring sequences of similar length, padded on the right."""

    queries: LengthGroup
    keys: LengthGroup
    is_causal: bool

    @property
    def asks(self) -> slice:
        return slice(self.queries.start, self.queries.end)

    @property
    def sees(self) -> slice:
        return slice(self.keys.start, self.keys.end)

    def attend(self, query_QHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        query, key, value = self.queries.pad(query_QHD), self.keys.pad(key_LKD), self.keys.pad(value_LKD)
        out_NHMD, lse_NHM = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, self.is_causal, scale=scaling
        )
        return self.queries.unpad(out_NHMD), self.queries.unpad(lse_NHM)

    def gradients(self, grad_QHD: Tensor, *saved: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse = saved
        grad_q, grad_k, grad_v = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            self.queries.pad(grad_QHD), self.queries.pad(query), self.keys.pad(key), self.keys.pad(value),
            self.queries.pad(out), self.queries.pad(lse), 0.0, self.is_causal, scale=scaling,
        )  # fmt: skip
        return self.queries.unpad(grad_q), self.keys.unpad(grad_k), self.keys.unpad(grad_v)


@dataclass(frozen=True, slots=True)
class _VarlenCall:
    """On a GPU in half precision: sequences end to end. If causal, the queries of each are its last tokens."""

    asks: slice | Tensor
    sees: slice | Tensor
    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int
    is_causal: bool
    window_left: int = -1

    def attend(self, query_QHD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        out_QHD, lse_HQ = aten._flash_attention_forward(
            query_QHD, key_LKD, value_LKD, *self._layout, 0.0, self.is_causal, False, scale=scaling, **self._window
        )[:2]
        return out_QHD, lse_HQ.t()

    def gradients(self, grad_QHD: Tensor, *saved: Tensor, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, out, lse_QH = saved
        unused = query.new_empty(2, dtype=torch.uint64)  # the state of dropout, of which there is none
        return aten._flash_attention_backward(
            grad_QHD, query, key, value, out, lse_QH.t().contiguous(), *self._layout, 0.0, self.is_causal,
            unused, unused, scale=scaling, **self._window,
        )  # fmt: skip

    @property
    def _layout(self) -> tuple[Tensor, Tensor, int, int]:
        # At a bound of one query, the kernel lays out the log-sum-exp in another way.
        return self.cu_q, self.cu_k, max(self.longest_q, 2), self.longest_k

    @property
    def _window(self) -> dict[str, int]:
        return {"window_size_left": self.window_left, "window_size_right": 0 if self.is_causal else -1}


class _Attention(torch.autograd.Function):
    """Attention by several calls: all tokens ask in the first ones, in order and once; `further` results are merged into theirs."""

    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        sinks_H: Tensor | None,
        first: Sequence[_Call],
        further: Sequence[_Call],
        scaling: float,
    ) -> Tensor:
        query, key, value = (x.contiguous() for x in (query_THD, key_TKD, value_TKD))
        out_THD, lse_TH = _merged(query, key, value, first, further, scaling)
        if sinks_H is not None:
            out_THD, lse_TH = with_sinks(out_THD, lse_TH, sinks_H)
        ctx.save_for_backward(query, key, value, out_THD, lse_TH, sinks_H)
        ctx.first, ctx.further, ctx.scaling = first, further, scaling
        return out_THD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> tuple[Tensor | None, ...]:
        *saved, out_THD, lse_TH, sinks_H = ctx.saved_tensors
        grads = _gradients(
            (grad_THD.contiguous(), *saved, out_THD, lse_TH.contiguous()), ctx.first, ctx.further, ctx.scaling
        )
        grad_sinks = None
        if sinks_H is not None:
            # A sink is a key whose value is zero: its probability times −(gradient · output), as for every key.
            share_TH = torch.exp(sinks_H.to(lse_TH.dtype) - lse_TH)
            grad_sinks = -(share_TH * (grad_THD.to(lse_TH.dtype) * out_THD).sum(-1)).sum(0).to(sinks_H.dtype)
        return *grads, grad_sinks, None, None, None


def varlen_with_sinks(
    query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, cu: Tensor, longest: int, rules: AttentionRules
) -> Tensor:
    """Whole sequences end to end, on a GPU in half precision, with attention sinks."""
    whole = slice(0, query_THD.shape[0])
    window_left = -1 if rules.sliding_window is None else rules.sliding_window - 1
    call = _VarlenCall(whole, whole, cu, cu, longest, longest, is_causal=True, window_left=window_left)
    out: Tensor = _Attention.apply(query_THD, key_TKD, value_TKD, rules.sinks_H, [call], [], rules.scaling)
    return out


def _merged(
    query: Tensor, key: Tensor, value: Tensor, first: Sequence[_Call], further: Sequence[_Call], scaling: float
) -> tuple[Tensor, Tensor]:
    """[T, H, D] and its log-sum-exp [T, H]."""

    def attend(call: _Call) -> tuple[Tensor, Tensor]:
        return call.attend(_take(query, call.asks), _take(key, call.sees), _take(value, call.sees), scaling)

    found = [attend(call) for call in first]
    out_THD, lse_TH = found[0] if len(found) == 1 else (torch.cat(x) for x in zip(*found, strict=True))
    for call in further:
        part, part_lse = attend(call)
        before, before_lse = _take(out_THD, call.asks), _take(lse_TH, call.asks)
        share = torch.sigmoid(part_lse - before_lse)[..., None]
        out_THD[call.asks] = torch.lerp(before.to(share.dtype), part.to(share.dtype), share).to(part.dtype)
        lse_TH[call.asks] = torch.logaddexp(before_lse, part_lse)
    return out_THD, lse_TH


def _gradients(
    saved: tuple[Tensor, ...], first: Sequence[_Call], further: Sequence[_Call], scaling: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values; `saved` are the gradient of the merged output, these three, the output, its log-sum-exp."""
    grad, query, key, value, out, lse = saved
    # The gradients of many branches meet in one key, so they add up in the precision of the log-sum-exp, at least fp32.
    grad_k, grad_v = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (key, value))

    def add(call: _Call) -> Tensor:
        asks, sees = call.asks, call.sees
        asked = [_take(x, asks) for x in (grad, query)]
        part_q, part_k, part_v = call.gradients(
            *asked, _take(key, sees), _take(value, sees), _take(out, asks), _take(lse, asks), scaling=scaling
        )
        for whole, part in ((grad_k, part_k), (grad_v, part_v)):
            if isinstance(sees, slice):
                whole[sees] += part
            else:
                whole.index_add_(0, sees, part.to(whole.dtype))
        return part_q

    found = [add(call) for call in first]
    grad_q = found[0] if len(found) == 1 else torch.cat(found)
    for call in further:
        grad_q[call.asks] += add(call)
    return grad_q, grad_k.to(key.dtype), grad_v.to(value.dtype)


def _take(flat: Tensor, where: slice | Tensor) -> Tensor:
    return flat[where] if isinstance(where, slice) else flat.index_select(0, where)
