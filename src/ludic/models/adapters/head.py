"""Log-probabilities of chosen tokens at an output layer with a LoRA adapter, in chunks of logits as in `ludic.models.head`.

The forward pass keeps one number per position; the backward pass recomputes the logits of each chunk. Several targets per
position share the logits.
"""

from typing import Any

import torch
from torch import Tensor

from ludic.models.head import GPU_CHUNK_ELEMENTS, Head, chunks, raw_logits, scaled

_CHUNK_ELEMENTS = 1 << 25
"""Logits in memory at a time on a CPU."""


# Letters: A positions, C those of one chunk, K targets of a position, D hidden size, V vocabulary, R the rank.
def adapted_logps(
    hidden_AD: Tensor,
    head: Head,
    targets_AK: Tensor,
    inverse_temperature_A: Tensor,
    adapter: tuple[Tensor, Tensor, float] | None,
) -> Tensor:
    """Log-probabilities [A, K] in fp32; 0 for a target of -1. `adapter`: A, B and scale, all positions' own.

    Differentiable with respect to the hidden states and the adapter; the output layer is frozen.
    """
    a_RD, b_VR, scale = (None, None, 1.0) if adapter is None else adapter
    out: Tensor = _AdaptedLogps.apply(
        head.inputs(hidden_AD), a_RD, b_VR, scale, head, targets_AK, inverse_temperature_A
    )
    return out


def _logits(
    x_CD: Tensor, head: Head, weight_VD: Tensor, a_RD: Tensor | None, b_VR: Tensor | None, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Raw logits [C, V], and A x."""
    logits_CV = raw_logits(x_CD, weight_VD, head.bias_V)
    if a_RD is None or b_VR is None:
        return logits_CV, None
    x_CR = x_CD @ a_RD.t()
    return logits_CV.addmm_(x_CR, b_VR.t(), alpha=scale), x_CR


class _AdaptedLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_AD: Tensor,
        a_RD: Tensor | None,
        b_VR: Tensor | None,
        scale: float,
        head: Head,
        targets_AK: Tensor,
        temper_A: Tensor,
    ) -> Tensor:
        weight_VD = head.weight_VD.to(x_AD.dtype)
        a, b = _narrow(a_RD, b_VR, x_AD)
        normaliser_A = torch.empty(len(x_AD), dtype=torch.float32, device=x_AD.device)
        logps_AK = torch.empty(targets_AK.shape, dtype=torch.float32, device=x_AD.device)
        for here in chunks(len(x_AD), weight_VD.shape[0], _elements(x_AD)):
            logits_CV, _ = _logits(x_AD[here], head, weight_VD, a, b, scale)
            z_CV = scaled(logits_CV, temper_A[here], head.softcap)
            normaliser_A[here] = z_CV.logsumexp(dim=-1)
            logps_AK[here] = z_CV.gather(-1, targets_AK[here].clamp(min=0)) - normaliser_A[here, None]
        ctx.save_for_backward(x_AD, a_RD, b_VR, targets_AK, temper_A, normaliser_A)
        ctx.scale, ctx.head = scale, head
        return logps_AK.masked_fill_(targets_AK < 0, 0.0)

    @staticmethod
    def backward(ctx: Any, grad_AK: Tensor) -> Any:
        x_AD, a_RD, b_VR, targets_AK, temper_A, normaliser_A = ctx.saved_tensors
        head, scale = ctx.head, ctx.scale
        weight_VD = head.weight_VD.to(x_AD.dtype)
        a, b = _narrow(a_RD, b_VR, x_AD)
        grad_AK = grad_AK.masked_fill(targets_AK < 0, 0.0)
        grad_x_AD = torch.empty_like(x_AD)
        grad_a = None if a_RD is None else torch.zeros_like(a_RD)
        grad_b = None if b_VR is None else torch.zeros_like(b_VR)
        for here in chunks(len(x_AD), weight_VD.shape[0], _elements(x_AD)):
            x_CD = x_AD[here]
            logits_CV, x_CR = _logits(x_CD, head, weight_VD, a, b, scale)
            z_CV = scaled(logits_CV, temper_A[here], head.softcap)
            slope_CV = (z_CV - normaliser_A[here, None]).exp_().mul_(-grad_AK[here].sum(-1, keepdim=True))
            slope_CV.scatter_add_(1, targets_AK[here].clamp(min=0), grad_AK[here])
            slope_CV *= temper_A[here, None]
            if head.softcap is not None:
                slope_CV *= 1 - (z_CV / (temper_A[here, None] * head.softcap)).square()
            slope_CV = slope_CV.to(x_AD.dtype)
            grad_x_CD = slope_CV @ weight_VD
            if a is not None and b is not None and grad_a is not None and grad_b is not None and x_CR is not None:
                grad_CR = (slope_CV @ b).mul_(scale)
                grad_x_CD.addmm_(grad_CR, a)
                grad_a += grad_CR.t() @ x_CD
                grad_b += (slope_CV.t() @ x_CR).mul_(scale)
            grad_x_AD[here] = grad_x_CD
        return grad_x_AD, grad_a, grad_b, None, None, None, None


def _narrow(a_RD: Tensor | None, b_VR: Tensor | None, like: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """In the precision of the pass."""
    return None if a_RD is None else a_RD.to(like.dtype), None if b_VR is None else b_VR.to(like.dtype)


def _elements(x_AD: Tensor) -> int:
    return GPU_CHUNK_ELEMENTS if x_AD.is_cuda else _CHUNK_ELEMENTS
