"""Gradient checkpointing: activations are computed again in the backward pass instead of being kept."""

from typing import Any

from ludic.models.head import plain_model
from ludic.types import ConfigError


def recompute_activations(model: Any) -> None:
    inner = plain_model(model)
    if not hasattr(inner, "gradient_checkpointing_enable"):
        raise ConfigError(
            f"{type(inner).__name__} offers no gradient checkpointing (no transformers model). Leave gradient_checkpointing off."
        )
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Without re-entrance inputs need no gradient, and the hook for it would cost the engine its fast way.
    inner.disable_input_require_grads()
