"""Compiling a decoder layer by layer.

Layers are alike, so compiling one at a time takes little, and whatever is between them (attention state, checkpointing)
stays plain Python. To the compiler every layer is still a case of its own, because it has a number; the limits on how
many cases it accepts are raised accordingly.
"""

import os
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from ludic.models.head import is_decoder, plain_model
from ludic.types import ConfigError


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


# ----------------------------------------------------------------------------------------------------
# Gradient checkpointing: activations are computed again in the backward pass instead of being kept.
# ----------------------------------------------------------------------------------------------------


def recompute_activations(model: Any) -> None:
    inner = plain_model(model)
    if not hasattr(inner, "gradient_checkpointing_enable"):
        raise ConfigError(
            f"{type(inner).__name__} offers no gradient checkpointing (no transformers model). Leave gradient_checkpointing off."
        )
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Without re-entrance inputs need no gradient, and the hook for it would cost the engine its fast way.
    inner.disable_input_require_grads()


# ----------------------------------------------------------------------------------------------------
# How many CPU threads a small model should use: measured, not guessed.
# ----------------------------------------------------------------------------------------------------
# More threads help large matrices; small ones lose more in waiting for each other than they gain, and on a machine whose cores
# are busy with something else two threads can be several times slower than one.

_WIDTH, _TOKENS, _LAYERS = 128, 2048, 8
_ROUNDS = 7


def use_fastest_num_threads(most: int | None = None) -> int:
    """Try 1, 2, 4 … threads on work like a small model's, keep the fastest, and return how many that is.

    `most` is, where it is not given, what OMP_NUM_THREADS allows, else the number of cores.
    """
    most = most or int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    candidates = [1]
    while candidates[-1] * 2 <= most:
        candidates.append(candidates[-1] * 2)
    # In turns: whatever else the machine does for a moment should not fall on one candidate alone.
    rounds = [{number: _time_steps(number) for number in candidates} for _ in range(_ROUNDS)]
    best = min(candidates, key=lambda number: median(seconds[number] for seconds in rounds))
    torch.set_num_threads(best)
    return best


def _time_steps(num_threads: int, repeats: int = 3) -> float:
    """The middle of a few forward and backward passes."""
    torch.set_num_threads(num_threads)
    weights = [torch.randn(_WIDTH, _WIDTH, requires_grad=True) for _ in range(_LAYERS)]
    inputs = torch.randn(_TOKENS, _WIDTH)
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        hidden = inputs
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight) * 0.1
        hidden.sum().backward()
        times.append(time.perf_counter() - started)
    return median(times[1:])  # the first one also starts the threads
