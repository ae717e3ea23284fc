"""Triton kernels of the output layer on a GPU: read a chunk of logits once, and turn it into its gradient in place.

They serve plain softmax; soft-capped logits and candidate sets take `head`'s compiled functions, which compute the same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(
    logits, targets, scales, normalisers, logps, entropies, V, stride, SIZE: tl.constexpr, WITH_ENTROPY: tl.constexpr
):  # fmt: skip
    row, n = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    scale = tl.load(scales + row)
    high, total, weighted = float("-inf"), 0.0, 0.0
    for start in range(0, V, SIZE):
        index = start + n
        x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32) * scale
        higher = tl.maximum(high, tl.max(x, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # -inf minus -inf would be NaN
        exponentials, fade = tl.exp(x - base), tl.exp(high - base)
        total = total * fade + tl.sum(exponentials, 0)
        if WITH_ENTROPY:
            weighted = weighted * fade + tl.sum(tl.where(exponentials > 0.0, exponentials * x, 0.0), 0)
        high = higher
    normaliser = high + tl.log(total)
    chosen = tl.load(logits + row * stride + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(normalisers + row, normaliser)
    tl.store(logps + row, chosen - normaliser)
    if WITH_ENTROPY:
        tl.store(entropies + row, normaliser - weighted / total)


# Letters: C tokens of one chunk, V vocabulary.
def read_chunk(
    logits_CV: Tensor, targets_C: Tensor, scale_C: Tensor, with_entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(log of the normaliser, log-prob of the target, entropy), in fp32."""
    num_rows, vocab = logits_CV.shape
    normaliser_C, logps_C, entropy_C = torch.empty(3, num_rows, device=logits_CV.device)
    _read_kernel[(num_rows,)](
        logits_CV, targets_C, scale_C.contiguous(), normaliser_C, logps_C, entropy_C, vocab, logits_CV.stride(0),
        SIZE=4096, WITH_ENTROPY=with_entropy, num_warps=8,
    )  # fmt: skip
    return normaliser_C, logps_C, entropy_C if with_entropy else None


@triton.jit
def _slope_kernel(
    logits, targets, scales, normalisers, grads, entropies, entropy_grads, V, stride,
    SIZE: tl.constexpr, WITH_ENTROPY: tl.constexpr,
):  # fmt: skip
    row, index = tl.program_id(0).to(tl.int64), tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    ok = index < V
    scale, grad_logp = tl.load(scales + row), tl.load(grads + row)
    x = tl.load(logits + row * stride + index, mask=ok, other=0.0).to(tl.float32) * scale
    log_probs = x - tl.load(normalisers + row)
    probs = tl.exp(log_probs)
    grad = (tl.where(index == tl.load(targets + row), 1.0, 0.0) - probs) * grad_logp
    if WITH_ENTROPY:  # d entropy / d logit = −p · (log p + entropy)
        slope = tl.where(probs > 0.0, probs * (log_probs + tl.load(entropies + row)), 0.0)
        grad -= slope * tl.load(entropy_grads + row)
    tl.store(logits + row * stride + index, (grad * scale).to(logits.dtype.element_ty), mask=ok)


def slope_in_place(
    logits_CV: Tensor,
    targets_C: Tensor,
    scale_C: Tensor,
    normaliser_C: Tensor,
    grad_logps_C: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Replace a chunk's raw logits by their gradient. `of_entropy`: (entropies, their gradients)."""
    num_rows, vocab = logits_CV.shape
    # The gradient of a sum is one number with stride 0; the kernel reads one per row.
    grads = [grad.contiguous() for grad in (grad_logps_C, *(of_entropy or (scale_C, scale_C)))]
    _slope_kernel[(num_rows, triton.cdiv(vocab, 4096))](
        logits_CV, targets_C, scale_C.contiguous(), normaliser_C, *grads, vocab, logits_CV.stride(0),
        SIZE=4096, WITH_ENTROPY=of_entropy is not None, num_warps=8,
    )  # fmt: skip
    return logits_CV
