"""Log-probabilities of chosen tokens as in `ludic.models.head.chosen_logps`, with gradients and with the sampler's bits."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.models.head import (
    CandidateMask,
    EntropyMode,
    Head,
    chunk_mask,
    chunks,
    layer_grads,
    logits_slope,
    masked,
    scaled,
    times_log,
)
from ludic_gpu.bitwise.products import operand_of, product, wide
from ludic_gpu.bitwise.rows import log_probs

_ELEMENTS = 1 << 26
"""Logits in memory at a time."""


# Letters: A chosen tokens, D hidden size, V vocabulary, C tokens of one chunk.
def chosen_logps(
    hidden_AD: Tensor,
    head: Head,
    targets_A: Tensor,
    inverse_temperature_A: Tensor | None = None,
    *,
    entropy: EntropyMode | None = None,
    candidates: CandidateMask | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each target, and optionally the entropy of its distribution; fp32, differentiable."""
    scale = torch.ones_like(targets_A, dtype=torch.float32) if inverse_temperature_A is None else inverse_temperature_A
    logps, entropies = _ChosenLogps.apply(hidden_AD, head.weight_VD, head.bias_V, targets_A, scale, entropy, candidates)
    return logps, entropies if entropy is not None else None


class _ChosenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        scale: Tensor,
        mode: EntropyMode | None,
        candidates: CandidateMask | None,
    ) -> tuple[Tensor, Tensor]:
        operand = operand_of(weight)
        normaliser, logps = torch.empty(2, len(hidden), device=hidden.device)
        entropy = torch.empty(0 if mode is None else len(hidden), device=hidden.device)
        for here in chunks(len(hidden), weight.shape[0], _ELEMENTS):
            x = scaled(_logits(hidden[here], operand, bias), scale[here], None)
            x = masked(x, chunk_mask(candidates, here, x))
            normaliser[here], logps[here] = log_probs(x, targets[here])
            if mode is not None:
                log_p = x - normaliser[here, None]
                entropy[here] = -times_log(log_p.exp(), log_p).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, scale, normaliser, entropy)
        ctx.with_entropy, ctx.candidates = mode == "train", candidates
        if mode != "train":
            ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logps: Tensor, grad_entropy: Tensor) -> Any:
        hidden, weight, bias, targets, scale, normaliser, entropy = ctx.saved_tensors
        operand = operand_of(weight)

        def grad_of(here: slice, logits: Tensor) -> Tensor:
            of_entropy = (entropy[here], grad_entropy[here]) if ctx.with_entropy else None
            mask = chunk_mask(ctx.candidates, here, logits)
            return logits_slope(
                logits, mask, targets[here], scale[here], normaliser[here], grad_logps[here], of_entropy, None
            )

        grads = layer_grads(
            wide(hidden), wide(weight), bias, ctx.needs_input_grad, _ELEMENTS, grad_of,
            lambda rows: wide(_logits(rows.to(hidden.dtype), operand, bias)),
        )  # fmt: skip
        found = (None if g is None else g.to(of.dtype) for g, of in zip(grads, (hidden, weight, bias), strict=True))
        return *found, None, None, None, None


def _logits(hidden_CD: Tensor, operand_DV: Tensor, bias_V: Tensor | None) -> Tensor:
    logits_CV = product(hidden_CD, operand_DV)
    return logits_CV if bias_V is None else logits_CV + bias_V
