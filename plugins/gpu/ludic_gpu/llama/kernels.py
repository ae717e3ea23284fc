"""Triton kernels of a decoder layer of the Llama family in training: what it computes between its matrix products, forward and
backward. Values are rounded where transformers rounds them; gradients are computed in fp32 and rounded once.

plain.py has the same functions in PyTorch.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

_MAX_PROGRAMS = 1024
"""Programs of the kernel that sums over heads of tokens: each writes one partial sum, in a fixed order."""


@triton.jit
def _add_norm_kernel(
    x, delta, weight, total, out, epsilon, T,
    N: tl.constexpr, N_PAD: tl.constexpr, ROWS: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    rows, n = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, N_PAD)
    ok = (rows < T)[:, None] & (n < N)[None, :]
    where = rows.to(tl.int64)[:, None] * N + n[None, :]
    dtype = out.dtype.element_ty
    values = tl.load(x + where, mask=ok, other=0.0).to(tl.float32)
    if ADDS:
        rounded = (values + tl.load(delta + where, mask=ok, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + where, rounded, mask=ok)
        values = rounded.to(tl.float32)
    scaled = values * tl.rsqrt(tl.sum(values * values, 1) / N + epsilon)[:, None]
    factor = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + where, (scaled.to(dtype).to(tl.float32) * factor[None, :]).to(dtype), mask=ok)


# Letters: T tokens, N values of a token.
def add_norm(x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its RMS norm); without delta, x itself."""
    num_rows, width = x_TN.shape
    padded, rows = _norm_block(width)
    out = torch.empty_like(x_TN)
    total = x_TN if delta_TN is None else torch.empty_like(x_TN)
    _add_norm_kernel[(-(-num_rows // rows),)](
        x_TN, total if delta_TN is None else delta_TN, weight_N, total, out, epsilon, num_rows,
        N=width, N_PAD=padded, ROWS=rows, ADDS=delta_TN is not None, num_warps=8,
    )  # fmt: skip
    return total, out


@triton.jit
def _norm_backward_kernel(
    x, weight, grad, residual, out, sums, epsilon, T,
    N: tl.constexpr, N_PAD: tl.constexpr, ROWS: tl.constexpr, IN_LAYER: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, N_PAD)
    in_row = n < N
    factor = tl.load(weight + n, mask=in_row, other=0.0).to(tl.float32)[None, :]
    dtype = out.dtype.element_ty
    total = tl.zeros([ROWS, N_PAD], tl.float32)
    for start in range(tl.program_id(0) * ROWS, T, tl.num_programs(0) * ROWS):
        rows = start + tl.arange(0, ROWS)
        ok = (rows < T)[:, None] & in_row[None, :]
        where = rows.to(tl.int64)[:, None] * N + n[None, :]
        values = tl.load(x + where, mask=ok, other=0.0).to(tl.float32)
        slope = tl.load(grad + where, mask=ok, other=0.0).to(tl.float32)
        if IN_LAYER:
            before = tl.load(residual + where, mask=ok, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 1) / N + epsilon)[:, None]
        scaled = values * scale
        rounded = scaled.to(dtype).to(tl.float32)
        total += slope * rounded
        slope *= factor
        share = (tl.sum(slope * scaled, 1) / N)[:, None]
        result = scale * (slope - scaled * share)
        if IN_LAYER:
            result += before
            tl.store(grad + where, (rounded * factor).to(dtype), mask=ok)
        tl.store(out + where, result.to(dtype), mask=ok)
    tl.store(sums + tl.program_id(0) * N + n, tl.sum(total, 0), mask=in_row)


def norm_backward(
    x_TN: Tensor, weight_N: Tensor, grad_TN: Tensor, residual_TN: Tensor | None, epsilon: float, sums_PN: Tensor
) -> Tensor:
    """The gradient of x, from that of its norm. Fills `sums_PN` with what adds up to the weight's gradient.

    `residual_TN`: the gradient of x elsewhere, which is added; then `grad_TN` is also replaced by the norm, which the gradient
    of the product behind it needs.
    """
    num_rows, width = x_TN.shape
    padded, rows, _ = _backward_block(width)
    out = torch.empty_like(x_TN)
    _norm_backward_kernel[(sums_PN.shape[0],)](
        x_TN, weight_N, grad_TN, x_TN if residual_TN is None else residual_TN, out, sums_PN, epsilon, num_rows,
        N=width, N_PAD=padded, ROWS=rows, IN_LAYER=residual_TN is not None, num_warps=8,
    )  # fmt: skip
    return out


def new_sums(x_TN: Tensor, count: int) -> Tensor:
    """[count, P, N] for the partial sums of `count` norms."""
    num_rows, width = x_TN.shape
    _, rows, num_programs = _backward_block(width)
    num_programs = min(num_programs, -(-num_rows // rows))
    return torch.empty(count, num_programs, width, dtype=torch.float32, device=x_TN.device)


@triton.jit
def _add_up_kernel(sums, out, P, N: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr):
    which, n = tl.program_id(0), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    rows, ok = tl.arange(0, ROWS), n < N
    total = tl.zeros([ROWS, SIZE], tl.float32)
    for start in range(0, P, ROWS):
        where = (which * P + start + rows)[:, None] * N + n[None, :]
        total += tl.load(sums + where, mask=(start + rows < P)[:, None] & ok[None, :], other=0.0)
    tl.store(out + which * N + n, tl.sum(total, 0).to(out.dtype.element_ty), mask=ok)


# Letters: C weights, P partial sums.
def add_up(sums_CPN: Tensor, dtype: torch.dtype) -> Tensor:
    """[C, N]: gradients of weights, from the partial sums of programs."""
    count, num_parts, width = sums_CPN.shape
    out = torch.empty(count, width, dtype=dtype, device=sums_CPN.device)
    _add_up_kernel[(count, -(-width // 32))](sums_CPN, out, num_parts, N=width, ROWS=64, SIZE=32, num_warps=4)
    return out


@cache
def _norm_block(width: int) -> tuple[int, int]:
    """(padded width, rows of a program)."""
    padded = triton.next_power_of_2(width)
    return padded, max(1, 4096 // padded)


@cache
def _backward_block(width: int) -> tuple[int, int, int]:
    """(padded width, rows at a time, programs at most), measured on an H200 with widths of 576 and 1536. Of two that take about
    the same time, the one with fewer partial sums."""
    padded = triton.next_power_of_2(width)
    return (padded, 4096 // padded, 264) if padded <= 1024 else (padded, 1, 528)


@triton.jit
def _silu_mul_kernel(gate_up, out, N: tl.constexpr, SIZE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    ok = n < N
    gate = tl.load(gate_up + row * 2 * N + n, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + n, mask=ok, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * N + n, (active * up).to(dtype), mask=ok)


# Letters: F values between the products of an MLP, E both halves of them.
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    """silu(first half) · second half of each row."""
    num_rows, width = gate_up_TE.shape[0], gate_up_TE.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up_TE.dtype, device=gate_up_TE.device)
    size = _silu_block(width)
    _silu_mul_kernel[(num_rows, -(-width // size))](gate_up_TE, out, N=width, SIZE=size, num_warps=size // 256)
    return out


@triton.jit
def _silu_mul_backward_kernel(gate_up, grad, N: tl.constexpr, SIZE: tl.constexpr):
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    ok = n < N
    first = gate_up + row * 2 * N + n
    gate = tl.load(first, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(first + N, mask=ok, other=0.0).to(tl.float32)
    slope = tl.load(grad + row * N + n, mask=ok, other=0.0).to(tl.float32)
    dtype = grad.dtype.element_ty
    gated = 1.0 / (1.0 + tl.exp(-gate))
    active = (gate * gated).to(dtype).to(tl.float32)
    tl.store(first, (slope * up * gated * (1.0 + gate * (1.0 - gated))).to(dtype), mask=ok)
    tl.store(first + N, (slope * active).to(dtype), mask=ok)
    tl.store(grad + row * N + n, (active * up).to(dtype), mask=ok)


def silu_mul_backward(gate_up_TE: Tensor, grad_TF: Tensor) -> None:
    """Replace gate and up by their gradients, and the gradient of `silu_mul` by its value."""
    num_rows, width = grad_TF.shape
    size = _silu_block(width)
    _silu_mul_backward_kernel[(num_rows, -(-width // size))](
        gate_up_TE, grad_TF, N=width, SIZE=size, num_warps=size // 256
    )


@cache
def _silu_block(width: int) -> int:
    return 1024 if width % 1024 == 0 or width > 8192 else 512


@triton.jit
def _rotate_kernel(
    qkv, out, cosines, sines, q_norm, k_norm, epsilon, COUNT,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, HEADS_OUT: tl.constexpr,
    HAS_NORM: tl.constexpr,
):  # fmt: skip
    index, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, HALF)
    token, head = (index // (H + K)).to(tl.int64), index % (H + K)
    in_half = (d < D // 2)[None, :]
    ok = (index < COUNT)[:, None] & in_half
    dtype = out.dtype.element_ty
    first = qkv + (token * (H + 2 * K) + head)[:, None] * D + d[None, :]
    a = tl.load(first, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(first + D // 2, mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
        wq, wk = q_norm + d[None, :], k_norm + d[None, :]
        is_query = (head < H)[:, None]
        w_a = tl.where(is_query, tl.load(wq, mask=in_half, other=0.0), tl.load(wk, mask=in_half, other=0.0))
        w_b = tl.where(
            is_query, tl.load(wq + D // 2, mask=in_half, other=0.0), tl.load(wk + D // 2, mask=in_half, other=0.0)
        )
        a = ((a * scale).to(dtype).to(tl.float32) * w_a.to(tl.float32)).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * w_b.to(tl.float32)).to(dtype).to(tl.float32)
    angle = token[:, None] * D + d[None, :]
    cosine = tl.load(cosines + angle, mask=ok, other=0.0).to(tl.float32)
    sine = tl.load(sines + angle, mask=ok, other=0.0).to(tl.float32)
    where = out + (token * HEADS_OUT + head)[:, None] * D + d[None, :]
    tl.store(where, (a * cosine - b * sine).to(dtype), mask=ok)
    tl.store(where + D // 2, (b * cosine + a * sine).to(dtype), mask=ok)


# Letters: H query heads, K key/value heads, D head size, W = (H + 2K) · D.
def rotate(
    qkv_TW: Tensor,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Rotate queries and keys: in place, or after their norms into a new tensor [T, (H + K) · D]."""
    num_tokens, size = cosines_TD.shape
    total = qkv_TW.shape[1] // size
    kv_heads = (total - num_heads) // 2
    turned = num_heads + kv_heads
    out = qkv_TW if norms is None else qkv_TW.new_empty(num_tokens, turned * size)
    half, rows = _head_block(size)
    q_norm, k_norm, epsilon = norms if norms is not None else (qkv_TW, qkv_TW, 0.0)
    count = num_tokens * turned
    _rotate_kernel[(-(-count // rows),)](
        qkv_TW, out, cosines_TD, sines_TD, q_norm, k_norm, epsilon, count,
        H=num_heads, K=kv_heads, D=size, HALF=half, ROWS=rows, HEADS_OUT=total if norms is None else turned,
        HAS_NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _rotate_backward_kernel(
    grad_q, grad_k, grad_v, qkv, out, cosines, sines, q_norm, k_norm, sums, epsilon, COUNT,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, HALF)
    in_half = (d < D // 2)[None, :]
    dtype = out.dtype.element_ty
    sum_qa, sum_qb = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    sum_ka, sum_kb = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for start in range(tl.program_id(0) * ROWS, COUNT, tl.num_programs(0) * ROWS):
        index = start + tl.arange(0, ROWS)
        token, head = (index // (H + 2 * K)).to(tl.int64), index % (H + 2 * K)
        ok = (index < COUNT)[:, None] & in_half
        is_query, is_value = (head < H)[:, None], (head >= H + K)[:, None]
        of_query, of_value = ok & is_query, ok & is_value
        of_key = ok & (head >= H)[:, None] & (head < H + K)[:, None]
        from_q = grad_q + (token * H + head)[:, None] * D + d[None, :]
        from_k = grad_k + (token * K + head - H)[:, None] * D + d[None, :]
        from_v = grad_v + (token * K + head - H - K)[:, None] * D + d[None, :]
        slope_a = (
            tl.load(from_q, mask=of_query, other=0.0).to(tl.float32)
            + tl.load(from_k, mask=of_key, other=0.0).to(tl.float32)
            + tl.load(from_v, mask=of_value, other=0.0).to(tl.float32)
        )
        slope_b = (
            tl.load(from_q + D // 2, mask=of_query, other=0.0).to(tl.float32)
            + tl.load(from_k + D // 2, mask=of_key, other=0.0).to(tl.float32)
            + tl.load(from_v + D // 2, mask=of_value, other=0.0).to(tl.float32)
        )
        angle = token[:, None] * D + d[None, :]
        is_turned = of_query | of_key
        cosine = tl.load(cosines + angle, mask=is_turned, other=1.0).to(tl.float32)  # values stay as they are
        sine = tl.load(sines + angle, mask=is_turned, other=0.0).to(tl.float32)
        grad_a, grad_b = slope_a * cosine + slope_b * sine, slope_b * cosine - slope_a * sine
        where = (token * (H + 2 * K) + head)[:, None] * D + d[None, :]
        if HAS_NORM:
            a = tl.load(qkv + where, mask=is_turned, other=0.0).to(tl.float32)
            b = tl.load(qkv + where + D // 2, mask=is_turned, other=0.0).to(tl.float32)
            scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / D + epsilon)[:, None]
            a *= scale
            b *= scale
            of_a, of_b = grad_a * a.to(dtype).to(tl.float32), grad_b * b.to(dtype).to(tl.float32)
            sum_qa += tl.sum(tl.where(of_query, of_a, 0.0), 0)
            sum_qb += tl.sum(tl.where(of_query, of_b, 0.0), 0)
            sum_ka += tl.sum(tl.where(of_key, of_a, 0.0), 0)
            sum_kb += tl.sum(tl.where(of_key, of_b, 0.0), 0)
            wq, wk = q_norm + d[None, :], k_norm + d[None, :]
            w_a = tl.where(is_query, tl.load(wq, mask=in_half, other=0.0), tl.load(wk, mask=in_half, other=0.0))
            w_b = tl.where(
                is_query, tl.load(wq + D // 2, mask=in_half, other=0.0), tl.load(wk + D // 2, mask=in_half, other=0.0)
            )
            normed_a, normed_b = grad_a * w_a.to(tl.float32), grad_b * w_b.to(tl.float32)
            share = ((tl.sum(normed_a * a, 1) + tl.sum(normed_b * b, 1)) / D)[:, None]
            grad_a = tl.where(is_value, grad_a, scale * (normed_a - a * share))
            grad_b = tl.where(is_value, grad_b, scale * (normed_b - b * share))
        tl.store(out + where, grad_a.to(dtype), mask=ok)
        tl.store(out + where + D // 2, grad_b.to(dtype), mask=ok)
    if HAS_NORM:
        of_q = sums + tl.program_id(0) * D + d
        of_k = of_q + tl.num_programs(0) * D
        tl.store(of_q, sum_qa, mask=d < D // 2)
        tl.store(of_q + D // 2, sum_qb, mask=d < D // 2)
        tl.store(of_k, sum_ka, mask=d < D // 2)
        tl.store(of_k + D // 2, sum_kb, mask=d < D // 2)


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_TW: Tensor,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradient of `qkv_TW`, from those of rotated queries [T, H, D] and keys and of the values; with norms, also
    [2, P, D], what adds up to the gradients of their weights."""
    grad_q, grad_k, grad_v = (grad.contiguous() for grad in grads)
    num_tokens, num_heads, size = grad_q.shape
    kv_heads = grad_k.shape[1]
    count = num_tokens * (num_heads + 2 * kv_heads)
    half, rows = _head_block(size)
    num_programs = -(-count // rows)
    out, sums = torch.empty_like(qkv_TW), None
    q_norm, k_norm, epsilon = norms if norms is not None else (qkv_TW, qkv_TW, 0.0)
    if norms is not None:
        num_programs = min(num_programs, _MAX_PROGRAMS)
        sums = torch.empty(2, num_programs, size, dtype=torch.float32, device=out.device)
    _rotate_backward_kernel[(num_programs,)](
        grad_q, grad_k, grad_v, qkv_TW, out, cosines_TD, sines_TD, q_norm, k_norm, out if sums is None else sums, epsilon, count,
        H=num_heads, K=kv_heads, D=size, HALF=half, ROWS=rows, HAS_NORM=norms is not None, num_warps=4,
    )  # fmt: skip
    return out, sums


@cache
def _head_block(size: int) -> tuple[int, int]:
    """(padded half of a head, heads of a program)."""
    half = triton.next_power_of_2(size // 2)
    return half, max(1, 1024 // half)
