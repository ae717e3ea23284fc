"""Triton kernels of a decoder layer of the Llama family: what it computes between its matrix products, and the products of a
single row. Results are rounded where transformers rounds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
