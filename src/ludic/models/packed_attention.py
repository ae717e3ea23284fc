"""Attention over concatenated sequences, each attending causally within itself: for training, and on GPUs also for sampling.

On a GPU in half precision it is one variable-length flash call. Elsewhere, consecutive sequences of similar length are
padded on the right into one SDPA call (under a causal mask, padding on the right changes nothing before it).

Attention over a `TokenTree` is exact and differentiable in two ways. Merged: every chain attends to itself, and every branch to
the part of a chain that it continues, by slices of the keys; the results are merged by their log-sum-exp, and the gradient of each
call is flash attention's own backward pass, given the merged output and log-sum-exp. Gathered: the keys of a chain's ancestors are
copied in front of the chain's, for one call; sliding windows and soft-caps need this.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.models.attention import AttentionRules, explicit_attention, with_sinks
from ludic.models.prefix_tree import TokenTree

aten = torch.ops.aten
_SHORT = 32
_MAX_WASTE_SHORT, _MAX_WASTE = 1.25, 1.05
"""A group holds at most this many times its own tokens after padding. Up to `_SHORT` tokens, a call costs more than padding."""

Gradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(gradient of attention's output [T, H, D], and the queries, keys and values again) → the gradients of these three."""


@dataclass(frozen=True, slots=True)
class _LengthGroup:
    """Consecutive sequences computed by one padded call."""

    start: int
    end: int
    """Flat tokens."""
    lengths: tuple[int, ...]
    places: Tensor | None
    """Index of each token among count × longest; None if all sequences have one length."""
    before: Tensor | None = None
    """Flat tokens that all of them continue, and see: the beginning that they share."""

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def pad(self, flat: Tensor) -> Tensor:
        """[tokens, heads, …] of the group → [count, heads, longest, …]."""
        if self.places is not None:
            flat = flat.new_zeros(len(self.lengths) * self.longest, *flat.shape[1:]).index_copy(0, self.places, flat)
        return flat.view(len(self.lengths), self.longest, *flat.shape[1:]).transpose(1, 2)

    def unpad(self, padded: Tensor) -> Tensor:
        """The reverse."""
        flat = padded.transpose(1, 2).flatten(0, 1)
        return flat if self.places is None else flat.index_select(0, self.places)


# Letters: T flat tokens, N sequences, L the longest of them, H query heads, K key/value heads, D head size.
class PackedSequences:
    """`AttentionState` of a forward pass over whole sequences, differentiable."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._lengths = list(lengths)
        self._device = device
        bounds = np.concatenate([[0], np.cumsum(self._lengths)]).astype(np.int32)
        self._cu = to_device(bounds, device)
        self._max_length = max(self._lengths)
        self._length_groups = length_groups(self._lengths, device) if device.type == "cpu" else None
        self._lazy_groups: list[_LengthGroup] | None = None

    @classmethod
    def at(cls, bounds: Tensor, longest: int) -> "PackedSequences":
        """The state for sequences whose bounds are read on the GPU when it computes; `longest` is at least their length."""
        self = cls([longest], bounds.device)
        self._cu = bounds
        return self

    @property
    def lengths(self) -> list[int]:
        return self._lengths

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        # Under autocast the rotary embedding returns queries and keys in fp32; only values are in half precision.
        query_THD, key_TKD = query_THD.to(value_TKD.dtype), key_TKD.to(value_TKD.dtype)
        if query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16):
            longest = self._max_length
            if rules.sinks_H is not None and rules.softcap is None:
                return _varlen_with_sinks(query_THD, key_TKD, value_TKD, self._cu, longest, rules)
            return varlen_attention(query_THD, key_TKD, value_TKD, self._cu, self._cu, longest, longest, rules)
        groups = self._groups_on_gpu() if self._length_groups is None else self._length_groups
        return _attend_groups(groups, query_THD, key_TKD, value_TKD, rules)

    @torch.compiler.disable  # pinned memory, which a copy to a GPU passes through, cannot be traced
    def _groups_on_gpu(self) -> list[_LengthGroup]:
        """In fp32 only, so they are made when they are used; the same call in every layer, also when it is recomputed."""
        if self._lazy_groups is None:
            self._lazy_groups = length_groups(self._lengths, self._device)
        return self._lazy_groups

    def attend_by_hand(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> tuple[Tensor, Gradients]:
        """On a GPU in half precision, outside autograd: [T, H, D], and the function of its gradients."""
        cu, longest = self._cu, max(self._max_length, 2)  # at 1, the kernel lays out the log-sum-exp in another way
        window_left = -1 if rules.sliding_window is None else rules.sliding_window - 1
        options = {"scale": rules.scaling, "window_size_left": window_left, "window_size_right": 0}
        layout = cu, cu, longest, longest, 0.0, True
        out_THD, lse_HT = aten._flash_attention_forward(query_THD, key_TKD, value_TKD, *layout, False, **options)[:2]

        def gradients(
            grad_THD: Tensor, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor
        ) -> tuple[Tensor, Tensor, Tensor]:
            unused = query_THD.new_empty(2, dtype=torch.uint64)  # the state of dropout, of which there is none
            found: tuple[Tensor, Tensor, Tensor] = aten._flash_attention_backward(
                grad_THD, query_THD, key_TKD, value_TKD, out_THD, lse_HT, *layout, unused, unused, **options
            )
            return found

        return out_THD, gradients


def length_groups(
    lengths: Sequence[int],
    device: torch.device,
    parents: Sequence[int] | None = None,
    before: Sequence[np.ndarray] = (),
) -> list[_LengthGroup]:
    """Group consecutive sequences, as many as fit without much padding.

    If they continue others, only those with the same number in `parents` go together, all behind the same tokens, which
    `before` gives for each sequence; −1 has none before it.
    """
    found: list[_LengthGroup] = []
    start = first = 0
    for i in range(1, len(lengths) + 1):
        together = lengths[first : i + 1]
        waste = _MAX_WASTE_SHORT if max(together) <= _SHORT else _MAX_WASTE
        is_full = i == len(lengths) or max(together) * len(together) > waste * sum(together)
        if is_full or (parents is not None and parents[i] != parents[first]):
            members = tuple(lengths[first:i])
            end = start + sum(members)
            seen = None
            if parents is not None and parents[first] >= 0:
                seen = to_device(before[first], device)
            found.append(_LengthGroup(start, end, members, _places(members, device), seen))
            start, first = end, i
    return found


def _attend_groups(
    groups: Sequence[_LengthGroup], query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
) -> Tensor:
    """One padded call per group: [T, H, D]."""
    outs = [_attend_group(group, query_THD, key_TKD, value_TKD, rules) for group in groups]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _places(lengths: tuple[int, ...], device: torch.device) -> Tensor | None:
    longest = max(lengths)
    if all(length == longest for length in lengths):
        return None
    return to_device(np.concatenate([i * longest + np.arange(n) for i, n in enumerate(lengths)]), device)


def to_device(array: np.ndarray, device: torch.device) -> Tensor:
    """A copy to a GPU does not wait for what the GPU computes."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _attend_group(
    group: _LengthGroup, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
) -> Tensor:
    query_NHLD = group.pad(query_THD[group.start : group.end])
    key, value = (_behind_shared(group, x_TKD) for x_TKD in (key_TKD, value_TKD))
    return group.unpad(_causal_attention(query_NHLD, key, value, rules))


def _behind_shared(group: _LengthGroup, flat_TKD: Tensor) -> Tensor:
    """[N, K, P + L, D]: the P tokens that the sequences share, then their own."""
    own_NKLD = group.pad(flat_TKD[group.start : group.end])
    if group.before is None:
        return own_NKLD
    before_KPD = flat_TKD.index_select(0, group.before).transpose(0, 1)
    return torch.cat([before_KPD.expand(len(group.lengths), -1, -1, -1), own_NKLD], dim=2)


def _causal_attention(query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, rules: AttentionRules) -> Tensor:
    """Attention of sequences whose last tokens ask, with the sliding window, soft-capping and sinks that SDPA lacks."""
    scaling, window = rules.scaling, rules.sliding_window
    is_plain = rules.softcap is None and rules.sinks_H is None
    num_queries, num_keys = query_NHLD.shape[2], key_NKLD.shape[2]
    if is_plain and num_queries == num_keys and (window is None or window >= num_keys):
        out: Tensor = F.scaled_dot_product_attention(
            query_NHLD, key_NKLD, value_NKLD, is_causal=True, scale=scaling, enable_gqa=True
        )
        return out
    mask = _visible(num_queries, num_keys, window, query_NHLD.device)
    if is_plain:
        return F.scaled_dot_product_attention(
            query_NHLD, key_NKLD, value_NKLD, attn_mask=mask, scale=scaling, enable_gqa=True
        )
    return explicit_attention(query_NHLD, key_NKLD, value_NKLD, mask, rules)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> Tensor:
    """[queries, keys], True where the query, one of the last tokens, sees the key."""
    positions_k = torch.arange(num_keys, device=device)
    positions_q = positions_k[num_keys - num_queries :, None]
    mask = positions_k[None] <= positions_q
    if window is not None:
        mask &= positions_k[None] > positions_q - window
    return mask


# Letters: T query tokens, L key tokens, H query heads, K key/value heads, D head size.
def varlen_attention(
    query_THD: Tensor,
    key_LKD: Tensor,
    value_LKD: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    rules: AttentionRules,
) -> Tensor:
    """Attention over concatenated sequences on a GPU: PyTorch's variable-length flash attention, or SDPA for each sequence
    where flash attention cannot express the case (logit soft-capping). With sinks, only the forward pass.

    The queries of a sequence are its last tokens: query i of n sees all keys except the last n − i − 1.
    """
    if rules.softcap is None and query_THD.dtype in (torch.bfloat16, torch.float16):
        window_left = -1 if rules.sliding_window is None else rules.sliding_window - 1
        out, lse_HT = torch.ops.aten._flash_attention_forward(
            query_THD.contiguous(), key_LKD.contiguous(), value_LKD.contiguous(), cu_q, cu_k, max_q, max_k, 0.0, True, False,
            scale=rules.scaling, window_size_left=window_left, window_size_right=0,
        )[:2]  # fmt: skip
        return out if rules.sinks_H is None else with_sinks(out, lse_HT.t(), rules.sinks_H)[0]
    return _one_by_one(query_THD, key_LKD, value_LKD, cu_q, cu_k, rules)


def _one_by_one(
    query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, cu_q: Tensor, cu_k: Tensor, rules: AttentionRules
) -> Tensor:  # fmt: skip
    outs = []
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    for (q0, q1), (k0, k1) in zip(zip(bounds_q, bounds_q[1:]), zip(bounds_k, bounds_k[1:]), strict=True):  # noqa: B905, RUF007
        query, key, value = (x.transpose(0, 1) for x in (query_THD[q0:q1], key_LKD[k0:k1], value_LKD[k0:k1]))
        mask = _visible(q1 - q0, k1 - k0, rules.sliding_window, query.device)
        if rules.softcap is None and rules.sinks_H is None:
            group = query.shape[0] // key.shape[0]
            key, value = key.repeat_interleave(group, 0), value.repeat_interleave(group, 0)
            out = F.scaled_dot_product_attention(
                query[None], key[None], value[None], attn_mask=mask, scale=rules.scaling
            )[0]
        else:
            out = explicit_attention(query, key, value, mask, rules)
        outs.append(out.transpose(0, 1))
    return torch.cat(outs)


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
        """True if full attention is merged; None decides by cost."""
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
        return _attend_groups(self._gathered_groups, *inputs, rules)

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
        """The same outside autograd: [T, H, D], and the function of its gradients."""
        first, further = self._calls(self._window(rules))
        out_THD, lse_TH = _merged(query_THD, key_TKD, value_TKD, first, further, rules.scaling)

        def gradients(grad_THD: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return _gradients((grad_THD.contiguous(), *inputs, out_THD, lse_TH), first, further, rules.scaling)

        return out_THD, gradients

    def _window(self, rules: AttentionRules) -> int | None:
        """The window; None where it limits nothing."""
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
    def _gathered_groups(self) -> list[_LengthGroup]:
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


def _one_sequence(start: int, stop: int) -> _LengthGroup:
    return _LengthGroup(start, stop, (stop - start,), None)


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
        """Gradients of queries, keys and values, from these, the merged output and its log-sum-exp."""
        ...


@dataclass(frozen=True, slots=True)
class _PaddedCall:
    """On a CPU: neighbouring sequences of similar length, padded on the right."""

    queries: _LengthGroup
    keys: _LengthGroup
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


def _varlen_with_sinks(
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
    """Gradients of queries, keys and values; `saved` are the gradient of the merged output, these three, the output and its
    log-sum-exp."""
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
