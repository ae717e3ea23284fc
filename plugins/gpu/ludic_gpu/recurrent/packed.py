"""Recurrent layers over packed sequences, with an empty state at the beginning of each.

The layer's input is cut at the sequences' borders into rows padded on the right. A causal layer never sees what is to the right,
so every token's output is that of its sequence alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ludic.models.attention import AttentionState
from ludic.models.kinds import Mix
from ludic.models.packed_attention import to_device

_MAX_WASTE = 1.5
"""A group holds at most this many times its own tokens after padding: a scan costs much per call, whatever its rows hold."""
_MAX_TOKENS = 4096
"""Of a group of several rows, padding included; a single row may be longer. transformers 5.17 without `mamba-ssm` takes 3 MB a
token in a Mamba-2 layer."""


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
        """Where each flat token is among the results of all groups, the first time."""

    def mix(self, mix: Mix, hidden_TD: Tensor) -> Tensor:
        """The layer over every sequence: [T, D], differentiable."""
        outs = [group.mix(mix, hidden_TD) for group in self._groups]
        flat = outs[0] if len(outs) == 1 else torch.cat(outs)
        return flat if self._places_T is None else flat.index_select(0, self._places_T)


@dataclass(frozen=True, slots=True)
class _RowGroup:
    tokens_BL: Tensor
    kept_N: Tensor | None
    """Places in the flattened rows that are no padding; None for all."""

    def mix(self, mix: Mix, hidden_TD: Tensor) -> Tensor:
        out_ND = mix(hidden_TD[self.tokens_BL], None).flatten(0, 1)
        return out_ND if self.kept_N is None else out_ND.index_select(0, self.kept_N)
