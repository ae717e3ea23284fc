"""Triton kernels of a decoding round: paged attention, and sampling with log-probabilities.

Attention runs one program per (sequence, key/value head, split). The query heads of a group share every loaded key. Contexts
are cut into splits if there are too few sequences to fill the GPU, and merged afterwards. Everything that varies between
steps is read from memory, so that a captured CUDA graph stays valid.
"""

from dataclasses import dataclass

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
    # Measured on an H200: small loops if sequences fill the GPU, larger ones if few sequences are split.
    tokens, num_warps = (32, 2) if splits == 1 else (64, 4)
    _decode_kernel[(num_rows, kv_heads, splits)](
        query_THD, keys_SKD, values_SKD, out_THD, partial_out, partial_max, partial_sum, tables, lengths_T,
        query_THD.stride(0), query_THD.stride(1), tables.stride(0), scaling, softcap or 1.0, sliding_window or 0,
        K=kv_heads, G=group, D=size, BLOCK_SIZE=block_size, G_PAD=max(16, triton.next_power_of_2(group)),
        D_PAD=triton.next_power_of_2(size), TOKENS=tokens, SPLITS=splits, HAS_CAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None, num_warps=num_warps, num_stages=2,
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


# A row of logits is drawn in two launches: the chunks of the vocabulary, by many programs, then the race between them, by one
# program per row. A single program per row would leave most of the GPU idle at small batches.
_PART_CHUNKS = 32


@triton.jit
def _sum_chunks_kernel(
    logits, temperatures, highs, sums, V, stride, num_slots, CHUNK: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """The highest logit of each chunk, and the sum of exponentials relative to it."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    inverse = tl.where(temperature <= 0.0, 1.0, 1.0 / tl.maximum(temperature, 1e-6))
    chunks = part * CHUNKS + tl.arange(0, CHUNKS)
    index = chunks[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
    chunk_highs = tl.max(x, 1)
    # If all logits of a chunk are -inf, subtract 0: -inf minus -inf would be NaN. With NaN or +inf in it the sum is NaN.
    base = tl.where(chunk_highs == float("-inf"), 0.0, chunk_highs)
    tl.store(highs + row * num_slots + chunks, chunk_highs)
    tl.store(sums + row * num_slots + chunks, tl.sum(tl.exp2((x - base[:, None]) * _LOG2E), 1))


@triton.jit
def _draw_kernel(
    logits, seeds, lengths, temperatures, highs, sums, tokens, logprobs, V, stride, num_slots,
    rounds, out_stride, next_tokens, positions, slots, tables, table_stride,
    CHUNK: tl.constexpr, SLOTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ADVANCE: tl.constexpr,
):  # fmt: skip
    """Draw a row's chunk and its token. With ADVANCE: write it to this round's output and prepare the next round."""
    row = tl.program_id(0).to(tl.int64)
    temperature, length = tl.load(temperatures + row), tl.load(lengths + row)
    is_greedy = temperature <= 0.0
    inverse = tl.where(is_greedy, 1.0, 1.0 / tl.maximum(temperature, 1e-6))
    key = _derive(tl.load(seeds + row).to(tl.uint64), length.to(tl.uint64))
    c, w = tl.arange(0, SLOTS), tl.arange(0, CHUNK)
    chunk_highs = tl.load(highs + row * num_slots + c, mask=c < num_slots, other=float("-inf"))
    chunk_sums = tl.load(sums + row * num_slots + c, mask=c < num_slots, other=0.0)
    num_broken = tl.sum((chunk_sums != chunk_sums).to(tl.int32), 0)
    is_usable = chunk_sums > 0.0
    chunk_highs = tl.where(is_usable, chunk_highs, float("-inf"))
    high, top = tl.max(chunk_highs, 0, return_indices=True)
    total = tl.sum(tl.where(is_usable, chunk_sums * tl.exp2((chunk_highs - high) * _LOG2E), 0.0), 0)
    noise = _log_exponentials(key, (-1 - c).to(tl.int64))
    scores = chunk_highs.to(tl.float64) + tl.log(tl.where(is_usable, chunk_sums, 1.0).to(tl.float64)) - noise
    _, winner = tl.max(tl.where(is_usable, scores, float("-inf")), 0, return_indices=True)
    chunk = tl.where(is_greedy, top, winner)
    index = chunk * CHUNK + w
    x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32) * inverse
    x = tl.where(x < float("inf"), x, float("-inf")).to(tl.float64)
    _, place = tl.max(tl.where(is_greedy, x, x - _log_exponentials(key, index)), 0, return_indices=True)
    # A row without finite logits still draws a token, which must be in the vocabulary: the next round looks it up in the
    # embedding, several rounds may run before the host reads the NaN, and an index out of range kills the CUDA context.
    token = tl.minimum(chunk * CHUNK + place, V - 1).to(tl.int64)
    logit = tl.load(logits + row * stride + token).to(tl.float32) * inverse
    is_broken = (num_broken > 0) | (high == float("-inf"))
    logprob = tl.where(is_broken, float("nan"), logit - high - tl.log(total))
    if ADVANCE:
        number = tl.load(rounds + row)
        tl.store(rounds + row, number + 1)
        tl.store(tokens + number * out_stride + row, token)
        tl.store(logprobs + number * out_stride + row, logprob)
        position = tl.load(positions + row) + 1
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        tl.store(next_tokens + row, token)
        tl.store(positions + row, position)
        tl.store(lengths + row, length + 1)
        tl.store(slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE)
    else:
        tl.store(tokens + row, token)
        tl.store(logprobs + row, logprob)


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """What the decoding rounds read and write on the device, one entry per row."""

    tokens: Tensor
    """The next input."""
    positions: Tensor
    lengths: Tensor
    """Tokens including the next input; int32."""
    slots: Tensor
    """Where the next input's keys and values go."""
    seeds: Tensor
    temperatures: Tensor
    tables: Tensor
    """[rows, blocks], int32."""
    rounds: Tensor
    """Rounds since the start of the step."""
    out_tokens: Tensor
    out_logprobs: Tensor
    """[rounds, rows]."""


def sample_rows(logits_NV: Tensor, seeds_N: Tensor, lengths_N: Tensor, temperatures_N: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, their log-probabilities at the given temperatures) by the race of `sampling`; temperature 0 is greedy.

    `lengths_N`: tokens before the drawn one. A log-probability is NaN if the logits are not finite.
    """
    tokens_N = torch.empty(logits_NV.shape[0], dtype=torch.long, device=logits_NV.device)
    logprobs_N = torch.empty(logits_NV.shape[0], dtype=torch.float32, device=logits_NV.device)
    _sample(logits_NV, seeds_N, lengths_N, temperatures_N, tokens_N, logprobs_N, None, 1)
    return tokens_N, logprobs_N


def sample_round(logits_NV: Tensor, rows: DecodeRows, block_size: int) -> None:
    """Draw a token for the first N rows, write it to the round's output, and prepare the rows for the next round."""
    _sample(
        logits_NV, rows.seeds, rows.lengths, rows.temperatures, rows.out_tokens, rows.out_logprobs, rows, block_size
    )


def _sample(
    logits_NV: Tensor, seeds: Tensor, lengths: Tensor, temperatures: Tensor, tokens: Tensor, logprobs: Tensor,
    rows: DecodeRows | None, block_size: int,
) -> None:  # fmt: skip
    num_rows, vocab = logits_NV.shape
    num_parts = triton.cdiv(vocab, _PART_CHUNKS * CHUNK)
    num_slots = num_parts * _PART_CHUNKS
    highs, sums = torch.empty(2, num_rows * num_slots, dtype=torch.float32, device=logits_NV.device)
    _sum_chunks_kernel[(num_rows, num_parts)](
        logits_NV, temperatures, highs, sums, vocab, logits_NV.stride(0), num_slots,
        CHUNK=CHUNK, CHUNKS=_PART_CHUNKS, num_warps=4,
    )  # fmt: skip
    # Without rows the last arguments are not used; a kernel still needs tensors in their place.
    state = (tokens, 0, tokens, tokens, tokens, tokens, 0)
    if rows is not None:
        tables = rows.tables
        state = (rows.rounds, tokens.stride(0), rows.tokens, rows.positions, rows.slots, tables, tables.stride(0))
    _draw_kernel[(num_rows,)](
        logits_NV, seeds, lengths, temperatures, highs, sums, tokens, logprobs, vocab, logits_NV.stride(0), num_slots, *state,
        CHUNK=CHUNK, SLOTS=triton.next_power_of_2(num_slots), BLOCK_SIZE=block_size, ADVANCE=rows is not None, num_warps=8,
    )  # fmt: skip
