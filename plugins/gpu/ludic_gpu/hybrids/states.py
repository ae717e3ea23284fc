"""The states of a hybrid's recurrent layers: one row per sequence; the block cache holds its attention layers' keys.

A state holds no history, so a sequence can continue from another's only at the same token: equal prompts of one step are computed
once and their state is copied; other prefixes are not shared. Prompts are computed in parts where the layer's own forward
continues a state exactly (`probe_mixers` tries it); else the tokens after the first part run one by one.
"""

import copy
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, LinearAttentionLayer

from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.attention import AttentionState
from ludic.models.kinds import Mix, RecurrentState, recurrent_layers
from ludic.models.packed_attention import to_device
from ludic_gpu.recurrent import SequenceRows, mix_of, similar_lengths

_PROBED_PARTS = ((12,), (5, 1, 1, 1, 1, 1, 1, 1), (5, 4, 1, 2))
"""Lengths of the parts in which a probe computes twelve tokens: at once, token by token after a prompt, a prompt in parts."""
_TOLERANCE, _TOLERANCE_GPU, _TOLERANCE_HALF = 1e-4, 5e-3, 5e-2
"""Difference relative to the largest output: in fp32, in fp32 on a GPU, whose products may be in TF32, and in half precision."""


# Letters: T flat tokens, B rows, L tokens of a row, D width.
class StateRows:
    """The states of all sequences: in each recurrent layer one row for every sequence."""

    def __init__(self, device: torch.device, num_rows: int = 0) -> None:
        """`num_rows`: rows to begin with; more are made when they are needed."""
        self.device = device
        self.num_moves = 0
        """The number of times that the states were moved to other memory."""
        self._row_of: dict[int, int] = {}
        """Row by the sequence's number."""
        self._num_rows = num_rows
        self._states: dict[int, tuple[Tensor, Tensor | None]] = {}
        """For each layer: the last inputs of its convolution, and its recurrent state if it has one. Made in its first pass."""

    def rows(self, sequences: Iterable[Sequence]) -> list[int]:
        """The sequences' rows, free ones at first."""
        numbers = [sequence.number for sequence in sequences]
        taken = set(self._row_of.values())
        free = (row for row in count() if row not in taken)
        for number in numbers:
            if number not in self._row_of:
                self._row_of[number] = next(free)
        self._reserve(max((self._row_of[number] for number in numbers), default=-1) + 1)
        return [self._row_of[number] for number in numbers]

    def leave(self, sequence: Sequence) -> None:
        self._row_of.pop(sequence.number, None)

    def arrange(self, first: Seq[Sequence], num_rows: int) -> None:
        """Move these sequences to the first rows, in order. The first `num_rows` rows then hold no other sequence."""
        wanted = {sequence.number: row for row, sequence in enumerate(first)}
        others = {number: row for number, row in self._row_of.items() if number not in wanted}
        wanted |= {number: row for number, row in others.items() if row >= num_rows}
        taken = set(wanted.values())
        free = (row for row in count(num_rows) if row not in taken)
        wanted |= {number: next(free) for number, row in others.items() if row < num_rows}
        self._reserve(max(num_rows, *(row + 1 for row in wanted.values())))
        moved = [number for number, row in wanted.items() if self._row_of[number] != row]
        if moved:
            self._copy([self._row_of[number] for number in moved], [wanted[number] for number in moved])
            self._row_of = wanted

    def copy(self, pairs: Iterable[tuple[Sequence, Sequence]]) -> None:
        """Copy states from one sequence to another."""
        sources, targets = [], []
        for source, target in pairs:
            sources.append(source)
            targets.append(target)
        self._copy(self.rows(sources), self.rows(targets))

    def read(self, layer: int, rows: Tensor | slice) -> Cache:
        """A cache with the states of these rows; of a slice it changes them in place."""
        conv, recurrent = self._states[layer]
        return _cache(layer, conv[rows], None if recurrent is None else recurrent[rows])

    def write(self, layer: int, rows_B: Tensor, cache: Cache) -> None:
        """Keep the states that the layer left in a cache."""
        found: Any = cache.layers[layer]
        if layer not in self._states:
            made = [
                None if x is None else x.new_zeros(self._num_rows, *x.shape[1:])
                for x in (found.conv_states[0], found.recurrent_states[0])
            ]
            assert made[0] is not None, "every recurrent layer has a convolution"
            self._states[layer] = made[0], made[1]
        conv, recurrent = self._states[layer]
        conv[rows_B] = found.conv_states[0]
        if recurrent is not None:
            recurrent[rows_B] = found.recurrent_states[0]

    def _reserve(self, num_rows: int) -> None:
        if num_rows > self._num_rows:
            more = max(num_rows, self._num_rows * 5 // 4) - self._num_rows
            self._num_rows += more
            self.num_moves += 1
            for layer, (conv, recurrent) in self._states.items():
                self._states[layer] = _longer(conv, more), None if recurrent is None else _longer(recurrent, more)

    def _copy(self, sources: list[int], targets: list[int]) -> None:
        if not sources:
            return
        from_N, to_N = to_device(np.array([sources, targets]), self.device)
        for states in self._states.values():
            for state in states:
                if state is not None:
                    state[to_N] = state[from_N]


def _longer(state: Tensor, more: int) -> Tensor:
    return torch.cat([state, state.new_zeros(more, *state.shape[1:])])


def _cache(layer: int, conv: Tensor | None = None, recurrent: Tensor | None = None) -> Cache:
    """transformers' cache of one recurrent layer, which finds it by its number; empty, or with the states of some rows."""
    held = LinearAttentionLayer()
    if conv is not None:
        held.conv_states[0], held.conv_kernel_size[0] = conv, conv.shape[-1]
        held.is_conv_states_initialized[0] = held.has_previous_state[0] = True
    if recurrent is not None:
        held.recurrent_states[0], held.is_recurrent_states_initialized[0] = recurrent, True
    return Cache(layers=[held] * (layer + 1))


@dataclass(frozen=True, slots=True)
class _Part:
    """Tokens of several prompts that run together, one row each."""

    is_later: bool
    """They continue from a state."""
    states_B: Tensor
    """The rows of `StateRows`."""
    tokens_BL: Tensor
    """Flat places; padding on the left has the place of its row's first token."""
    mask_BL: Tensor | None
    """0 for padding; None if there is none."""


class PromptParts:
    """Recurrent layers of prompts, or parts of them. Padding on the right would change the state that a prompt leaves: parts
    that begin a prompt are padded on the left, where the layers take a mask, and later ones run with those of their length."""

    def __init__(self, states: StateRows, chunks: Seq[Chunk], mixers: "Mixers") -> None:
        self._states = states
        self._continues = mixers.continue_by_several
        starts = np.cumsum([0, *(chunk.length for chunk in chunks)])
        first, alike = [], dict[tuple[bool, int], list[int]]()
        for i, chunk in enumerate(chunks):
            if chunk.start == 0 and mixers.take_a_mask:
                first.append(i)
            else:
                alike.setdefault((chunk.start > 0, chunk.length), []).append(i)
        similar = [[first[i] for i in group] for group in similar_lengths([chunks[i].length for i in first])]
        self._parts: list[_Part] = []
        of_one_length = [(is_later, members) for (is_later, _), members in alike.items()]
        for is_later, members in of_one_length + [(False, members) for members in similar]:
            lengths_B = np.array([chunks[i].length for i in members])
            places_BL = np.arange(lengths_B.max()) - (lengths_B.max() - lengths_B)[:, None]  # below 0: padding
            mask = to_device((places_BL >= 0).astype(np.int64), states.device) if places_BL.min() < 0 else None
            tokens_BL = starts[members][:, None] + places_BL.clip(min=0)
            rows = np.array(states.rows(chunks[i].sequence for i in members))
            self._parts.append(
                _Part(is_later, to_device(rows, states.device), to_device(tokens_BL, states.device), mask)
            )

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        out_TD = torch.zeros_like(hidden_TD)
        for part in self._parts:
            cache = self._states.read(layer, part.states_B) if part.is_later else _cache(layer)
            if part.is_later and not self._continues:
                for one_B1 in part.tokens_BL.split(1, dim=1):
                    out_TD[one_B1] = mix(hidden_TD[one_B1], cache)
            elif part.mask_BL is None:
                out_TD[part.tokens_BL] = mix(hidden_TD[part.tokens_BL], cache)
            else:  # add zeros for the padding, which shares a place with a token
                out_BLD = mix(hidden_TD[part.tokens_BL], cache, part.mask_BL)
                out_BLD = out_BLD.masked_fill(part.mask_BL[..., None] == 0, 0.0)
                out_TD.index_add_(0, part.tokens_BL.flatten(), out_BLD.flatten(0, 1))
            self._states.write(layer, part.states_B, cache)
        return out_TD


class DecodingRows:
    """Recurrent layers of one new token for each of the first rows (`StateRows.arrange`)."""

    def __init__(self, states: StateRows, *, keeps: bool = True) -> None:
        """`keeps`: whether the states are those after the token; else they stay as they are."""
        self._states, self._keeps = states, keeps

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        count = len(hidden_TD)
        rows = slice(count) if self._keeps else torch.arange(count, device=hidden_TD.device)
        return mix(hidden_TD[:, None], self._states.read(layer, rows))[:, 0]


class WholeTexts:
    """Recurrent layers of texts that are scored; nothing is kept."""

    def __init__(self, lengths: Seq[int], device: torch.device) -> None:
        bounds = np.cumsum([0, *lengths])
        rows = [np.arange(start, end) for start, end in pairwise(bounds.tolist())]
        self._rows = SequenceRows([row for row in rows if len(row)], device)

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        return self._rows.mix(mix, hidden_TD)


class HybridState:
    """The state of one forward pass."""

    def __init__(self, attention: AttentionState, recurrence: RecurrentState) -> None:
        self.attend, self.recur = attention.attend, recurrence.recur


class Mixers(NamedTuple):
    """Ways in which a model's recurrent layers compute without a change of their results."""

    continue_by_one: bool
    """Go on from a state by one token."""
    continue_by_several: bool
    """Go on from a state by several tokens at once."""
    take_a_mask: bool
    """Begin with padding on the left."""


@torch.inference_mode()
def probe_mixers(model: nn.Module) -> Mixers:
    """Find by random inputs what the recurrent layers can do, in fp32: rounding in half precision would hide a lost state."""
    kinds = {type(mixer): (layer, mixer) for layer, mixer in recurrent_layers(model).items()}
    by_one = by_several = with_mask = True
    width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
    for layer, mixer in kinds.values():
        if all(p.is_floating_point() for p in mixer.parameters()):
            mixer = copy.deepcopy(mixer).float()
        first, mix = next(mixer.parameters()), mix_of(mixer)
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, sum(_PROBED_PARTS[0]), width, generator=generator).to(first.device, first.dtype)
        try:
            whole, stepped, cut = (_in_parts(layer, mix, hidden, lengths) for lengths in _PROBED_PARTS)
        except _REFUSALS:
            return Mixers(False, False, False)
        in_fp32 = _TOLERANCE_GPU if whole.is_cuda else _TOLERANCE
        tolerance = in_fp32 if whole.dtype is torch.float32 else _TOLERANCE_HALF
        most = tolerance * (float(whole.abs().nan_to_num().max()) + 1e-6)
        by_one &= bool((stepped - whole).abs().max() <= most)
        by_several &= bool((cut - whole).abs().max() <= most)
        with_mask = with_mask and _takes_a_mask(layer, mix, hidden, whole, most)
    return Mixers(by_one, by_one and by_several, by_one and with_mask)


_REFUSALS = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def _takes_a_mask(layer: int, mix: Mix, hidden_BLD: Tensor, whole_BLD: Tensor, most: float) -> bool:
    """True if a row padded on the left, and one more token, have the outputs that they have without padding."""
    length, num_padded, cache = hidden_BLD.shape[1], 5, _cache(layer)
    prompt_BLD = torch.cat([hidden_BLD[:, :num_padded], hidden_BLD[:, : length - 1]], dim=1)
    mask_BL = torch.ones(prompt_BLD.shape[:2], dtype=torch.long, device=hidden_BLD.device)
    mask_BL[0, :num_padded] = 0  # the other row is not padded, and has no reference
    try:
        out_BLD = torch.cat([mix(prompt_BLD, cache, mask_BL), mix(hidden_BLD[:, length - 1 :], cache)], dim=1)
    except _REFUSALS:
        return False
    return bool((out_BLD[0, num_padded:] - whole_BLD[0]).abs().max() <= most)


def _in_parts(layer: int, mix: Mix, hidden_BLD: Tensor, lengths: Seq[int]) -> Tensor:
    cache = _cache(layer)
    return torch.cat([mix(part, cache) for part in hidden_BLD.split(list(lengths), dim=1)], dim=1)


@torch.inference_mode()
def bytes_per_sequence(model: nn.Module) -> int:
    """Memory of one sequence's states."""
    mixers = recurrent_layers(model)
    total, known = 0, dict[type, int]()
    for layer, mixer in mixers.items():
        if type(mixer) not in known:
            first = next(mixer.parameters())
            width = model.get_input_embeddings().weight.shape[1]  # type: ignore[operator]
            cache: Any = _cache(layer)
            mix_of(mixer)(torch.zeros(1, 2, width, device=first.device, dtype=first.dtype), cache)
            held = cache.layers[layer]
            states = [x for x in (held.conv_states[0], held.recurrent_states[0]) if x is not None]
            known[type(mixer)] = sum(x.numel() * x.element_size() for x in states)
        total += known[type(mixer)]
    return total
