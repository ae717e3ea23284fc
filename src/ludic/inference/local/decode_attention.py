"""Triton kernels for the attention of a decoding round: one new token per row, over the blocks of its sequence.

The keys of all rows are cut into tiles, and every program takes the same number of consecutive tiles: the end of one row, whole
rows, the beginning of another. So short and long rows fill the GPU evenly, however many there are. Which program starts where is
computed once per round (`_schedule_kernel`), for all layers. If several programs work on one row, the last of them to finish
merges their parts, always in the same order.

Rows of a group that share the blocks of their prompt read them once: a kernel of its own attends to the shared beginning with the
queries of up to `GROUP_ROWS` rows, and the other one starts behind it and merges both.

Everything that varies between steps is read from memory, so that a captured CUDA graph stays valid.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.blocks import GROUP_ROWS
from ludic.models.attention import AttentionRules

_TILE = 32
_SHARED_TILE, _SHARED_PARTS = 64, 2
_MIN_TILES, _MAX_PARTS = 2, 16
"""A program takes at least so many tiles, and a row is cut into about so many parts at most."""
_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _schedule_kernel(
    lengths, firsts, starts, window, num_rows,
    ROWS: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, MAX_PARTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """The first row and tile of each program; before them the number of tiles per program, and of all."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    r = tl.arange(0, ROWS)
    length = tl.load(lengths + r, mask=r < num_rows, other=0)
    first = tl.load(firsts + r, mask=r < num_rows, other=0)
    if HAS_WINDOW:
        first = tl.maximum(first, length - window)
    tiles = tl.cdiv(length - first, TILE)
    ends = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    share = tl.maximum(tl.cdiv(total, num_programs), tl.maximum(tl.cdiv(tl.max(tiles, 0), MAX_PARTS), MIN_TILES))
    row = tl.sum((ends <= program * share).to(tl.int32), 0)
    tl.store(starts + 2 + 2 * program, row)
    tl.store(starts + 3 + 2 * program, program * share - tl.sum(tl.where(r < row, tiles, 0), 0))
    if program == 0:
        tl.store(starts, share)
        tl.store(starts + 1, total)


@triton.jit
def _decode_kernel(
    query, keys, values, out, parts, part_scales, counters, shared, shared_scales, tables, lengths, firsts, starts,
    stride_qt, stride_qh, table_stride, scale, softcap, window,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, SHARED_PARTS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_GROUPS: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1)
    share, total_tiles = tl.load(starts), tl.load(starts + 1)
    row, offset = tl.load(starts + 2 + 2 * program), tl.load(starts + 3 + 2 * program)
    tile = program * share
    last = tl.minimum(tile + share, total_tiles)
    g, d, n = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
    g_ok, d_ok = g < G, d < D
    there = g_ok[:, None] & d_ok[None, :]
    inner = g[:, None] * D + d[None, :]
    while tile < last:
        length, first = tl.load(lengths + row), tl.load(firsts + row)
        num_shared = first
        if HAS_WINDOW:
            first = tl.maximum(first, length - window)
        num_tiles = tl.cdiv(length - first, TILE)
        count = tl.minimum(num_tiles - offset, last - tile)
        q = tl.load(query + row * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :], mask=there, other=0.0)
        best = tl.full([G_PAD], float("-inf"), tl.float32)
        total = tl.zeros([G_PAD], tl.float32)
        acc = tl.zeros([G_PAD, D_PAD], tl.float32)
        begin = first + offset * TILE
        for start in range(begin, tl.minimum(begin + count * TILE, length), TILE):
            position = start + n
            ok = position < length
            block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            where = (slot * K + head)[:, None] * D + d[None, :]
            seen = ok[:, None] & d_ok[None, :]
            k = tl.load(keys + where, mask=seen, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                scaled = scores / softcap
                scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scaled)) - 1.0)
            scores = tl.where(ok[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2((scores - higher[:, None]) * _LOG2E)
            fade = tl.exp2((best - higher) * _LOG2E)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + where, mask=seen, other=0.0)
            acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = higher

        row_begin = tile - offset
        from_program, to_program = row_begin // share, (row_begin + num_tiles - 1) // share
        is_last = to_program >= from_program
        if to_program > from_program:
            index = (program * 2 + (tile > program * share).to(tl.int32)) * K + head
            tl.store(parts + index * G_PAD * D + inner, acc, mask=there)
            tl.store(part_scales + index * 2 * G_PAD + g, best)
            tl.store(part_scales + index * 2 * G_PAD + G_PAD + g, total)
            tl.debug_barrier()
            is_last = tl.atomic_add(counters + row * K + head, 1) == to_program - from_program
            if is_last:
                tl.store(counters + row * K + head, 0)
                best = tl.full([G_PAD], float("-inf"), tl.float32)
                total = tl.zeros([G_PAD], tl.float32)
                acc = tl.zeros([G_PAD, D_PAD], tl.float32)
                for other in range(from_program, to_program + 1):
                    is_second = (other == from_program) & (row_begin > from_program * share)
                    index = (other * 2 + is_second.to(tl.int32)) * K + head
                    high = tl.load(part_scales + index * 2 * G_PAD + g, cache_modifier=".cg")
                    sums = tl.load(part_scales + index * 2 * G_PAD + G_PAD + g, cache_modifier=".cg")
                    part = tl.load(parts + index * G_PAD * D + inner, mask=there, other=0.0, cache_modifier=".cg")
                    higher = tl.maximum(best, high)
                    fade, weight = tl.exp2((best - higher) * _LOG2E), tl.exp2((high - higher) * _LOG2E)
                    total = total * fade + sums * weight
                    acc = acc * fade[:, None] + part * weight[:, None]
                    best = higher
        if is_last:
            if HAS_GROUPS:  # noqa: SIM102 - known when the kernel is compiled
                if num_shared > 0:
                    for number in range(0, SHARED_PARTS):
                        index = (row * K + head) * SHARED_PARTS + number
                        high = tl.load(shared_scales + index * 2 * G_PAD + g)
                        sums = tl.load(shared_scales + index * 2 * G_PAD + G_PAD + g)
                        part = tl.load(shared + index * G_PAD * D + inner, mask=there, other=0.0)
                        higher = tl.maximum(best, high)
                        fade, weight = tl.exp2((best - higher) * _LOG2E), tl.exp2((high - higher) * _LOG2E)
                        total = total * fade + sums * weight
                        acc = acc * fade[:, None] + part * weight[:, None]
                        best = higher
            result = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + (row * K + head) * G * D + inner, result, mask=there)
        tile += count
        offset = 0
        row += 1


@triton.jit
def _shared_kernel(
    query, keys, values, shared, shared_scales, tables, group_rows, group_lengths,
    stride_qt, stride_qh, table_stride, scale,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, M_PAD: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr, SHARED_PARTS: tl.constexpr,
):  # fmt: skip
    """The queries of a group's rows over a part of the tokens that they share."""
    group, head, number = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(group_lengths + group)
    if length > 0:
        per_part = tl.cdiv(tl.cdiv(length, SHARED_PARTS), TILE) * TILE
        begin = number * per_part
        end = tl.minimum(length, begin + per_part)
        m, d, n = tl.arange(0, M_PAD), tl.arange(0, D_PAD), tl.arange(0, TILE)
        member, g = m // G, m % G
        row = tl.load(group_rows + group * MEMBERS + member, mask=member < MEMBERS, other=-1)
        leader = tl.load(group_rows + group * MEMBERS)
        d_ok = d < D
        there = (row >= 0)[:, None] & d_ok[None, :]
        q = tl.load(
            query + row[:, None] * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :], mask=there, other=0.0
        )
        best = tl.full([M_PAD], float("-inf"), tl.float32)
        total = tl.zeros([M_PAD], tl.float32)
        acc = tl.zeros([M_PAD, D_PAD], tl.float32)
        for start in range(begin, end, TILE):
            position = start + n
            ok = position < end
            block = tl.load(tables + leader * table_stride + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
            slot = block * BLOCK_SIZE + position % BLOCK_SIZE
            where = (slot * K + head)[:, None] * D + d[None, :]
            seen = ok[:, None] & d_ok[None, :]
            k = tl.load(keys + where, mask=seen, other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            scores = tl.where(ok[None, :], scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp2((scores - higher[:, None]) * _LOG2E)
            fade = tl.exp2((best - higher) * _LOG2E)
            total = total * fade + tl.sum(weights, 1)
            v = tl.load(values + where, mask=seen, other=0.0)
            acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            best = higher
        index = (row * K + head) * SHARED_PARTS + number
        tl.store(shared + (index * G_PAD + g)[:, None] * D + d[None, :], acc, mask=there)
        tl.store(shared_scales + index * 2 * G_PAD + g, best, mask=row >= 0)
        tl.store(shared_scales + index * 2 * G_PAD + G_PAD + g, total, mask=row >= 0)


# Letters: T rows (one token each), H query heads, K key/value heads, D head size, S slots, C groups, M `GROUP_ROWS`.
@dataclass(frozen=True, slots=True)
class SharedBeginnings:
    """Which rows share the blocks of their beginning."""

    rows_CM: Tensor
    """Row numbers of each group, −1 after the last; int32."""
    lengths_C: Tensor
    """Shared tokens of each group; 0: there is no such group; int32."""


class DecodeAttention:
    """The attention of one round: the same rows in every layer."""

    def __init__(
        self,
        tables: Tensor,
        lengths_T: Tensor,
        firsts_T: Tensor,
        block_size: int,
        groups: SharedBeginnings | None = None,
    ) -> None:
        """`firsts_T`: tokens at the beginning of each row that its group covers, 0 without a group; int32, as `lengths_T`."""
        self._tables, self._lengths_T, self._firsts_T = tables, lengths_T, firsts_T
        self._block_size, self._groups = block_size, groups
        self._starts: dict[tuple[int, int | None], Tensor] = {}
        self._counters: dict[int, Tensor] = {}

    def __call__(self, query_THD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, rules: AttentionRules) -> Tensor:
        """Attention of one new token per row over its blocks, the token's own keys and values included."""
        num_rows, num_heads, size = query_THD.shape
        kv_heads = keys_SKD.shape[1]
        scaling, window, softcap = rules
        if self._groups is not None and (window is not None or softcap is not None):
            raise NotImplementedError("groups share their beginning only where every token sees all earlier ones")
        num_programs = _num_programs(query_THD.device, kv_heads, size)
        starts = self._schedule(num_programs, window)
        new = lambda count: torch.empty(count, dtype=torch.float32, device=query_THD.device)  # noqa: E731
        out_THD = torch.empty(num_rows, num_heads, size, dtype=query_THD.dtype, device=query_THD.device)
        pads = {"G_PAD": max(16, triton.next_power_of_2(num_heads // kv_heads)), "D_PAD": triton.next_power_of_2(size)}
        common = {"K": kv_heads, "G": num_heads // kv_heads, "D": size, "BLOCK_SIZE": self._block_size, **pads}
        strides = query_THD.stride(0), query_THD.stride(1), self._tables.stride(0)
        num_parts = 2 * num_programs * kv_heads * pads["G_PAD"]
        parts, scales = new(num_parts * size), new(num_parts * 2)
        shared = shared_scales = parts
        if self._groups is not None:
            count = num_rows * kv_heads * _SHARED_PARTS * pads["G_PAD"]
            shared, shared_scales = new(count * size), new(count * 2)
            queries = GROUP_ROWS * common["G"]
            _shared_kernel[(len(self._groups.lengths_C), kv_heads, _SHARED_PARTS)](
                query_THD, keys_SKD, values_SKD, shared, shared_scales, self._tables, self._groups.rows_CM,
                self._groups.lengths_C, *strides, scaling, **common, M_PAD=triton.next_power_of_2(queries),
                TILE=_SHARED_TILE, MEMBERS=GROUP_ROWS, SHARED_PARTS=_SHARED_PARTS, num_warps=8, num_stages=2,
            )  # fmt: skip
        if kv_heads not in self._counters:
            self._counters[kv_heads] = torch.zeros(num_rows * kv_heads, dtype=torch.int32, device=query_THD.device)
        _decode_kernel[(num_programs, kv_heads)](
            query_THD, keys_SKD, values_SKD, out_THD, parts, scales, self._counters[kv_heads], shared, shared_scales,
            self._tables, self._lengths_T, self._firsts_T, starts, *strides, scaling, softcap or 1.0, window or 0, **common,
            TILE=_TILE, SHARED_PARTS=_SHARED_PARTS, HAS_CAP=softcap is not None, HAS_WINDOW=window is not None,
            HAS_GROUPS=self._groups is not None, num_warps=2, num_stages=2,
        )  # fmt: skip
        return out_THD

    def _schedule(self, num_programs: int, window: int | None) -> Tensor:
        key = num_programs, window
        if key not in self._starts:
            num_rows = len(self._lengths_T)
            starts = torch.empty(2 + 2 * num_programs, dtype=torch.int32, device=self._lengths_T.device)
            _schedule_kernel[(num_programs,)](
                self._lengths_T, self._firsts_T, starts, window or 0, num_rows, ROWS=triton.next_power_of_2(num_rows),
                TILE=_TILE, MIN_TILES=_MIN_TILES, MAX_PARTS=_MAX_PARTS, HAS_WINDOW=window is not None, num_warps=4,
            )  # fmt: skip
            self._starts[key] = starts
        return self._starts[key]


@cache
def _num_programs(device: torch.device, kv_heads: int, size: int) -> int:
    """Programs per key/value head that run at the same time."""
    if device.type == "cpu":  # Triton's interpreter, in tests
        return 7
    per_processor = 8 if size > 64 else 16
    return max(1, torch.cuda.get_device_properties(device).multi_processor_count * per_processor // kv_heads)
