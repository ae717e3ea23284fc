"""The attention function that Ludic registers with transformers: one name, one place, several modes.

A model whose attention goes through transformers' AttentionInterface runs unmodified. Without a `ludic_state` the
function is plain SDPA, so that `generate`, evaluation and other people's code keep working on the same model object.
With one, the state decides: the embedded engine passes a paged KV cache, the trainer (later) a packed batch. The
state travels through the model as a keyword argument, so one module can serve several users at the same time.
"""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ludic.types import ConfigError

NAME = "ludic"
SKIP_MASK = torch.empty(0, 0, 0, 0)
"""Passed as attention_mask: transformers hands a 4D mask through as it is, so none is built."""


# Letters: T flat tokens of all sequences, H query heads, K key/value heads, D head size.
class AttentionState(Protocol):
    """What the attention of one forward pass looks at."""

    def attend(
        self,
        layer: int,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
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
    """The registered function; tensors arrive as [1, heads, T, D] and leave as [1, T, heads, D]."""
    if ludic_state is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    attended = ludic_state.attend(
        module.layer_idx,  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scaling=scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return attended.unsqueeze(0), None


AttentionInterface.register(NAME, ludic_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


class _Probe:
    """Counts the layers that reach the registered function."""

    def __init__(self) -> None:
        self.layers: set[int] = set()

    def attend(self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, **kwargs: Any) -> Tensor:
        self.layers.add(layer)
        return query_THD


def route_attention(model: Any) -> None:
    """Send the model's attention through `ludic_attention`, and make sure that every layer really goes there."""
    num_layers = model.config.get_text_config().num_hidden_layers
    try:
        model.set_attn_implementation(NAME)
        probe = _Probe()
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
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(model).__name__} cannot be served by the embedded engine: its attention does not go through "
            f"transformers' AttentionInterface ({error}). Serve it with vLLM."
        ) from error
    if probe.layers != set(range(num_layers)):
        raise ConfigError(
            f"{type(model).__name__} cannot be served by the embedded engine: {len(probe.layers)} of its {num_layers} "
            "layers use the registered attention function (state-space or otherwise special layers?). Serve it with vLLM."
        )
