"""Route a model's recurrent layers: gated delta nets, Mamba, short convolutions.

Such a layer carries a state from token to token, so over a flat row of several sequences it would carry it from one sequence
into the next. With a `ludic_state` (see attention.py) that state decides what the layer's own forward runs on: a batch with one
sequence per row. Without one the layer is the library's. Kernels for packed sequences (`cu_seqlens`, `seq_idx`) are not used:
transformers calls them for some families only, and only where other packages are installed.
"""

import functools
import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ludic.models.kinds import Mix, RecurrentState, is_recurrent

_here = threading.local()
"""`.state`: the state of the layer that this thread computes, for layers that do not pass it on."""
_SILENT_LAYERS = ("JambaMambaDecoderLayer", "Lfm2DecoderLayer", "Lfm2MoeDecoderLayer")
"""They call their mixer without the keyword arguments of the forward pass; those of LFM2 in some releases."""


def route_recurrence(model: nn.Module) -> None:
    """Let the model's recurrent layers ask a `ludic_state`. Changes the classes of these layers, once."""
    for module in model.modules():
        kind = type(module)
        wrap = (
            _routed_mixer if is_recurrent(module) else _remembering_layer if kind.__name__ in _SILENT_LAYERS else None
        )
        if wrap is not None and not hasattr(kind.forward, "is_routed"):
            kind.forward = wrap(kind.forward)
            setattr(kind.forward, "is_routed", True)  # noqa: B010 - functions have no such field


def mix_of(mixer: nn.Module) -> Mix:
    """The layer's own forward."""
    return _with_cache(mixer, _cache_name(mixer.forward))


def _with_cache(forward: Callable[..., Tensor], cache_name: str) -> Mix:
    def mix(hidden_BLD: Tensor, cache: Any, mask_BL: Tensor | None = None, /) -> Tensor:
        options = {cache_name: cache} if mask_BL is None else {cache_name: cache, "attention_mask": mask_BL}
        return forward(hidden_BLD, **options)

    return mix


def _cache_name(forward: Callable[..., Tensor]) -> str:
    return "cache_params" if "cache_params" in inspect.signature(forward).parameters else "past_key_values"


def _routed_mixer(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    cache_name = _cache_name(forward)

    @functools.wraps(forward)
    def routed(
        self: Any, hidden_states: Tensor, *args: Any, ludic_state: RecurrentState | None = None, **kwargs: Any
    ) -> Tensor:
        state = ludic_state if ludic_state is not None else getattr(_here, "state", None)
        if state is None:
            return forward(self, hidden_states, *args, **kwargs)
        # Keyword arguments of the pass (masks, flags) speak of the flat row, not of the rows that the state makes.
        return _recur(state, self.layer_idx, _with_cache(partial(forward, self), cache_name), hidden_states)

    return routed


@torch.compiler.disable  # how the tokens are divided differs from batch to batch
def _recur(state: RecurrentState, layer: int, mix: Mix, hidden: Tensor) -> Tensor:
    if not hasattr(state, "recur"):
        raise NotImplementedError(f"{type(state).__name__} has no states for recurrent layers")
    return state.recur(layer, mix, hidden[0]).unsqueeze(0)


def _remembering_layer(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def remembering(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_here, "state", None)
        _here.state = kwargs.get("ludic_state")
        try:
            return forward(self, *args, **kwargs)
        finally:
            _here.state = before

    return remembering
