"""The two Triton kernels of the CUDA path: paged decode attention, and sampling with log-probability in one pass.

Attention runs one program per (sequence, key/value head, split). The query heads of a group share every loaded key. Contexts
are cut into splits if there are too few sequences to fill the GPU, and merged afterwards. Everything that varies between
steps is read from memory, so that a captured CUDA graph stays valid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.sampling import CHUNK
from ludic.models.attention import AttentionRules
from ludic.types.requests import MIX_CONSTANTS, MIX_SHIFTS, SEED_BITS, STEP_FACTOR

_LOG2E = tl.constexpr(1.4426950408889634)
_STEP_FACTOR = tl.constexpr(STEP_FACTOR)
_INCREMENT, _FACTOR_1, _FACTOR_2 = (tl.constexpr(constant) for constant in MIX_CONSTANTS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in MIX_SHIFTS)
_SEED_BITS, _SEED_UNIT = tl.constexpr(SEED_BITS), tl.constexpr(2.0**-SEED_BITS)
_TOKENS_PER_LOOP = 64


@triton.jit
def _decode_kernel(
    query, keys, values, out, partial_out, partial_max, partial_sum, tables, lengths,
    stride_qt, stride_qh, table_stride, scale, softcap, window,
    K: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    G_PAD: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr, SPLITS: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    per_split = tl.cdiv(tl.cdiv(length - first, SPLITS), TOKENS) * TOKENS
    begin = first + split * per_split
    end = tl.minimum(length, begin + per_split)

    g, d, n = tl.arange(0, G_PAD), tl.arange(0, D_PAD), tl.arange(0, TOKENS)
    g_ok, d_ok = g < G, d < D
    q = tl.load(
        query + row * stride_qt + (head * G + g)[:, None] * stride_qh + d[None, :],
        mask=g_ok[:, None] & d_ok[None, :],
        other=0.0,
    )
    best = tl.full([G_PAD], float("-inf"), tl.float32)
    total = tl.zeros([G_PAD], tl.float32)
    acc = tl.zeros([G_PAD, D_PAD], tl.float32)
    for start in range(begin, end, TOKENS):
        position = start + n
        ok = position < end
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE, mask=ok, other=0).to(tl.int64)
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

    heads = head * G + g
    if SPLITS == 1:
        target = out + (row * K * G + heads)[:, None] * D + d[None, :]
        tl.store(target, (acc / total[:, None]).to(out.dtype.element_ty), mask=g_ok[:, None] & d_ok[None, :])
    else:
        index = (row * K * G + heads) * SPLITS + split
        tl.store(partial_out + index[:, None] * D + d[None, :], acc, mask=g_ok[:, None] & d_ok[None, :])
        tl.store(partial_max + index, best, mask=g_ok)
        tl.store(partial_sum + index, total, mask=g_ok)


@triton.jit
def _merge_kernel(
    out, partial_out, partial_max, partial_sum, D: tl.constexpr, D_PAD: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    index = tl.program_id(0)
    s, d = tl.arange(0, SPLITS), tl.arange(0, D_PAD)
    highs = tl.load(partial_max + index * SPLITS + s)
    weights = tl.exp2((highs - tl.max(highs, 0)) * _LOG2E)
    total = tl.sum(weights * tl.load(partial_sum + index * SPLITS + s), 0)
    parts = tl.load(partial_out + (index * SPLITS + s)[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
    merged = tl.sum(parts * weights[:, None], 0) / total
    tl.store(out + index * D + d, merged.to(out.dtype.element_ty), mask=d < D)


# Letters: T sequences (one token each), H query heads, K key/value heads, D head size, S slots.
def paged_decode(
    query_THD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    tables: Tensor,
    lengths_T: Tensor,
    block_size: int,
    rules: AttentionRules,
) -> Tensor:
    """Attention of one new token per sequence over its blocks."""
    num_rows, num_heads, size = query_THD.shape
    kv_heads = keys_SKD.shape[1]
    group = num_heads // kv_heads
    scaling, sliding_window, softcap = rules
    splits = _num_splits(num_rows * kv_heads, query_THD.device)
    out_THD = torch.empty(num_rows, num_heads, size, dtype=query_THD.dtype, device=query_THD.device)
    partial = (
        torch.empty(num_rows * num_heads * splits * (size + 2), dtype=torch.float32, device=query_THD.device)
        if splits > 1
        else out_THD
    )
    count = num_rows * num_heads * splits
    partial_out, partial_max, partial_sum = (
        (partial[: count * size], partial[count * size : count * (size + 1)], partial[count * (size + 1) :])
        if splits > 1
        else (partial, partial, partial)
    )
    _decode_kernel[(num_rows, kv_heads, splits)](
        query_THD, keys_SKD, values_SKD, out_THD, partial_out, partial_max, partial_sum, tables, lengths_T,
        query_THD.stride(0), query_THD.stride(1), tables.stride(0), scaling, softcap or 1.0, sliding_window or 0,
        K=kv_heads, G=group, D=size, BLOCK_SIZE=block_size, G_PAD=max(16, triton.next_power_of_2(group)),
        D_PAD=triton.next_power_of_2(size), TOKENS=_TOKENS_PER_LOOP, SPLITS=splits, HAS_CAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None, num_warps=4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(num_rows * num_heads,)](
            out_THD, partial_out, partial_max, partial_sum, D=size, D_PAD=triton.next_power_of_2(size), SPLITS=splits
        )
    return out_THD


def _num_splits(num_programs: int, device: torch.device) -> int:
    """Enough splits to fill the GPU about twice; a power of two, because the merge holds all splits at once."""
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    splits = 1
    while num_programs * splits < wanted and splits < 16:
        splits *= 2
    return splits


@triton.jit
def _derive(state, index):
    """`sampling.derive_bits` on unsigned integers."""
    x = state * _STEP_FACTOR + index + _INCREMENT
    x = (x ^ (x >> _SHIFT_1)) * _FACTOR_1
    x = (x ^ (x >> _SHIFT_2)) * _FACTOR_2
    return x ^ (x >> _SHIFT_3)


@triton.jit
def _log_exponentials(key, candidates):
    """Logarithms of the race's exponential variables, from the same bits as `sampling.exponentials`."""
    bits = _derive(key, candidates.to(tl.uint64)) >> (64 - _SEED_BITS)
    uniform = (bits.to(tl.float64) + 0.5) * _SEED_UNIT
    return tl.log(-tl.log(uniform))


@triton.jit
def _sample_kernel(
    logits, seeds, lengths, temperatures, tokens, logprobs, V, stride, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature <= 0.0
    inverse = tl.where(is_greedy, 1.0, 1.0 / tl.maximum(temperature, 1e-6))
    key = _derive(tl.load(seeds + row).to(tl.uint64), tl.load(lengths + row).to(tl.uint64))
    c, w = tl.arange(0, CHUNKS), tl.arange(0, CHUNK)
    high, total, likeliest, num_broken = float("-inf"), 0.0, 0, 0
    first, winner = tl.full([], float("-inf"), tl.float64), 0
    for start in range(0, V, CHUNKS * CHUNK):
        index = start + c[:, None] * CHUNK + w[None, :]
        x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
        is_usable = x < float("inf")  # excludes +inf and NaN, which comparisons and maxima would skip
        num_broken += tl.sum(tl.sum(tl.where(is_usable, 0, 1), 1), 0)
        x = tl.where(is_usable, x, float("-inf"))
        highs, places = tl.max(x, 1, return_indices=True)
        # If all logits are -inf, subtract 0: -inf minus -inf would be NaN.
        base = tl.where(highs == float("-inf"), 0.0, highs)
        sums = tl.sum(tl.exp2((x - base[:, None]) * _LOG2E), 1)
        highest, which = tl.max(highs, 0, return_indices=True)
        higher = tl.maximum(high, highest)
        top = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((high - top) * _LOG2E) + tl.sum(sums * tl.exp2((base - top) * _LOG2E), 0)
        place = tl.sum(tl.where(c == which, places, 0), 0)
        likeliest = tl.where(highest > high, start + which * CHUNK + place, likeliest)
        high = higher
        chunks = start // CHUNK + c
        scores = base.to(tl.float64) + tl.log(sums.to(tl.float64)) - _log_exponentials(key, (-1 - chunks).to(tl.int64))
        score, which = tl.max(scores, 0, return_indices=True)
        winner = tl.where(score > first, start // CHUNK + which, winner)
        first = tl.maximum(first, score)
    index = winner * CHUNK + w
    x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
    x = tl.where(x < float("inf"), x, float("-inf"))
    _, place = tl.max(x.to(tl.float64) - _log_exponentials(key, index), 0, return_indices=True)
    # A row without finite logits still draws a token, which must be in the vocabulary: the next round looks it up in the
    # embedding, sixteen rounds may run before the host reads the NaN, and an index out of range kills the CUDA context.
    token = tl.minimum(tl.where(is_greedy, likeliest, winner * CHUNK + place), V - 1)
    logit = tl.load(logits + row * stride + token).to(tl.float32) * inverse
    tl.store(tokens + row, token.to(tl.int64))
    is_broken = (num_broken > 0) | (high == float("-inf"))
    tl.store(logprobs + row, tl.where(is_broken, float("nan"), logit - high - tl.log(total)))


def sample_rows(logits_NV: Tensor, seeds_N: Tensor, lengths_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, their log-probabilities at the given temperatures) by the race of `sampling`; temperature 0 is greedy.

    `lengths_N`: tokens before the drawn one. A log-probability is NaN if the logits are not finite.
    """
    num_rows, vocab = logits_NV.shape
    tokens_N = torch.empty(num_rows, dtype=torch.long, device=logits_NV.device)
    logprobs_N = torch.empty(num_rows, dtype=torch.float32, device=logits_NV.device)
    num_chunks = triton.next_power_of_2(triton.cdiv(vocab, CHUNK))
    _sample_kernel[(num_rows,)](
        logits_NV, seeds_N, lengths_N, temperatures_N, tokens_N, logprobs_N, vocab, logits_NV.stride(0),
        CHUNK=CHUNK, CHUNKS=min(32, num_chunks), num_warps=8,
    )  # fmt: skip
    return tokens_N, logprobs_N
