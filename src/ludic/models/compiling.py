"""Compiling a decoder layer by layer.

Layers are alike, so compiling one at a time takes little, and whatever is between them (attention state, checkpointing)
stays plain Python. To the compiler every layer is still a case of its own, because it has a number; the limits on how
many cases it accepts are raised accordingly.
"""

from typing import Any

import torch
from torch import nn

from ludic.models.head import is_decoder, plain_model


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a transformers decoder, adapters included; empty if there is no such list."""
    inner = plain_model(model)
    depth = inner.config.get_text_config().num_hidden_layers
    stacks = [m for m in inner.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return list(stacks[0]) if stacks else []


def allow_cases(num_layers: int) -> None:
    """Let the compiler keep a version of its code for every layer."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 * num_layers)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * num_layers)


def compile_layers(model: Any) -> None:
    """From now on the layers run compiled; for one number of tokens at first, for any as soon as it changes. A module that is no
    transformers decoder is compiled as a whole."""
    if not is_decoder(model):
        model.compile()
        return
    layers = decoder_layers(model)
    allow_cases(len(layers))
    for layer in layers:
        layer.compile()
