"""Attention over concatenated sequences, each attending causally within itself: for training, and on GPUs also for sampling.

On a GPU in half precision it is one variable-length flash call. Elsewhere, consecutive sequences of similar length are
padded on the right into one SDPA call (under a causal mask, padding on the right changes nothing before it).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import AttentionRules, explicit_attention, with_sinks

aten = torch.ops.aten
_SHORT = 32
_MAX_WASTE_SHORT, _MAX_WASTE = 1.25, 1.05
"""A group holds at most this many times its own tokens after padding. Up to `_SHORT` tokens, a call costs more than padding."""

Gradients = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""(gradient of attention's output [T, H, D], and the queries, keys and values again) → the gradients of these three."""


@dataclass(frozen=True, slots=True)
class LengthGroup:
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
        self._lazy_groups: list[LengthGroup] | None = None

    @classmethod
    def at(cls, bounds: Tensor, longest: int) -> "PackedSequences":
        """Of sequences whose bounds are read on the GPU when it computes; `longest` is at least their length."""
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
                from ludic.models.tree_attention import varlen_with_sinks  # that module imports this one

                return varlen_with_sinks(query_THD, key_TKD, value_TKD, self._cu, longest, rules)
            return varlen_attention(query_THD, key_TKD, value_TKD, self._cu, self._cu, longest, longest, rules)
        groups = self._groups_on_gpu() if self._length_groups is None else self._length_groups
        return attend_groups(groups, query_THD, key_TKD, value_TKD, rules)

    @torch.compiler.disable  # pinned memory, which a copy to a GPU passes through, cannot be traced
    def _groups_on_gpu(self) -> list[LengthGroup]:
        """In fp32 only, so they are made when they are used; the same call in every layer, also when it is recomputed."""
        if self._lazy_groups is None:
            self._lazy_groups = length_groups(self._lengths, self._device)
        return self._lazy_groups

    def attend_by_hand(
        self, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> tuple[Tensor, Gradients]:
        """On a GPU in half precision, outside autograd: [T, H, D], and how its gradient goes on."""
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
) -> list[LengthGroup]:
    """Group consecutive sequences, as many as fit without much padding.

    If they continue others, only those with the same number in `parents` go together, all behind the same tokens, which
    `before` gives for each sequence; −1 has none before it.
    """
    found: list[LengthGroup] = []
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
            found.append(LengthGroup(start, end, members, _places(members, device), seen))
            start, first = end, i
    return found


def attend_groups(
    groups: Sequence[LengthGroup], query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
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
    group: LengthGroup, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
) -> Tensor:
    query_NHLD = group.pad(query_THD[group.start : group.end])
    key, value = (_behind_shared(group, x_TKD) for x_TKD in (key_TKD, value_TKD))
    return group.unpad(causal_attention(query_NHLD, key, value, rules))


def _behind_shared(group: LengthGroup, flat_TKD: Tensor) -> Tensor:
    """[N, K, P + L, D]: the P tokens that the sequences share, then their own."""
    own_NKLD = group.pad(flat_TKD[group.start : group.end])
    if group.before is None:
        return own_NKLD
    before_KPD = flat_TKD.index_select(0, group.before).transpose(0, 1)
    return torch.cat([before_KPD.expand(len(group.lengths), -1, -1, -1), own_NKLD], dim=2)


def causal_attention(query_NHLD: Tensor, key_NKLD: Tensor, value_NKLD: Tensor, rules: AttentionRules) -> Tensor:
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
