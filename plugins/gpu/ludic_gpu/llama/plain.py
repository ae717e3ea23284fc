"""The functions of kernels.py in PyTorch, with the same arguments and results: for tests off the GPU, and to read."""

import torch
import torch.nn.functional as F
from torch import Tensor


# Letters: T tokens, N values of a token, P partial sums (here one).
def add_norm(x_TN: Tensor, delta_TN: Tensor | None, weight_N: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    total = x_TN if delta_TN is None else x_TN + delta_TN
    return total, _scaled(total, epsilon)[0].to(total.dtype) * weight_N


def norm_backward(
    x_TN: Tensor, weight_N: Tensor, grad_TN: Tensor, residual_TN: Tensor | None, epsilon: float, sums_PN: Tensor
) -> Tensor:
    scaled, scale = _scaled(x_TN, epsilon)
    sums_PN[0] = (grad_TN * scaled).sum(0)
    found = _through_norm(grad_TN * weight_N, scaled, scale)
    if residual_TN is not None:
        found += residual_TN
        grad_TN.copy_(scaled.to(x_TN.dtype) * weight_N)
    return found.to(x_TN.dtype)


def new_sums(x_TN: Tensor, count: int) -> Tensor:
    return torch.empty(count, 1, x_TN.shape[1], device=x_TN.device)


def add_up(sums_CPN: Tensor, dtype: torch.dtype) -> Tensor:
    return sums_CPN.sum(1).to(dtype)


# Letters: F values between the products of an MLP, E both halves of them.
def silu_mul(gate_up_TE: Tensor) -> Tensor:
    gate, up = gate_up_TE.chunk(2, dim=1)
    return F.silu(gate) * up


def silu_mul_backward(gate_up_TE: Tensor, grad_TF: Tensor) -> None:
    gate, up = gate_up_TE.chunk(2, dim=1)
    gated = torch.sigmoid(gate)
    active = gate * gated
    value = active * up
    gate.copy_(grad_TF * up * gated * (1 + gate * (1 - gated)))
    up.copy_(grad_TF * active)
    grad_TF.copy_(value)


# Letters: H query heads, K key/value heads, D head size, W = (H + 2K) · D.
def rotate(
    qkv_TW: Tensor,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    num_heads: int,
    norms: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    num_tokens, size = cosines_TD.shape
    heads = qkv_TW.view(num_tokens, -1, size)
    num_kv = (heads.shape[1] - num_heads) // 2
    turned = heads[:, : num_heads + num_kv]
    if norms is not None:
        weight = _of_heads(norms, num_heads, num_kv)
        turned = _scaled(turned, norms[2])[0].to(turned.dtype) * weight
    rotated = turned * cosines_TD[:, None] + turned.roll(size // 2, -1) * _signed(sines_TD)[:, None]
    if norms is not None:
        return rotated.flatten(1)
    turned.copy_(rotated)
    return qkv_TW


def rotate_backward(
    grads: tuple[Tensor, Tensor, Tensor],
    qkv_TW: Tensor,
    cosines_TD: Tensor,
    sines_TD: Tensor,
    norms: tuple[Tensor, Tensor, float] | None,
) -> tuple[Tensor, Tensor | None]:
    grad_q, grad_k, grad_v = grads
    num_heads, num_kv, size = grad_q.shape[1], grad_k.shape[1], grad_q.shape[2]
    slope = torch.cat((grad_q, grad_k), dim=1)
    slope = slope * cosines_TD[:, None] - slope.roll(size // 2, -1) * _signed(sines_TD)[:, None]
    sums = None
    if norms is not None:
        scaled, scale = _scaled(qkv_TW.view(len(slope), -1, size)[:, : num_heads + num_kv], norms[2])
        of_weight = (slope * scaled).sum(0)
        sums = torch.stack((of_weight[:num_heads].sum(0), of_weight[num_heads:].sum(0)))[:, None]
        slope = _through_norm(slope * _of_heads(norms, num_heads, num_kv), scaled, scale)
    return torch.cat((slope, grad_v), dim=1).flatten(1).to(qkv_TW.dtype), sums


def _scaled(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """(x over its root mean square, one over that)."""
    scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + epsilon)
    return x.float() * scale, scale


def _through_norm(slope: Tensor, scaled: Tensor, scale: Tensor) -> Tensor:
    """The gradient of x, from that of `scaled`."""
    return scale * (slope - scaled * (slope * scaled).mean(-1, keepdim=True))


def _of_heads(norms: tuple[Tensor, Tensor, float], num_heads: int, num_kv: int) -> Tensor:
    return torch.cat((norms[0].expand(num_heads, -1), norms[1].expand(num_kv, -1)))


def _signed(sines_TD: Tensor) -> Tensor:
    """Rotation swaps the halves of a head and negates one of them."""
    first, second = sines_TD.chunk(2, dim=-1)
    return torch.cat((-first, second), dim=-1)
