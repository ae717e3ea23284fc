"""Shared prefixes computed once: samples laid out as a tree of tokens, and attention along its paths.

The samples of a group begin with the same prompt, and the turns of an episode with the same history. `TokenTree` holds every
shared token once, in depth-first order. A token attends to its ancestors only, so each sample's hidden states and gradients
are those of the sample alone; the gradients of all samples that share a token add up in it.

Start with `TokenTree.of`, then `TreeSequences.attend`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import AttentionRules, softcapped_attention
from ludic.models.packed_attention import varlen_attention

MIN_SHARED = 16
"""Shorter common beginnings are computed once per sample: a branch costs a separate attention call."""
_MAX_WASTE = 1.25
"""A padded attention call computes at most this many times its real tokens."""


# Letters: T tokens of the tree, S segments (runs of tokens without a branch), H query heads, K key/value heads, D head size.
@dataclass(frozen=True)
class TokenTree:
    """Samples in depth-first order, with every shared token once."""

    ids_T: np.ndarray
    positions_T: np.ndarray
    """Of each token in its samples: they restart at every branch."""
    paths: list[np.ndarray]
    """For each sample, in the order given: where its tokens are."""
    starts_S: np.ndarray
    stops_S: np.ndarray
    parents_S: np.ndarray
    """The segment that a segment continues; −1 for a root. Parents come first."""

    @classmethod
    def of(cls, samples: Sequence[np.ndarray], min_shared: int = MIN_SHARED) -> "TokenTree":
        """Lay out these token ids."""
        order = prefix_order(samples)
        shared = shared_lengths([samples[i] for i in order], min_shared)
        paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(samples)
        parts: list[np.ndarray] = []
        before = np.empty(0, dtype=np.int64)
        size = 0
        for i, num_shared in zip(order, shared, strict=True):
            num_new = len(samples[i]) - num_shared
            paths[i] = before = np.concatenate([before[:num_shared], np.arange(size, size + num_new)])
            parts.append(samples[i][num_shared:])
            size += num_new
        return cls._with_segments(np.concatenate(parts).astype(np.int64), paths)

    @classmethod
    def _with_segments(cls, ids_T: np.ndarray, paths: list[np.ndarray]) -> "TokenTree":
        size = len(ids_T)
        parent_T = np.full(size, -1, dtype=np.int64)
        positions_T = np.empty(size, dtype=np.int64)
        for path in paths:
            parent_T[path[1:]] = path[:-1]
            positions_T[path] = np.arange(len(path))
        num_children_T = np.bincount(parent_T[parent_T >= 0], minlength=size)
        is_first_T = parent_T != np.arange(-1, size - 1)
        is_first_T[0] = True
        is_first_T[1:] |= num_children_T[:-1] > 1
        segment_T = np.cumsum(is_first_T) - 1
        starts_S = np.flatnonzero(is_first_T)
        above_S = parent_T[starts_S]
        parents_S = np.where(above_S >= 0, segment_T[above_S], -1)
        return cls(ids_T, positions_T, paths, starts_S, np.append(starts_S[1:], size), parents_S)

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @cached_property
    def segment_paths(self) -> list[np.ndarray]:
        """For each segment: where the tokens before it and its own are."""
        found: list[np.ndarray] = []
        for start, stop, parent in zip(self.starts_S, self.stops_S, self.parents_S, strict=True):
            own = np.arange(start, stop)
            found.append(own if parent < 0 else np.concatenate([found[parent], own]))
        return found


def prefix_order(samples: Sequence[np.ndarray]) -> list[int]:
    """Indices of the samples in lexicographic order, which puts common beginnings side by side."""
    keys = [np.ascontiguousarray(sample, dtype=">u4").tobytes() for sample in samples]
    return sorted(range(len(samples)), key=keys.__getitem__)


def shared_lengths(rows: Sequence[np.ndarray], min_shared: int = MIN_SHARED) -> list[int]:
    """For each row in `prefix_order`: how many first tokens it shares with the row before; 0 if fewer than `min_shared`."""
    found = [0] * bool(rows)
    for before, row in zip(rows, rows[1:]):  # noqa: B905, RUF007
        size = min(len(before), len(row))
        differs = np.flatnonzero(before[:size] != row[:size])
        num_shared = int(differs[0]) if len(differs) else size
        found.append(num_shared if num_shared >= min_shared else 0)
    return found


class TreeSequences:
    """`AttentionState` of a forward pass over a `TokenTree`, differentiable.

    On a GPU in half precision it is one variable-length flash call whose keys are gathered per path. Elsewhere, neighbouring
    segments behind the same tokens are padded on the right into one SDPA call.
    """

    def __init__(self, tree: TokenTree, device: torch.device) -> None:
        self._tree = tree
        self._device = device

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        # Under autocast the rotary embedding returns queries and keys in fp32; only values are in half precision.
        query_THD, key_TKD = query_THD.to(value_TKD.dtype), key_TKD.to(value_TKD.dtype)
        if query_THD.is_cuda and query_THD.dtype in (torch.bfloat16, torch.float16):
            keys, cu_q, cu_k, longest_q, longest_k = self._flash_layout
            key, value = (_gather(x, keys) for x in (key_TKD, value_TKD))
            return varlen_attention(query_THD, key, value, cu_q, cu_k, longest_q, longest_k, rules)
        outs = [_attend_siblings(group, query_THD, key_TKD, value_TKD, rules) for group in self._sibling_groups]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    @cached_property
    def _flash_layout(self) -> tuple[Tensor, Tensor, Tensor, int, int]:
        """Keys of all paths end to end; where queries and keys of each segment begin; the longest of both."""
        paths = self._tree.segment_paths
        num_q = self._tree.stops_S - self._tree.starts_S
        num_k = np.array([len(path) for path in paths])
        cu_q, cu_k = (
            torch.from_numpy(np.concatenate([[0], np.cumsum(num)]).astype(np.int32)).to(self._device)
            for num in (num_q, num_k)
        )
        keys = torch.from_numpy(np.concatenate(paths)).to(self._device)
        return keys, cu_q, cu_k, int(num_q.max()), int(num_k.max())

    @cached_property
    def _sibling_groups(self) -> list["_Siblings"]:
        tree, groups = self._tree, []
        lengths_S = (tree.stops_S - tree.starts_S).tolist()
        first = 0
        for i in range(1, len(lengths_S) + 1):
            together = lengths_S[first : i + 1]
            if (
                i == len(lengths_S)
                or tree.parents_S[i] != tree.parents_S[first]
                or max(together) * len(together) > _MAX_WASTE * sum(together)
            ):
                parent = tree.parents_S[first]
                before = None if parent < 0 else torch.from_numpy(tree.segment_paths[parent]).to(self._device)
                groups.append(_Siblings(int(tree.starts_S[first]), lengths_S[first:i], before, self._device))
                first = i
        return groups


class _Siblings:
    """Neighbouring segments behind the same tokens: one padded call."""

    def __init__(self, start: int, lengths: list[int], before: Tensor | None, device: torch.device) -> None:
        self.start, self.end = start, start + sum(lengths)
        self.count, self.longest = len(lengths), max(lengths)
        self.before = before
        """Where the keys before the segments are; None for roots."""
        self.places: Tensor | None = None
        """Index of each token among count × longest; None if all segments have one length."""
        if min(lengths) < self.longest:
            places = np.concatenate([i * self.longest + np.arange(n) for i, n in enumerate(lengths)])
            self.places = torch.from_numpy(places).to(device)
        self._masks: dict[int | None, Tensor] = {}

    @property
    def num_before(self) -> int:
        return 0 if self.before is None else len(self.before)

    def pad(self, flat_THD: Tensor) -> Tensor:
        """[N, H, L, D] of the segments' own tokens."""
        flat = flat_THD[self.start : self.end]
        if self.places is not None:
            flat = flat.new_zeros(self.count * self.longest, *flat.shape[1:]).index_copy(0, self.places, flat)
        return flat.view(self.count, self.longest, *flat.shape[1:]).transpose(1, 2)

    def pad_keys(self, flat_TKD: Tensor) -> Tensor:
        """[N, K, P + L, D]: the tokens before the segments, then their own."""
        own_NKLD = self.pad(flat_TKD)
        if self.before is None:
            return own_NKLD
        before_KPD = _gather(flat_TKD, self.before).transpose(0, 1)
        return torch.cat([before_KPD.expand(self.count, -1, -1, -1), own_NKLD], dim=2)

    def mask(self, window: int | None, device: torch.device) -> Tensor:
        """[L, P + L] which keys each query sees: the same for all siblings."""
        if window not in self._masks:
            keys = torch.arange(self.num_before + self.longest, device=device)
            queries = keys[self.num_before :, None]
            mask = keys[None] <= queries
            self._masks[window] = mask if window is None else mask & (keys[None] > queries - window)
        return self._masks[window]


def _attend_siblings(
    group: _Siblings, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
) -> Tensor:
    scaling, window, softcap = rules
    query, key, value = group.pad(query_THD), group.pad_keys(key_TKD), group.pad_keys(value_TKD)
    window = None if window is not None and window >= group.num_before + group.longest else window
    if softcap is not None:
        out = softcapped_attention(query, key, value, group.mask(window, query.device), scaling, softcap)
    elif group.before is None and window is None:
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=True)
    else:
        mask = group.mask(window, query.device)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True)
    flat = out.transpose(1, 2).reshape(-1, *query_THD.shape[1:])
    return flat if group.places is None else flat.index_select(0, group.places)


class _Gather(torch.autograd.Function):
    """`index_select` whose backward pass sums in fp32: the gradients of many branches meet in one token."""

    @staticmethod
    def forward(ctx, flat: Tensor, where: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(where)
        ctx.size = flat.shape[0]
        return flat.index_select(0, where)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (where,) = ctx.saved_tensors
        whole = grad.new_zeros(ctx.size, *grad.shape[1:], dtype=torch.float32)
        return whole.index_add_(0, where, grad.float()).to(grad.dtype), None


def _gather(flat: Tensor, where: Tensor) -> Tensor:
    if flat.dtype in (torch.bfloat16, torch.float16):
        out: Tensor = _Gather.apply(flat, where)
        return out
    return flat.index_select(0, where)
