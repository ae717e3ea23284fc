"""Recurrent layers (gated delta nets, Mamba, short convolutions): routed, and computed over packed sequences.

Such a layer carries a state from token to token, so over a flat row of several sequences it would carry it from one sequence
into the next. With a `ludic_state` (see attention.py) that state decides what the layer's own forward runs on: a batch with one
sequence per row. Without one the layer is the library's. Kernels for packed sequences (`cu_seqlens`, `seq_idx`) are not used:
transformers calls them for some families only, and only where other packages are installed.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludic.models.attention import AttentionState
from ludic.models.kinds import Mix, RecurrentState, is_recurrent
from ludic.models.packed_attention import to_device

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


_MAX_WASTE = 1.5
"""A group holds at most this many times its own tokens after padding: a scan costs much per call, whatever its rows hold."""
_MAX_TOKENS = 4096
"""Tokens of a group of several rows, padding included; a single row may be longer. transformers 5.17 without `mamba-ssm` takes 3 MB
a token in a Mamba-2 layer."""


def similar_lengths(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of rows that are padded to one length and computed together, the longest first."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    while order:
        longest, count, total = lengths[order[0]], 0, 0
        while count < len(order):
            padded, own = longest * (count + 1), total + lengths[order[count]]
            if count and (padded > _MAX_WASTE * own or padded > _MAX_TOKENS):
                break
            total, count = own, count + 1
        groups.append(order[:count])
        order = order[count:]
    return groups


# Letters: T flat tokens, B rows, L the longest of them, D width, N tokens of one group.
class HybridSequences:
    """The state of a forward pass over whole sequences: attention as in `attention`, recurrent layers row by row."""

    def __init__(self, attention: AttentionState, paths: Sequence[np.ndarray], device: torch.device) -> None:
        self.attend = attention.attend
        self._rows = SequenceRows(paths, device)

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        return self._rows.mix(mix, hidden_TD)


class SequenceRows:
    """Whole sequences of flat tokens as padded rows, each from an empty state. Groups of similar lengths are computed together.

    Sequences may have tokens in common, as in a `TokenTree`: such a token is computed in the row of each, with equal results.
    """

    def __init__(self, paths: Sequence[np.ndarray], device: torch.device) -> None:
        """`paths`: where the tokens of each sequence are. Together they cover all flat tokens."""
        self._groups: list[_RowGroup] = []
        flat: list[np.ndarray] = []
        for chosen in similar_lengths([len(path) for path in paths]):
            members = [paths[i] for i in chosen]
            longest = len(members[0])
            # A shorter row repeats its last token: results of padding are dropped, and a real value makes no NaN.
            tokens_BL = np.stack([np.pad(path, (0, longest - len(path)), mode="edge") for path in members])
            kept_N = np.concatenate([i * longest + np.arange(len(path)) for i, path in enumerate(members)])
            is_padded = len(kept_N) < tokens_BL.size
            self._groups.append(
                _RowGroup(to_device(tokens_BL, device), to_device(kept_N, device) if is_padded else None)
            )
            flat += members
        computed = np.concatenate(flat)
        _, places_T = np.unique(computed, return_index=True)
        is_in_place = np.array_equal(places_T, np.arange(len(computed)))
        self._places_T = None if is_in_place else to_device(places_T, device)
        """The first place of each flat token among the results of all groups."""

    def mix(self, mix: Mix, hidden_TD: Tensor) -> Tensor:
        """The layer over every sequence: [T, D], differentiable."""
        outs = [group.mix(mix, hidden_TD) for group in self._groups]
        flat = outs[0] if len(outs) == 1 else torch.cat(outs)
        return flat if self._places_T is None else flat.index_select(0, self._places_T)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    tokens_BL: Tensor
    kept_N: Tensor | None
    """Places in the flattened rows that are not padding; None for all."""

    def mix(self, mix: Mix, hidden_TD: Tensor) -> Tensor:
        out_ND = mix(hidden_TD[self.tokens_BL], None).flatten(0, 1)
        return out_ND if self.kept_N is None else out_ND.index_select(0, self.kept_N)
