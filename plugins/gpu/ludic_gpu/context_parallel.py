"""Context parallelism: the ranks of a group share each packed row, so that one sample may be longer than a GPU can hold.

A row is cut into twice as many chunks as ranks; rank r takes the r-th from the front and the r-th from the back, which balances
causal attention. Layers work on a rank's own tokens. Attention gathers keys and values of the row, and each query sees its own
sample up to itself; backward sums their gradients and returns each rank its part. Log-probs of all tokens are gathered at the
end, so every rank of a group evaluates the same loss, and sends back the gradient of the tokens it holds. The sum over ranks, which
FSDP takes, is the gradient of one process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from ludic.distributed.ranks import Ranks
from ludic.models.attention import AttentionRules
from ludic.models.head import CandidateMask, compute, hidden_states, plain_model
from ludic.models.packed_attention import PackedSequences, to_device, varlen_attention
from ludic.types import ConfigError

# torch 2.13 renames both.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_MAX_DIFFERENCE = 0.02
"""Largest difference of hidden states, relative to their size; half precision rounds a cut row differently."""


class ContextParallel:
    """The group of neighbouring ranks that computes the same samples."""

    def __init__(self, size: int, ranks: Ranks) -> None:
        if size < 2 or ranks.world_size % size:
            raise ConfigError(
                f"context_parallel={size} with {ranks.world_size} ranks: groups of that size must divide the ranks evenly. Start "
                f"the run with torchrun on a multiple of {size} processes, or set context_parallel=1."
            )
        self.size, self.rank = size, ranks.rank % size
        for first in range(0, ranks.world_size, size):  # every rank takes part in making every group
            group = dist.new_group(list(range(first, first + size)))
            if first <= ranks.rank < first + size:
                self.group: Any = group

    def largest(self, value: float) -> float:
        """Over the group."""
        found = torch.tensor([value], device="cuda" if dist.get_backend(self.group) == "nccl" else "cpu")
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return float(found)

    def cut(self, lengths: Sequence[int], device: torch.device) -> "_RowSlice":
        """This rank's part of a row of packed samples."""
        chunk = -(-sum(lengths) // (2 * self.size))
        num_padding = 2 * self.size * chunk - sum(lengths)
        chunks = np.arange(2 * self.size * chunk).reshape(2 * self.size, chunk)
        owned_CN = np.stack([np.concatenate([chunks[r], chunks[-1 - r]]) for r in range(self.size)])
        samples = [*lengths, num_padding] if num_padding else list(lengths)
        return _RowSlice(self, owned_CN, samples, num_padding, device)


# Letters: T tokens of a row, N tokens of one rank, C ranks of the group, A chosen positions of the row, M those of one rank, padded
# to the same number on all; H query heads, K key/value heads, D head size, L keys of all spans.
class _RowSlice:
    """One rank's part of a row, as `AttentionState` of its forward pass."""

    def __init__(
        self, context: ContextParallel, owned_CN: np.ndarray, samples: list[int], num_padding: int, device: torch.device
    ) -> None:
        self._context, self._owned_CN, self._num_padding, self._device = context, owned_CN, num_padding, device
        own_N = owned_CN[context.rank]
        self._own_N = to_device(own_N, device)
        place_T = np.empty(owned_CN.size, dtype=np.int64)
        place_T[owned_CN.reshape(-1)] = np.arange(owned_CN.size)
        self._place_T = place_T
        self._order = _Order(context, to_device(place_T, device), to_device(owned_CN.reshape(-1), device))
        spans = _spans(own_N, np.cumsum([0, *samples]))
        self._seen_L = to_device(np.concatenate([np.arange(first, last) for _, first, last in spans]), device)
        sizes_q, sizes_k = [count for count, _, _ in spans], [last - first for _, first, last in spans]
        self._cu_q, self._cu_k = (to_device(_bounds(sizes), device) for sizes in (sizes_q, sizes_k))
        self._max_q, self._max_k = max(sizes_q), max(sizes_k)

    def of(self, row_T: Tensor) -> Tensor:
        """The own tokens' part of a row; padding is zero."""
        padded = torch.cat([row_T, row_T.new_zeros(self._num_padding)]) if self._num_padding else row_T
        return padded.index_select(0, self._own_N)

    def attend(
        self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        """[N, H, D]: own queries over the keys and values of all ranks."""
        query_NHD, key_NKD = query_NHD.to(value_NKD.dtype), key_NKD.to(value_NKD.dtype)
        both_N = torch.cat([key_NKD.flatten(1), value_NKD.flatten(1)], dim=1)
        both_L = _Gathered.apply(both_N, self._order).index_select(0, self._seen_L)
        width = key_NKD.shape[1] * key_NKD.shape[2]
        key_LKD = both_L[:, :width].unflatten(1, key_NKD.shape[1:])
        value_LKD = both_L[:, width:].unflatten(1, value_NKD.shape[1:])
        return varlen_attention(
            query_NHD, key_LKD, value_LKD, self._cu_q, self._cu_k, self._max_q, self._max_k, rules
        )  # fmt: skip

    def rows(self, positions_A: Tensor) -> "_OwnRows":
        """This rank's among these positions of the row."""
        place_A = self._place_T[positions_A.cpu().numpy()]
        num_own = self._owned_CN.shape[1]
        owner_A = place_A // num_own
        counts = np.bincount(owner_A, minlength=self._context.size)
        longest = max(int(counts.max()), 1)
        back_A = np.empty(len(owner_A), dtype=np.int64)
        for rank in range(self._context.size):
            taken = np.flatnonzero(owner_A == rank)
            back_A[taken] = rank * longest + np.arange(len(taken))
        taken = np.flatnonzero(owner_A == self._context.rank)
        fill = np.zeros(longest - len(taken), dtype=np.int64)
        return _OwnRows(
            context=self._context,
            local_M=to_device(np.concatenate([place_A[taken] % num_own, fill]), self._device),
            taken_M=to_device(np.concatenate([taken, fill]), self._device),
            num_own=len(taken),
            back_A=to_device(back_A, self._device),
        )


def require_same_in_slices(model: Any, context: ContextParallel, device: torch.device, problem: str) -> None:
    """ConfigError on all ranks if there is a problem, or a cut row does not have the hidden states of a whole one."""
    lengths = [3, 6 * context.size, 4]
    ids_T = torch.arange(sum(lengths), device=device) % 7
    positions_T = torch.cat([torch.arange(length, device=device) for length in lengths])
    part = context.cut(lengths, device)
    number_N = part.of(torch.arange(1, len(ids_T) + 1, device=device))
    is_token_N = number_N > 0

    def work() -> tuple[Tensor, Tensor]:
        whole_TD = hidden_states(model, ids_T, positions_T, PackedSequences(lengths, device))
        own_ND = hidden_states(model, part.of(ids_T), part.of(positions_T), part)
        return own_ND[is_token_N], whole_TD[number_N[is_token_N] - 1]

    if not problem:
        with torch.no_grad():
            own, expected = (found.float() for found in compute(model, work))
        difference = context.largest(float((own - expected).norm() / expected.norm()))
        problem = "" if difference <= _MAX_DIFFERENCE else "its hidden states change when a row is cut"
    if problem:
        raise ConfigError(
            f"{type(plain_model(model)).__name__} cannot be trained with context_parallel={context.size}: {problem}. Set "
            "context_parallel=1."
        )


def _spans(own_N: np.ndarray, bounds: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches of own tokens within one sample: (number of queries, first key, key after the last), in the row."""
    sample_N = np.searchsorted(bounds, own_N, side="right") - 1
    starts = np.flatnonzero(np.concatenate([[True], (np.diff(own_N) != 1) | (np.diff(sample_N) != 0)]))
    ends = np.append(starts[1:], len(own_N))
    return [(int(b - a), int(bounds[sample_N[a]]), int(own_N[b - 1]) + 1) for a, b in zip(starts, ends, strict=True)]


def _bounds(sizes: Sequence[int]) -> np.ndarray:
    return np.cumsum([0, *sizes]).astype(np.int32)


@dataclass(frozen=True, slots=True)
class _OwnRows:
    """The chosen positions that one rank computes. All ranks compute as many: those with fewer repeat the first token."""

    context: ContextParallel
    local_M: Tensor
    """Among the rank's own tokens."""
    taken_M: Tensor
    """Among the chosen positions."""
    num_own: int
    """The rows of this rank, without repeats."""
    back_A: Tensor

    def joined(self, values_M: Tensor) -> Tensor:
        """The values of all ranks, [A, …]; a gradient goes to the own values alone, since every rank evaluates the same loss."""
        joined_A: Tensor = _Joined.apply(values_M, self)
        return joined_A

    def candidates(self, mask: CandidateMask | None) -> CandidateMask | None:
        if mask is None:
            return None
        own = self.taken_M.tolist()
        repeats = len(own) - self.num_own
        return mask.select([*own[: self.num_own], *[None] * repeats])


@dataclass(frozen=True, slots=True)
class _Order:
    """Between the order of the row and that of the gathered slices."""

    context: ContextParallel
    place_T: Tensor
    """The place of a row's token among the slices."""
    token_T: Tensor
    """The token of the row at a place of the slices."""


class _Gathered(torch.autograd.Function):
    """[N, …] of each rank → [T, …] of the row, on every rank. Backward sums over ranks, in fp32."""

    @staticmethod
    def forward(ctx: Any, own_N: Tensor, order: _Order) -> Tensor:
        ctx.order = order
        return _all(own_N, order.context).index_select(0, order.place_T)

    @staticmethod
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Any, ...]:
        context = ctx.order.context
        parts = grad_T.float().index_select(0, ctx.order.token_T)
        own_N = parts.new_empty(len(parts) // context.size, *parts.shape[1:])
        _reduce_scatter(own_N, parts, group=context.group)
        return own_N.to(grad_T.dtype), None


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_M: Tensor, rows: _OwnRows) -> Tensor:
        ctx.rows, ctx.num = rows, len(values_M)
        return _all(values_M, rows.context).index_select(0, rows.back_A)

    @staticmethod
    def backward(ctx: Any, grad_A: Tensor) -> tuple[Any, ...]:
        rows: _OwnRows = ctx.rows
        grad_M = grad_A.new_zeros(ctx.num, *grad_A.shape[1:])
        grad_M[: rows.num_own] = grad_A.index_select(0, rows.taken_M[: rows.num_own])
        return grad_M, None


def _all(own: Tensor, context: ContextParallel) -> Tensor:
    found = own.new_empty(context.size * len(own), *own.shape[1:])
    _all_gather(found, own.contiguous(), group=context.group)
    return found
