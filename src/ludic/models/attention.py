"""The attention function that Ludic registers with transformers.

A model whose attention goes through transformers' AttentionInterface runs unmodified. Without a `ludic_state` the
function is plain SDPA, so `generate` and other callers keep working on the same model object. With one, the state
computes attention: the embedded inference engine passes a paged KV cache, the trainer a packed batch. The state is a keyword
argument of the forward pass, so one module can serve several callers at the same time.
"""

import logging
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ludic.types import ConfigError

logger = logging.getLogger(__name__)

NAME = "ludic"
SKIP_MASK = torch.empty(0, 0, 0, 0)
"""Passed as attention_mask: transformers forwards a 4D mask unchanged, so it builds none."""
_NOT_SUPPORTED = ("position_bias", "indices", "block_indices")
"""Arguments of some models' attention that Ludic does not implement: biases, key selection."""


class NotRoutable(ConfigError):
    """A model's attention cannot be routed through `ludic_attention`; `reason` says why, for a sentence about the model."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_said: set[str] = set()


def say_once(message: str) -> None:
    """Log a warning, once in a process: several engines and trainers of a run have the same model."""
    if message not in _said:
        _said.add(message)
        logger.warning(message)


class AttentionRules(NamedTuple):
    """A layer's attention settings besides the causal mask."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
    """A further logit of each query head, with no value: part of the attention goes nowhere (gpt-oss)."""


# Letters: T flat tokens of all sequences, H query heads, K key/value heads, D head size.
class AttentionState(Protocol):
    """Computes the attention of one forward pass."""

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        """Store the new keys and values, and attend: [T, H, D]."""
        ...


def ludic_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    ludic_state: AttentionState | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered function: takes tensors as [1, heads, T, D], returns [1, T, heads, D]."""
    rules = AttentionRules(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap, s_aux)
    if ludic_state is None:
        if softcap is not None or s_aux is not None:
            mask = attention_mask
            if mask is None:
                num_new, length = query.shape[-2], key.shape[-2]
                mask = torch.ones(num_new, length, dtype=torch.bool, device=query.device).tril(length - num_new)
            attended = explicit_attention(query, key, value, mask, rules, dropout=dropout)
            return attended.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    special = [name for name in _NOT_SUPPORTED if kwargs.get(name) is not None]
    if special:
        raise NotImplementedError(f"it uses {', '.join(special)}")
    # Latent attention (DeepSeek) has values narrower than keys: a cache and a kernel for one head size pad them with zeros.
    num_missing = key.shape[-1] - value.shape[-1]
    if num_missing > 0:
        value = F.pad(value, (0, num_missing))
    attended = ludic_state.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        rules,
    )
    return (attended[..., :-num_missing] if num_missing > 0 else attended).unsqueeze(0), None


def explicit_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    rules: AttentionRules,
    *,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention [..., H, T, D] whose scores are soft-capped before masking, or include a sink's logit: SDPA cannot.

    Key heads are repeated to match the query heads. A bool mask marks visible keys; any other mask is added. `sinks` are those
    of the rules in another form, [..., H, T].
    """
    num_groups = query.shape[-3] // key.shape[-3]
    if num_groups > 1:
        key, value = (x.repeat_interleave(num_groups, dim=-3) for x in (key, value))
    scores = query @ key.transpose(-1, -2)
    softcap = rules.softcap
    scores = scores * rules.scaling if softcap is None else torch.tanh(scores * (rules.scaling / softcap)) * softcap
    is_bool = mask.dtype is torch.bool
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if is_bool else scores + mask
    if sinks is None and rules.sinks_H is not None:
        sinks = rules.sinks_H[:, None]
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights if sinks is None else weights[..., :-1], dropout) @ value


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [..., D] and its log-sum-exp [...] with a sink's logit among the scores, from attention without it."""
    sinks = sinks.to(lse.dtype)
    return out * torch.sigmoid(lse - sinks)[..., None].to(out.dtype), torch.logaddexp(lse, sinks)


AttentionInterface.register(NAME, ludic_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


def has_sinks(model: nn.Module) -> bool:
    """True if some layer's attention has sinks."""
    return any(isinstance(getattr(module, "sinks", None), nn.Parameter) for module in model.modules())
