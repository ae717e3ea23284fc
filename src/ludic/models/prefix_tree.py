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
from torch import Tensor

from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import LengthGroup, attend_groups, length_groups, varlen_attention

MIN_SHARED = 16
"""Shorter common beginnings are computed once per sample: a branch costs a separate attention call."""


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
    found = [0] if rows else []
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
            key, value = (_Gather.apply(x, keys) for x in (key_TKD, value_TKD))
            return varlen_attention(query_THD, key, value, cu_q, cu_k, longest_q, longest_k, rules)
        return attend_groups(self._groups, query_THD, key_TKD, value_TKD, rules)

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
    def _groups(self) -> list[LengthGroup]:
        tree = self._tree
        lengths_S = (tree.stops_S - tree.starts_S).tolist()
        return length_groups(lengths_S, self._device, tree.parents_S.tolist(), tree.segment_paths.__getitem__)


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
