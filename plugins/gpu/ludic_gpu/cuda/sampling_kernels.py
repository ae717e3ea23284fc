"""Triton kernels that sample a token for every row, with its log-probability, and prepare the next decoding round.

Everything that varies between steps is read from memory, so that a captured CUDA graph stays valid.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludic.inference.local.sampling import CHUNK
from ludic.types.requests import MIX_CONSTANTS, MIX_SHIFTS, SEED_BITS, STEP_FACTOR

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
    """What the decoding rounds read and write on the device, one entry per row."""

    tokens: Tensor
    """The next input."""
    positions: Tensor
    lengths: Tensor
    """Tokens including the next input; int32."""
    num_shared: Tensor
    """Tokens of the prefix that the row shares with its group; int32."""
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
