"""Triton kernels of the embedded engine: a decoder layer of the Llama family between its matrix products, the products of a
single row, and sampling. A layer's results are rounded where transformers rounds them.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.sampling import CHUNK
from ludic.types.requests import MIX_CONSTANTS, MIX_SHIFTS, SEED_BITS, STEP_FACTOR


@triton.jit
def _norm_kernel(x, weight, out, epsilon, N: tl.constexpr, N_PAD: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, N_PAD)
    values = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 0) / N + epsilon)
    dtype = out.dtype.element_ty
    result = scaled.to(dtype).to(tl.float32) * tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + n, result.to(dtype), mask=n < N)


def rms_norm(x_TN: Tensor, weight_N: Tensor, epsilon: float) -> Tensor:
    """RMS norm of contiguous rows, rounded where transformers rounds."""
    out = torch.empty_like(x_TN)
    size = triton.next_power_of_2(x_TN.shape[1])
    _norm_kernel[(x_TN.shape[0],)](
        x_TN, weight_N, out, epsilon, N=x_TN.shape[1], N_PAD=size, num_warps=min(8, max(1, size // 512))
    )
    return out


@triton.jit
def _row_product_kernel(
    x, weight, out, bias, norm, epsilon, N,
    K: tl.constexpr, K_STEP: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, HAS_NORM: tl.constexpr, IS_GATED: tl.constexpr,
):  # fmt: skip
    n, k = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, K_STEP)
    n_ok = n < N
    dtype = out.dtype.element_ty
    total = tl.zeros([ROWS, K_STEP], tl.float32)
    gated = tl.zeros([ROWS, K_STEP], tl.float32)
    for start in range(0, K, K_STEP):
        k_ok = start + k < K
        ok = n_ok[:, None] & k_ok[None, :]
        where = weight + n.to(tl.int64)[:, None] * K + (start + k)[None, :]
        part_of_weight = tl.load(where, mask=ok, other=0.0)  # first: everything else comes from the cache
        if IS_GATED:
            up = tl.load(where + N.to(tl.int64) * K, mask=ok, other=0.0)
        part = tl.load(x + start + k, mask=k_ok, other=0.0).to(tl.float32)
        if HAS_NORM:  # one loop takes the whole row
            scaled = (part * tl.rsqrt(tl.sum(part * part, 0) / K + epsilon)).to(dtype).to(tl.float32)
            part = (scaled * tl.load(norm + k, mask=k_ok, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
        total += part_of_weight.to(tl.float32) * part[None, :]
        if IS_GATED:
            gated += up.to(tl.float32) * part[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + n, mask=n_ok, other=0.0).to(tl.float32)
    if ADDS:
        result += tl.load(out + n, mask=n_ok, other=0.0).to(tl.float32)
    if IS_GATED:
        gate = result.to(dtype).to(tl.float32)
        active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        result = active * tl.sum(gated, 1).to(dtype).to(tl.float32)
    tl.store(out + n, result.to(dtype), mask=n_ok)


# Letters: N outputs, K inputs.
def row_product(
    x_1K: Tensor,
    weight_NK: Tensor,
    bias_N: Tensor | None = None,
    *,
    norm: tuple[Tensor, float] | None = None,
    add_to: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """A linear layer for a single row, where reading the weight is all that counts.

    `norm`: RMS norm of the row before. `add_to`: add the result in place. `is_gated`: silu(first half) · second half.
    """
    num_out, size = weight_NK.shape
    num_out //= 2 if is_gated else 1
    out = add_to if add_to is not None else torch.empty(1, num_out, dtype=x_1K.dtype, device=x_1K.device)
    weight_of_norm, epsilon = norm if norm is not None else (x_1K, 0.0)
    whole = triton.next_power_of_2(size)
    # Measured on an H200 with the matrices of 1.5B and 7B models.
    rows, num_warps = (2, 8) if num_out < 8192 and size < 4096 else (1, 2) if is_gated else (1, 4)
    _row_product_kernel[(triton.cdiv(num_out, rows),)](
        x_1K, weight_NK, out, bias_N if bias_N is not None else x_1K, weight_of_norm, epsilon, num_out,
        K=size, K_STEP=whole if norm is not None else min(2048, whole), ROWS=rows, HAS_BIAS=bias_N is not None,
        ADDS=add_to is not None, HAS_NORM=norm is not None, IS_GATED=is_gated, num_warps=num_warps,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_kernel(
    qkv, keys, values, positions, slots, cosines, sines, q_norm, k_norm, epsilon,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    HAS_NORM: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    ok = (h < H + 2 * K)[:, None] & (d < D // 2)[None, :]
    dtype = qkv.dtype.element_ty
    first = qkv + row * (H + 2 * K) * D + h[:, None] * D + d[None, :]
    a = tl.load(first, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(first + D // 2, mask=ok, other=0.0).to(tl.float32)
    if STORES:
        slot = tl.load(slots + row)
        value = values + slot * K * D + (h[:, None] - H - K) * D + d[None, :]
        is_value = ok & (h >= H + K)[:, None]
        tl.store(value, a.to(dtype), mask=is_value)
        tl.store(value + D // 2, b.to(dtype), mask=is_value)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
        is_query = (h < H)[:, None]
        wq_a = tl.load(q_norm + d, mask=d < D // 2, other=0.0)[None, :].to(tl.float32)
        wq_b = tl.load(q_norm + D // 2 + d, mask=d < D // 2, other=0.0)[None, :].to(tl.float32)
        wk_a = tl.load(k_norm + d, mask=d < D // 2, other=0.0)[None, :].to(tl.float32)
        wk_b = tl.load(k_norm + D // 2 + d, mask=d < D // 2, other=0.0)[None, :].to(tl.float32)
        a = ((a * scale).to(dtype).to(tl.float32) * tl.where(is_query, wq_a, wk_a)).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * tl.where(is_query, wq_b, wk_b)).to(dtype).to(tl.float32)
    angle = tl.load(positions + row) * D + d
    in_half = d < D // 2
    cos_a = tl.load(cosines + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cosines + angle + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sines + angle, mask=in_half, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sines + angle + D // 2, mask=in_half, other=0.0).to(tl.float32)[None, :]
    turned_a, turned_b = (a * cos_a - b * sin_a).to(dtype), (b * cos_b + a * sin_b).to(dtype)
    is_turned = ok & (h < H + K)[:, None]
    tl.store(first, turned_a, mask=is_turned)
    tl.store(first + D // 2, turned_b, mask=is_turned)
    if STORES:
        key = keys + slot * K * D + (h[:, None] - H) * D + d[None, :]
        is_key = is_turned & (h >= H)[:, None]
        tl.store(key, turned_a, mask=is_key)
        tl.store(key + D // 2, turned_b, mask=is_key)


# Letters: T tokens, H query heads, K key/value heads, D head size, S slots, L positions.
def rotate_and_store(
    qkv: Tensor,
    positions_T: Tensor,
    cosines_LD: Tensor,
    sines_LD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
    store: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Rotate the queries and keys of `qkv` [T, (H + 2K) · D] in place, after their norms if the model has them.

    `store`: (keys [S, K, D], values, slots of the tokens), where the new keys and values are also written.
    """
    size = cosines_LD.shape[1]
    total = qkv.shape[1] // size
    kv_heads = (total - num_heads) // 2
    keys, values, slots = store if store is not None else (qkv, qkv, positions_T)
    q_norm, k_norm, epsilon = norms if norms is not None else (qkv, qkv, 0.0)
    _rotate_kernel[(qkv.shape[0], triton.cdiv(total, 8))](
        qkv, keys, values, positions_T, slots, cosines_LD, sines_LD, q_norm, k_norm, epsilon,
        H=num_heads, K=kv_heads, D=size, HEADS=8, HALF=triton.next_power_of_2(size // 2),
        HAS_NORM=norms is not None, STORES=store is not None, num_warps=2,
    )  # fmt: skip


@triton.jit
def _keep_own_kernel(inner, slots, num_columns, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    where = inner + row.to(tl.int64) * num_columns + column
    inside = column < num_columns
    own = tl.load(where, mask=inside & (column // width == slot), other=0.0)
    tl.store(where, tl.where(slot == -2, float("nan"), own.to(tl.float32)).to(inner.dtype.element_ty), mask=inside)


def keep_own_columns(inner_TK: Tensor, slots_T: Tensor, width: int) -> None:
    """`adapter_slots.keep_own` on a GPU. -2 is its BROKEN."""
    num_rows, num_columns = inner_TK.shape
    block = min(1024, triton.next_power_of_2(num_columns))
    _keep_own_kernel[(num_rows, triton.cdiv(num_columns, block))](inner_TK, slots_T, num_columns, width, BLOCK=block)


_LOG2E = tl.constexpr(1.4426950408889634)
_STEP_FACTOR = tl.constexpr(STEP_FACTOR)
_INCREMENT, _FACTOR_1, _FACTOR_2 = (tl.constexpr(constant) for constant in MIX_CONSTANTS)
_SHIFT_1, _SHIFT_2, _SHIFT_3 = (tl.constexpr(shift) for shift in MIX_SHIFTS)
_SEED_BITS, _SEED_UNIT = tl.constexpr(SEED_BITS), tl.constexpr(2.0**-SEED_BITS)


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
    """Buffers that the decoding rounds read and write on the device, one entry per row."""

    tokens: Tensor
    """The next input."""
    positions: Tensor
    lengths: Tensor
    """Tokens including the next input; int32."""
    num_shared: Tensor
    """Tokens of the prefix that the row shares with its group; int32."""
    slots: Tensor
    """The slots of the next input's keys and values."""
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
