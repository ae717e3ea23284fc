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

from ludic.models.recurrent.layers import Mix, recurrent_layers, route_recurrence
from ludic.types import ConfigError

logger = logging.getLogger(__name__)

NAME = "ludic"
SKIP_MASK = torch.empty(0, 0, 0, 0)
"""Passed as attention_mask: transformers forwards a 4D mask unchanged, so it builds none."""
_NOT_SUPPORTED = ("s_aux", "position_bias", "indices", "block_indices")
"""Arguments of some models' attention that Ludic does not implement: sinks, biases, key selection."""


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
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered function: takes tensors as [1, heads, T, D], returns [1, T, heads, D]."""
    if ludic_state is None:
        if softcap is not None:
            mask = attention_mask
            if mask is None:
                num_new, length = query.shape[-2], key.shape[-2]
                mask = torch.ones(num_new, length, dtype=torch.bool, device=query.device).tril(length - num_new)
            scaling = scaling if scaling is not None else query.shape[-1] ** -0.5
            attended = softcapped_attention(query, key, value, mask, scaling, softcap, dropout)
            return attended.transpose(1, 2).contiguous(), None
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    special = [name for name in _NOT_SUPPORTED if kwargs.get(name) is not None]
    if special:
        raise NotImplementedError(f"it uses {', '.join(special)}")
    attended = ludic_state.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        AttentionRules(scaling if scaling is not None else query.shape[-1] ** -0.5, sliding_window, softcap),
    )
    return attended.unsqueeze(0), None


def softcapped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float, dropout: float = 0.0
) -> Tensor:
    """Attention [..., H, T, D] that soft-caps the scores before masking, which SDPA cannot do.

    Key heads are repeated to match the query heads. A bool mask marks visible keys; any other mask is added.
    """
    num_groups = query.shape[-3] // key.shape[-3]
    if num_groups > 1:
        key, value = (x.repeat_interleave(num_groups, dim=-3) for x in (key, value))
    scores = torch.tanh(query @ key.transpose(-1, -2) * (scaling / softcap)) * softcap
    is_bool = mask.dtype is torch.bool
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if is_bool else scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return F.dropout(weights, dropout) @ value


AttentionInterface.register(NAME, ludic_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _Probe:
    """Records what each layer passes to the registered function."""

    def __init__(self) -> None:
        self.heads: dict[int, tuple[int, int]] = {}
        self.windows: dict[int, int | None] = {}
        self.recurrent: set[int] = set()

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        self.recurrent.add(layer)
        return mix(hidden_TD[None], None)[0]

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        if query_THD.shape[-1] != value_TKD.shape[-1] or key_TKD.shape != value_TKD.shape:
            raise NotImplementedError("its keys and values differ in size")
        self.heads[layer] = (key_TKD.shape[1], key_TKD.shape[2])
        self.windows[layer] = rules.sliding_window
        return query_THD


def route_attention(model: Any) -> tuple[tuple[int, int], ...]:
    """Route the model's attention through `ludic_attention` and check with a probe that every layer uses it.

    Returns (number of key/value heads, head size) of each layer; zeros for one without attention. Recurrent layers ask the
    state, too (`RecurrentState`).
    """
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a transformers model: it has no config.")
    if not getattr(model, "_can_set_attn_implementation", lambda: True)():  # else transformers logs a warning
        raise NotRoutable("its attention does not go through transformers' AttentionInterface")
    config = model.config.get_text_config()
    probe = _Probe()
    before = model.config._attn_implementation
    try:
        route_recurrence(model)
        model.set_attn_implementation(NAME)
        device = model.get_input_embeddings().weight.device
        ids = torch.zeros(1, 2, dtype=torch.long, device=device)
        with torch.no_grad():
            model(
                input_ids=ids,
                position_ids=torch.arange(2, device=device)[None],
                attention_mask=SKIP_MASK.to(device),
                use_cache=False,
                ludic_state=probe,
            )
        _check_probe(probe, model)
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        model.config._attn_implementation = before
        raise NotRoutable(
            f"its layers do not all compute attention by transformers' AttentionInterface in the usual way ({error})"
        ) from error
    return tuple(probe.heads.get(layer, (0, 0)) for layer in range(config.num_hidden_layers))


def _check_probe(probe: _Probe, model: Any) -> None:
    """Raise unless the arguments that the layers passed fully determine their attention."""
    config = model.config.get_text_config()
    num_layers = config.num_hidden_layers
    if probe.recurrent != set(recurrent_layers(model)):
        raise ValueError(f"{len(probe.recurrent)} of its recurrent layers are given the state of the pass")
    if set(probe.heads) | probe.recurrent != set(range(num_layers)):
        raise ValueError(
            f"{len(probe.heads)} of its {num_layers} layers use the registered function, {len(probe.recurrent)} are recurrent"
        )
    kinds = list(getattr(config, "layer_types", None) or ["full_attention"] * num_layers)
    unknown = {kinds[layer] for layer in range(num_layers) if layer not in probe.recurrent}
    unknown -= {"full_attention", "sliding_attention", "attention"}
    if unknown:
        raise ValueError(f"it has layers of the kind {', '.join(sorted(unknown))}")
    # Some models encode a sliding window only in their mask, which Ludic does not build.
    window = getattr(config, "sliding_window", None) or 0
    is_declared = "sliding_attention" in kinds or (
        not getattr(config, "layer_types", None) and getattr(config, "use_sliding_window", True)
    )
    if is_declared and 0 < window < config.max_position_embeddings and not any(probe.windows.values()):
        raise ValueError("its sliding window is not handed to the attention function")
