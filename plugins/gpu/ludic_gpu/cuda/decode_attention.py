"""Triton kernels for the attention of a decoding round: one new token per row, over the blocks of its sequence.

One program reads the keys of a row for one key/value head; the query heads of a group share every loaded key. If rows are few or
differ in length, they are cut into parts, so that programs fill the GPU evenly, and merged afterwards.

Rows that share the blocks of their prompt read them once: `_shared_kernel` attends to the shared prefix with the queries of up
to `GROUP_ROWS` rows, `_decode_kernel` starts behind it, and the merge joins both.

Everything that varies between steps is read from memory, so that a captured CUDA graph stays valid.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.blocks import GROUP_ROWS, MAX_SPLITS
from ludic.models.attention import AttentionRules

_SHARED_PARTS = 2
"""Parts into which a shared prefix is cut."""
_MAX_PARTS = triton.next_power_of_2(MAX_SPLITS + _SHARED_PARTS)
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q, best, total, acc, keys, values, table, head, begin, end, scale, softcap, d,
    K: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, HAS_CAP: tl.constexpr,
):  # fmt: skip
    """Add the keys from `begin` to `end` to the highest score, the sum of weights, and the weighted values of each query."""
    n, d_ok = tl.arange(0, TILE), d < D
    for start in range(begin, end, TILE):
        position = start + n
        ok = position < end
        block = tl.load(table + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        where = (slot * K + head)[:, None] * D + d[None, :]
        there = ok[:, None] & d_ok[None, :]
        k = tl.load(keys + where, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_CAP:
            scaled = scores / softcap
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scaled)) - 1.0)
        scores = tl.where(ok[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2((scores - higher[:, None]) * _LOG2E)
        fade = tl.exp2((best - higher) * _LOG2E)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + where, mask=there, other=0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = higher
    return best, total, acc


@triton.jit(do_not_specialize=["splits", "num_parts"])
def _decode_kernel(
    query, keys, values, out, parts, scales, tables, lengths, num_shared,
    stride_qt, stride_qh, table_stride, scale, softcap, window, splits, num_parts,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, IS_WHOLE: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if HAS_GROUPS:
        first = tl.load(num_shared + row)
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    per_split = tl.cdiv(tl.cdiv(length - first, splits), TILE) * TILE
    begin = first + split * per_split
    end = tl.minimum(length, begin + per_split)
    g, d = tl.arange(0, G_PAD), tl.arange(0, D_PAD)
    there = (g < G)[:, None] & (d < D)[None, :]
    q = tl.load(query + row * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :], mask=there, other=0.0)
    best = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    best, total, acc = _attend(
        q, best, total, acc, keys, values, tables + row * table_stride, head, begin, end, scale, softcap, d,
        K, D, BLOCK_SIZE, TILE, HAS_CAP,
    )  # fmt: skip
    heads = row * K * G + head * G + g
    if IS_WHOLE:
        target = out + heads[:, None] * D + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=there)
    else:
        index = heads * num_parts + split
        tl.store(parts + index[:, None] * D + d[None, :], acc, mask=there)
        tl.store(scales + index * 2, best, mask=g < G)
        tl.store(scales + index * 2 + 1, total, mask=g < G)


@triton.jit(do_not_specialize=["splits", "num_parts"])
def _merge_kernel(
    out, parts, scales, num_shared, splits, num_parts,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, P_PAD: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    """One query's parts: its own, and those of the group's prefix if it has one."""
    index = tl.program_id(0)
    p, d = tl.arange(0, P_PAD), tl.arange(0, D_PAD)
    ok = p < num_parts
    if HAS_GROUPS:
        ok = p < tl.where(tl.load(num_shared + index // H) > 0, num_parts, splits)
    highs = tl.load(scales + (index * num_parts + p) * 2, mask=ok, other=float("-inf"))
    sums = tl.load(scales + (index * num_parts + p) * 2 + 1, mask=ok, other=0.0)
    weights = tl.exp2((highs - tl.max(highs, 0)) * _LOG2E)
    found = tl.load(
        parts + (index * num_parts + p)[:, None] * D + d[None, :], mask=ok[:, None] & (d < D)[None, :], other=0.0
    )
    merged = tl.sum(found * weights[:, None], 0) / tl.sum(weights * sums, 0)
    tl.store(out + index * D + d, merged.to(out.dtype.element_ty), mask=d < D)


@triton.jit(do_not_specialize=["splits", "num_parts"])
def _shared_kernel(
    query, keys, values, parts, scales, tables, group_rows, group_lengths,
    stride_qt, stride_qh, table_stride, scale, splits, num_parts,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, M_PAD: tl.constexpr,
    D_PAD: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr,
):  # fmt: skip
    """The queries of a group's rows over a part of the tokens that they share."""
    group, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(group_lengths + group)
    if length > 0:
        per_part = tl.cdiv(tl.cdiv(length, num_parts - splits), TILE) * TILE
        begin = number * per_part
        end = tl.minimum(length, begin + per_part)
        m, d = tl.arange(0, M_PAD), tl.arange(0, D_PAD)
        member, g = m // G, m % G
        row = tl.load(group_rows + group * MEMBERS + member, mask=member < MEMBERS, other=-1)
        leader = tl.load(group_rows + group * MEMBERS)
        there = (row >= 0)[:, None] & (d < D)[None, :]
        q = tl.load(
            query + row[:, None] * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :], mask=there, other=0.0
        )
        best = tl.full([M_PAD], float("-inf"), tl.float32)
        total = tl.zeros([M_PAD], tl.float32)
        acc = tl.zeros([M_PAD, D_PAD], tl.float32)
        best, total, acc = _attend(
            q, best, total, acc, keys, values, tables + leader * table_stride, head, begin, end, scale, 1.0, d,
            K, D, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
        index = (row * K * G + head * G + g) * num_parts + splits + number
        tl.store(parts + index[:, None] * D + d[None, :], acc, mask=there)
        tl.store(scales + index * 2, best, mask=row >= 0)
        tl.store(scales + index * 2 + 1, total, mask=row >= 0)


# Letters: T rows (one token each), H query heads, K key/value heads, D head size, S slots, C groups, M `GROUP_ROWS`.
@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Groups of rows that share the blocks of their prefix."""

    rows_CM: Tensor
    """Row numbers of each group, −1 after the last; int32."""
    lengths_C: Tensor
    """Shared tokens of each group; 0 marks an unused group; int32."""


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """The attention of one round, the same rows in every layer: one new token per row over its blocks."""

    tables: Tensor
    lengths_T: Tensor
    """Tokens, the new one included; int32."""
    num_shared_T: Tensor
    """Tokens of the prefix that each row shares with its group, 0 without a group; int32."""
    block_size: int
    splits: int
    """Parts into which each row's own tokens are cut."""
    groups: SharedPrefixes | None = None

    def __call__(self, query_THD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, rules: AttentionRules) -> Tensor:
        num_rows, num_heads, size = query_THD.shape
        kv_heads = keys_SKD.shape[1]
        scaling, window, softcap = rules.scaling, rules.sliding_window, rules.softcap
        groups, splits = self.groups, self.splits
        if rules.sinks_H is not None:
            raise NotImplementedError("this kernel has no attention sinks")
        if groups is not None and (window is not None or softcap is not None):
            raise NotImplementedError("groups share a prefix only where every token sees all earlier ones")
        num_parts = splits + (_SHARED_PARTS if groups is not None else 0)
        out_THD = torch.empty(num_rows, num_heads, size, dtype=query_THD.dtype, device=query_THD.device)
        parts = scales = out_THD
        if num_parts > 1:
            count = num_rows * num_heads * num_parts
            parts = torch.empty(count * size, dtype=torch.float32, device=query_THD.device)
            scales = torch.empty(count * 2, dtype=torch.float32, device=query_THD.device)
        width = max(16, triton.next_power_of_2(size))  # the smallest that tl.dot takes
        common = {"K": kv_heads, "G": num_heads // kv_heads, "D": size, "D_PAD": width, "BLOCK_SIZE": self.block_size}
        strides = query_THD.stride(0), query_THD.stride(1), self.tables.stride(0)
        if groups is not None:
            queries = triton.next_power_of_2(GROUP_ROWS * num_heads // kv_heads)
            _shared_kernel[(len(groups.lengths_C), kv_heads, _SHARED_PARTS)](
                query_THD, keys_SKD, values_SKD, parts, scales, self.tables, groups.rows_CM, groups.lengths_C, *strides, scaling,
                splits, num_parts, **common, M_PAD=queries, TILE=64, MEMBERS=GROUP_ROWS,
                num_warps=8 if queries > 64 else 4, num_stages=2,
            )  # fmt: skip
        # Measured on an H200: small loops if sequences fill the GPU, larger ones if few sequences are split.
        tile, num_warps = (32, 2) if splits == 1 else (64, 4)
        _decode_kernel[(num_rows, kv_heads, splits)](
            query_THD, keys_SKD, values_SKD, out_THD, parts, scales, self.tables, self.lengths_T, self.num_shared_T, *strides,
            scaling, softcap or 1.0, window or 0, splits, num_parts, **common,
            G_PAD=max(16, triton.next_power_of_2(num_heads // kv_heads)), TILE=tile, IS_WHOLE=num_parts == 1,
            HAS_CAP=softcap is not None, HAS_WINDOW=window is not None, HAS_GROUPS=groups is not None,
            num_warps=num_warps, num_stages=2,
        )  # fmt: skip
        if num_parts > 1:
            _merge_kernel[(num_rows * num_heads,)](
                out_THD, parts, scales, self.num_shared_T, splits, num_parts, H=num_heads, D=size, D_PAD=width, P_PAD=_MAX_PARTS,
                HAS_GROUPS=groups is not None, num_warps=1,
            )  # fmt: skip
        return out_THD
