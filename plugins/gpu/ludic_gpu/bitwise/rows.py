"""Functions of one row whose bits depend on that row alone: norm, activation, log-probability.

Each is made of operations that round every element by itself (add, multiply, divide, square root, maximum), of exp and log, which
`products.check_functions` tests, and of sums in an order that depends on their length alone (`tree_sum`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


# Letters: N rows, V values of a row.
def tree_sum(x_NV: Tensor) -> Tensor:
    """The sum over the last dimension, which stays with size 1: halves are added to each other until one value is left."""
    while (length := x_NV.shape[-1]) > 1:
        half = length // 2
        added = x_NV[..., :half] + x_NV[..., half : 2 * half]
        x_NV = added if length == 2 * half else torch.cat((added, x_NV[..., 2 * half :]), dim=-1)
    return x_NV


def _root_mean_square(values: Tensor, epsilon: float) -> Tensor:
    return torch.sqrt(tree_sum(values * values) / values.shape[-1] + epsilon)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        values = x.float()
        length = _root_mean_square(values, epsilon)
        ctx.save_for_backward(x, weight, length)
        return (values / length).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, length = ctx.saved_tensors
        scaled, slope = x.float() / length, (grad * weight).float()
        grad_x = (slope - scaled * (slope * scaled).mean(-1, keepdim=True)) / length
        grad_weight = (grad.float() * scaled).flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x over its root mean square, times the weight; the gradient is the usual one."""
    if not torch.is_grad_enabled():
        values = x.float()
        return (values / _root_mean_square(values, epsilon)).to(x.dtype) * weight
    out: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return out


def _activated(x: Tensor) -> Tensor:
    values = x.float()
    return (values / (1 + torch.exp(-values))).to(x.dtype)


class _SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _activated(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad, x)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x); the gradient is the usual one."""
    out: Tensor = _SiLU.apply(x) if torch.is_grad_enabled() else _activated(x)
    return out


def log_probs(x_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log of the normaliser, log-probability of the target) of each row of processed logits in fp32. Both the sampler and the
    trainer take log-probabilities from here."""
    highest_N1 = x_NV.amax(dim=-1, keepdim=True)
    log_total_N1 = torch.log(tree_sum(torch.exp(x_NV - highest_N1)))
    chosen_N1 = (x_NV.gather(-1, targets_N[:, None]) - highest_N1) - log_total_N1
    return (highest_N1 + log_total_N1)[:, 0], chosen_N1[:, 0]
