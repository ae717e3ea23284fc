"""KL between the next-token distributions of two models over the whole vocabulary, in chunks of logits.

As in `ludic.models.head`, the logits of a chunk are computed, used and dropped, and recomputed for the gradient. Only the
student is differentiated.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from ludic.models.head import Head, chunks, layer_grads, raw_logits, scaled
from ludic.types import ConfigError

_CHUNK_ELEMENTS = 1 << 25
"""Logits of each model in memory at a time: 128 MB in fp32, and about as much for each of six intermediate results."""


class KLDirection(StrEnum):
    """The distribution that the expectation is over."""

    REVERSE = "reverse"
    """KL(student ‖ teacher): mode-seeking; the student avoids what the teacher finds unlikely."""
    FORWARD = "forward"
    """KL(teacher ‖ student): mass-covering; the student must give probability to everything the teacher might say."""


@dataclass(frozen=True, slots=True)
class VocabularyKL:
    """Direction and support of the KL."""

    direction: KLDirection
    top_k: int | None = None
    """Compare the teacher's k likeliest tokens one by one and all others as one token; None compares every token. Merging
    tokens can only lower a KL, so the result is a lower bound."""

    def __post_init__(self) -> None:
        if self.direction not in list(KLDirection):
            raise ConfigError(
                f"VocabularyKL.direction={self.direction!r}; choose one of {', '.join(KLDirection)}. (A KL estimated from "
                "the sampled token alone is no VocabularyKL.)"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"VocabularyKL.top_k={self.top_k}; it must be at least 1, or None for all tokens.")


# Letters: A chosen positions, D, E hidden sizes of student and teacher, V vocabulary, C positions of a chunk, K compared tokens.
def vocabulary_kl(
    hidden_AD: Tensor,
    head: Head,
    teacher_hidden_AE: Tensor,
    teacher_head: Head,
    inverse_temperature_A: Tensor,
    how: VocabularyKL,
) -> Tensor:
    """[A] in fp32, both distributions at the same temperature; the gradient flows to `hidden_AD` and `head`."""
    if head.shape[0] != teacher_head.shape[0]:
        raise ConfigError(
            f"The student has {head.shape[0]} tokens and the teacher {teacher_head.shape[0]}; a KL compares models with one "
            "vocabulary. Use a teacher of the student's family."
        )
    if torch.is_autocast_enabled(hidden_AD.device.type):
        dtype = torch.get_autocast_dtype(hidden_AD.device.type)
        hidden_AD, teacher_hidden_AE = hidden_AD.to(dtype), teacher_hidden_AE.to(dtype)
    bias_V = teacher_head.bias_V
    teacher = _Frozen(
        teacher_head.inputs(teacher_hidden_AE).detach(),
        teacher_head.weight_VD.detach(),
        None if bias_V is None else bias_V.detach(),
        teacher_head.softcap,
    )
    kl_A: Tensor = _ChunkedKL.apply(
        head.inputs(hidden_AD), head.weight_VD, head.bias_V, teacher, inverse_temperature_A, head.softcap, how
    )
    return kl_A


@dataclass(frozen=True, slots=True)
class _Frozen:
    """The teacher's hidden states and output layer, without gradients."""

    hidden_AE: Tensor
    weight_VE: Tensor
    bias_V: Tensor | None
    softcap: float | None

    def scaled_logits(self, here: slice, scale_C: Tensor) -> Tensor:
        return scaled(raw_logits(self.hidden_AE[here], self.weight_VE, self.bias_V), scale_C, self.softcap)


class _ChunkedKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher: _Frozen,
        scale: Tensor,
        softcap: float | None,
        how: VocabularyKL,
    ) -> Tensor:
        narrow_weight = weight.to(hidden.dtype)
        kl = torch.empty(hidden.shape[0], dtype=torch.float32, device=hidden.device)
        for here in chunks(hidden.shape[0], weight.shape[0], _CHUNK_ELEMENTS):
            x_CV = scaled(raw_logits(hidden[here], narrow_weight, bias), scale[here], softcap)
            kl[here] = _kl(x_CV, teacher.scaled_logits(here, scale[here]), how)
        ctx.save_for_backward(hidden, weight, bias, scale)
        ctx.teacher, ctx.softcap, ctx.how = teacher, softcap, how
        return kl

    @staticmethod
    def backward(ctx: Any, grad_kl: Tensor) -> Any:
        hidden, weight, bias, scale = ctx.saved_tensors

        def grad_of(here: slice, logits_CV: Tensor) -> Tensor:
            teacher_CV = ctx.teacher.scaled_logits(here, scale[here])
            with torch.enable_grad():
                logits_CV = logits_CV.detach().requires_grad_()
                kl_C = _kl(scaled(logits_CV, scale[here], ctx.softcap), teacher_CV, ctx.how)
                return torch.autograd.grad(kl_C, logits_CV, grad_kl[here])[0]

        grads = layer_grads(hidden, weight, bias, ctx.needs_input_grad, _CHUNK_ELEMENTS, grad_of)
        return *grads, None, None, None, None


def _kl(student_CV: Tensor, teacher_CV: Tensor, how: VocabularyKL) -> Tensor:
    """[C], the KL between the softmaxes of two sets of logits."""
    student_CK, teacher_CK = torch.log_softmax(student_CV, -1), torch.log_softmax(teacher_CV, -1)
    if how.top_k is not None and how.top_k < teacher_CV.shape[1]:
        kept = teacher_CV.topk(how.top_k).indices
        student_CK, teacher_CK = _merge_others(student_CK, kept), _merge_others(teacher_CK, kept)
    if how.direction is KLDirection.REVERSE:
        return (student_CK.exp() * (student_CK - teacher_CK)).sum(-1)
    return (teacher_CK.exp() * (teacher_CK - student_CK)).sum(-1)


def _merge_others(log_probs_CV: Tensor, kept: Tensor) -> Tensor:
    """Log-probs of the kept tokens, and one for all others: by logsumexp, since 1 − Σ would lose a small rest to rounding."""
    others_C = log_probs_CV.scatter(-1, kept, float("-inf")).logsumexp(-1)
    return torch.cat([log_probs_CV.gather(-1, kept), others_C[:, None]], dim=-1)
