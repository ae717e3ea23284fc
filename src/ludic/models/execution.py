"""Execution of a model: compiled layers, gradient checkpointing, CPU threads.

Compiling one layer at a time is cheap because layers are alike, and the code between them (attention state,
checkpointing) stays plain Python. The compiler still specialises on each layer's index, so its recompile limits are raised.
"""

import os
import threading
import time
from statistics import median
from typing import Any

import torch
from torch import nn

from ludic.models.head import is_decoder, plain_model
from ludic.types import ConfigError

MAX_LAUNCHED_WEIGHTS = 12_000_000
"""Weights of a layer up to which, with 16k tokens, an H200 computes it faster than Python launches it."""
CAPTURING = threading.Lock()
"""Held while a CUDA graph is captured: inference engine, its snapshot and trainer may capture at once, and a device
synchronisation by one would invalidate the capture of another."""


def decoder_layers(model: Any) -> list[nn.Module]:
    """The layers of a transformers decoder, adapters included; empty if it has no such list."""
    inner = plain_model(model)
    depth = inner.config.get_text_config().num_hidden_layers
    stacks = [m for m in inner.modules() if isinstance(m, nn.ModuleList) and len(m) == depth]
    return list(stacks[0]) if stacks else []


def raise_recompile_limits(num_layers: int) -> None:
    """Raise the compiler's limits so that it keeps one version of its code per layer."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 8 * num_layers)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 64 * num_layers)


def compile_layers(model: Any) -> None:
    """Compile the layers in place: for a fixed number of tokens at first, for any number once it changes. A module that is not
    a transformers decoder is compiled as a whole."""
    if not is_decoder(model):
        model.compile()
        return
    layers = decoder_layers(model)
    raise_recompile_limits(len(layers))
    for layer in layers:
        layer.compile()


def recompute_activations(model: Any) -> None:
    """Turn on gradient checkpointing: the backward pass recomputes activations instead of storing them."""
    inner = plain_model(model)
    if not hasattr(inner, "gradient_checkpointing_enable"):
        raise ConfigError(
            f"{type(inner).__name__} offers no gradient checkpointing (no transformers model). Leave gradient_checkpointing off."
        )
    inner.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    # Non-reentrant checkpointing needs no gradient on inputs, and the hook for it would disable the inference engine's fused path.
    inner.disable_input_require_grads()


# Small matrices lose more to thread synchronisation than they gain; on a machine with busy cores two threads can be several
# times slower than one. So the number of threads is measured.

_WIDTH, _TOKENS, _LAYERS = 128, 2048, 8
_ROUNDS = 7


def use_fastest_num_threads(most: int | None = None) -> int:
    """Time 1, 2, 4 … threads on work like a small model's; set and return the fastest number. One alone is not timed.

    `most` defaults to OMP_NUM_THREADS, else to the number of cores.
    """
    most = most or int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    candidates = [1]
    while candidates[-1] * 2 <= most:
        candidates.append(candidates[-1] * 2)
    # Candidates alternate, so that a moment of other load on the machine does not hit one of them alone.
    num_rounds = _ROUNDS if len(candidates) > 1 else 0
    rounds = [{number: _time_steps(number) for number in candidates} for _ in range(num_rounds)]
    best = min(candidates, key=lambda number: median(seconds[number] for seconds in rounds)) if rounds else 1
    torch.set_num_threads(best)
    return best


def _time_steps(num_threads: int, repeats: int = 3) -> float:
    """Median seconds of a few forward and backward passes."""
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
