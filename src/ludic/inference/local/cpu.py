"""Runs the model for the scheduler on a CPU: flat batches in, logits of the requested tokens out.

Batches are padded to a minimum number of tokens, and keys to a multiple (`kv.padded_length`), because products with very few
rows and sums with a remainder take another path through the math library and round differently. With this padding a request
gets the same logits, bit for bit, alone and in company, if the forward pass `keeps_rows`, which it tries on the processor at hand;
on x86_64 only while its prompt is not shared (from `MIN_SHARED` tokens on) and does not continue from the cache, since attention is
not tried. Otherwise logits differ by rounding, and `sampling` still draws the same tokens except for near ties.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference.local.kv import (
    KEY_MULTIPLE,
    QUERY_BLOCK,
    KVPool,
    KVShape,
    PrefillState,
    Span,
    free_memory,
    padded_length,
)
from ludic.inference.local.runner import Read, RunnerSettings, sampled_from
from ludic.inference.local.sampling import FlatTexts, PromptScores, Scoring, scores_of
from ludic.inference.local.sequence import Chunk, Sequence, tokens_as_bytes
from ludic.models.adapters.forward import AdaptedForward, AdapterRows
from ludic.models.attention import AttentionRules, AttentionState, explicit_attention, say_once
from ludic.models.forward import Forward, make_forward, packed_bytes

MIN_SHARED = 128
"""Tokens from which the first part of a prompt has a separate row: for fewer, the second attention call costs too much."""
_attention_with_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
"""The kernel of SDPA on a CPU, which also returns the log-sum-exps of the scores."""


# Letters: L context length, R rows, P prefixes, M members of one, H query heads, K key/value heads, G = H / K, D head size.
def num_shared(num_prompt: int) -> int:
    """Tokens of a prompt that are in the row of its first part."""
    whole = num_prompt // KEY_MULTIPLE * KEY_MULTIPLE
    return whole if whole >= MIN_SHARED else 0


class _RowOwner(Protocol):
    row: int
    """-1 without one."""

    @property
    def num_in_row(self) -> int: ...


@dataclass(slots=True, eq=False)
class Prefix:
    """The first part of a prompt, for all decoding sequences that begin with it."""

    num_in_row: int
    row: int = -1
    members: list[Sequence] = field(default_factory=list)


Owner = TypeVar("Owner", bound=_RowOwner)


class _DenseRows(Generic[Owner]):
    """Keys and values as [R, K, L, D], one row for each owner."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._num_rows = self._length = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._owners: list[Owner | None] = []

    def owners(self) -> list[Owner]:
        """In order of their rows, which must have no gaps."""
        return [owner for owner in self._owners if owner is not None]

    def reserve(self, num_rows: int, length: int) -> None:
        """Grow to this size; contents stay."""
        if num_rows <= self._num_rows and length <= self._length:
            return
        rows = max(num_rows, self._num_rows)
        capacity = self._length if length <= self._length else -(-max(length, self._length * 5 // 4) // 64) * 64
        shape = self._pool.shape
        for tensors in (self.keys, self.values):
            old = list(tensors)
            tensors[:] = [
                torch.zeros(rows, k, capacity, d, dtype=shape.dtype, device=shape.device) for k, d in shape.heads
            ]
            for new, held in zip(tensors, old, strict=False):  # nothing is held at first
                new[: held.shape[0], :, : held.shape[2]] = held
        self._num_rows, self._length = rows, capacity

    def join(self, joining: list[Owner], slots: list[Tensor]) -> None:
        """Give rows to owners, filled from these slots of the pool."""
        free = [i for i, owner in enumerate(self._owners) if owner is None]
        missing = max(0, len(joining) - len(free))
        free += range(len(self._owners), len(self._owners) + missing)
        self._owners += [None] * missing
        length = max(len(own) for own in slots)
        self.reserve(len(self._owners), length)
        slots_NL = torch.full((len(joining), length), self._pool.zero_slot)
        for number, (owner, row, own) in enumerate(zip(joining, free, slots, strict=False)):
            self._owners[row], owner.row = owner, row
            slots_NL[number, : len(own)] = own
        rows_N = torch.tensor([owner.row for owner in joining])
        for dense, pool in self._stores():
            # A masked NaN is still a NaN: values left here by non-finite weights must not be read again.
            dense[rows_N, :, length:] = 0
            dense[rows_N, :, :length] = pool[slots_NL].transpose(1, 2)

    def leave(self, owner: Owner) -> None:
        self._owners[owner.row] = None
        owner.row = -1

    def close_gaps(self) -> None:
        """Move the last rows into free ones."""
        owners, gap = self._owners, 0
        while True:
            while owners and owners[-1] is None:
                owners.pop()
            gap = next((i for i in range(gap, len(owners)) if owners[i] is None), -1)
            if gap < 0:
                return
            last = owners.pop()
            assert last is not None, "empty rows at the end were dropped"
            for dense in (*self.keys, *self.values):
                dense[gap, :, : last.num_in_row] = dense[last.row, :, : last.num_in_row]
                dense[gap, :, last.num_in_row :] = 0  # as in `join`
            owners[gap] = last
            last.row = gap

    def store(self, row: int, start: int, slots_L: Tensor) -> None:
        """Copy a row's contents from `start` on back to the pool."""
        for dense, pool in self._stores():
            pool[slots_L] = dense[row, :, start : start + len(slots_L)].transpose(0, 1)

    def _stores(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.keys, self._pool.keys, strict=True)
        yield from zip(self.values, self._pool.values, strict=True)


class SharedPrefixes:
    """Attention of the rows whose sequences have a prefix to that prefix."""

    def __init__(self, prefix_rows: _DenseRows[Prefix], num_rows: int) -> None:
        prefixes = prefix_rows.owners()
        self._prefix_rows = prefix_rows
        counts = [len(prefix.members) for prefix in prefixes]
        # One call for all prefixes costs the largest number of members for each.
        size = len(prefixes) if max(counts) * len(prefixes) <= 2 * sum(counts) else 1
        self._calls = [_PrefixCall(prefixes[first : first + size]) for first in range(0, len(prefixes), size)]
        queries = [row for call in self._calls for row in call.rows]
        place = {row: i for i, row in enumerate(queries) if row >= 0}
        rows = sorted(place)
        self.rows_N = torch.tensor(rows) if len(rows) < num_rows else None
        """The rows with a prefix; None for all."""
        self._order_N = None if queries == rows else torch.tensor([place[row] for row in rows])

    def attend(self, layer: int, query_RKGD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        """Outputs and log-sum-exps of `rows_N`."""
        keys, values = self._prefix_rows.keys[layer], self._prefix_rows.values[layer]
        parts = [call.attend(keys, values, query_RKGD, scaling) for call in self._calls]
        out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*parts, strict=True))
        return (out, lse) if self._order_N is None else (out[self._order_N], lse[self._order_N])


class _PrefixCall:
    """Attention to consecutive prefixes with about the same number of members."""

    def __init__(self, prefixes: list[Prefix]) -> None:
        most = max(len(prefix.members) for prefix in prefixes)
        self.rows = [row for p in prefixes for row in [*(s.row for s in p.members), *[-1] * (most - len(p.members))]]
        """Row of each query; -1 for padding."""
        self._is_in_order = self.rows == list(range(len(self.rows)))
        self._rows_N = torch.tensor(self.rows).clamp_(min=0)
        self._where = slice(prefixes[0].row, prefixes[-1].row + 1)
        lengths_P = torch.tensor([prefix.num_in_row for prefix in prefixes])
        self._length = int(lengths_P.max())
        self._mask: Tensor | None = None
        if bool((lengths_P < self._length).any()):
            is_hidden = torch.arange(self._length) >= lengths_P[:, None]
            self._mask = torch.zeros(is_hidden.shape).masked_fill_(is_hidden, float("-inf"))[:, None, None, :]

    def attend(self, keys: Tensor, values: Tensor, query_RKGD: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
        _, num_kv, group, size = query_RKGD.shape
        key_PKLD, value_PKLD = keys[self._where, :, : self._length], values[self._where, :, : self._length]
        num_prefixes = len(key_PKLD)
        query_NKGD = query_RKGD if self._is_whole(query_RKGD) else query_RKGD[self._rows_N]
        query_PMKGD = query_NKGD.unflatten(0, (num_prefixes, -1))
        query_PKND = query_PMKGD.transpose(1, 2).reshape(num_prefixes, num_kv, -1, size)
        num_queries = query_PKND.shape[2]
        if num_queries % QUERY_BLOCK == 1:  # see `padded_length`
            query_PKND = F.pad(query_PKND, (0, 0, 0, 1))
        out_PKND, lse_PKN = _attention_with_lse(
            query_PKND, key_PKLD, value_PKLD, 0.0, False, attn_mask=self._mask, scale=scaling
        )
        out_PKMGD = out_PKND[:, :, :num_queries].view(num_prefixes, num_kv, -1, group, size)
        lse_PKMG = lse_PKN[:, :, :num_queries].view(num_prefixes, num_kv, -1, group)
        out_NKGD = out_PKMGD.transpose(1, 2).reshape(-1, num_kv, group, size)
        return out_NKGD, lse_PKMG.transpose(1, 2).reshape(-1, num_kv, group)

    def _is_whole(self, query_RKGD: Tensor) -> bool:
        """True if the queries are those of all rows in order."""
        return len(self.rows) == len(query_RKGD) and self._is_in_order


class _DecodeState:
    """Attention of one new token per row."""

    def __init__(
        self, rows: _DenseRows[Sequence], positions_R: Tensor, length: int, shared: SharedPrefixes | None = None
    ) -> None:
        self._rows = rows
        self._positions_R = positions_R
        """Positions in the rows."""
        self._length = length
        self._shared = shared
        self._masks: dict[int | None, Tensor] = {}
        self._places: dict[int, Tensor] = {}

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._rows.keys[layer], self._rows.values[layer]
        place = self._place(keys)
        size = key_TKD.shape[-1]
        keys.view(-1, size).index_copy_(0, place, key_TKD.reshape(-1, size))
        values.view(-1, size).index_copy_(0, place, value_TKD.reshape(-1, size))
        num_rows, num_heads, size = query_THD.shape
        kv_heads = key_TKD.shape[1]
        # Query heads that share a key head take the place of query positions, so no key is repeated.
        query_RKGD = query_THD.view(num_rows, kv_heads, num_heads // kv_heads, size)
        key_RKLD, value_RKLD = keys[:num_rows, :, : self._length], values[:num_rows, :, : self._length]
        mask = self._mask(rules.sliding_window)
        if rules.softcap is not None or rules.sinks_H is not None:
            sinks_KG = None if rules.sinks_H is None else rules.sinks_H.view(kv_heads, -1)
            out = explicit_attention(query_RKGD, key_RKLD, value_RKLD, mask, rules, sinks=sinks_KG)
        elif self._shared is not None:
            out, lse_RKG = _attention_with_lse(
                query_RKGD, key_RKLD, value_RKLD, 0.0, False, attn_mask=mask, scale=rules.scaling
            )
            out = self._merged(self._shared, layer, query_RKGD, rules.scaling, out, lse_RKG)
        else:
            out = F.scaled_dot_product_attention(query_RKGD, key_RKLD, value_RKLD, attn_mask=mask, scale=rules.scaling)
        return out.reshape(num_rows, num_heads, size)

    def _merged(
        self, shared: SharedPrefixes, layer: int, query_RKGD: Tensor, scaling: float, own_RKGD: Tensor, lse_RKG: Tensor
    ) -> Tensor:
        """Merge attention to the rows with that to the prefixes."""
        prefix_NKGD, prefix_lse_NKG = shared.attend(layer, query_RKGD, scaling)
        rows_N = shared.rows_N
        own_NKGD, lse_NKG = (own_RKGD, lse_RKG) if rows_N is None else (own_RKGD[rows_N], lse_RKG[rows_N])
        # In double precision: the exponential of a float differs by its place in memory (the rest of a vector is scalar).
        weight_NKG = torch.sigmoid((prefix_lse_NKG - lse_NKG).double()).to(own_RKGD.dtype)
        merged_NKGD = torch.lerp(own_NKGD, prefix_NKGD, weight_NKG[..., None])
        return merged_NKGD if rows_N is None else own_RKGD.index_copy_(0, rows_N, merged_NKGD)

    def _place(self, dense: Tensor) -> Tensor:
        """Index of the new keys in the flattened rows, for every row and head."""
        _, heads, capacity, _ = dense.shape
        if heads not in self._places:
            rows_R1 = torch.arange(len(self._positions_R))[:, None]
            first_RK = (rows_R1 * heads + torch.arange(heads)) * capacity
            self._places[heads] = (first_RK + self._positions_R[:, None]).flatten()
        return self._places[heads]

    def _mask(self, window: int | None) -> Tensor:
        if window not in self._masks:
            positions_L = torch.arange(self._length)[None]
            mask = positions_L <= self._positions_R[:, None]
            if window is not None:
                mask &= positions_L > self._positions_R[:, None] - window
            # An additive mask: SDPA would convert a boolean one in every layer.
            self._masks[window] = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))[:, None, None, :]
        return self._masks[window]


def cpu_forward(view: Any, settings: RunnerSettings) -> Forward:
    """The fastest forward pass on a CPU: with a packed copy of the matrices, if memory is plentiful."""
    pack = settings.pack_weights
    if pack is None:
        pack = packed_bytes(view) < free_memory(torch.device("cpu")) // 4
    forward: Forward = AdaptedForward(view, pack=pack) if settings.adapters else make_forward(view, pack=pack)
    if not forward.keeps_rows:
        say_once(
            "It is not certain that on this processor a row of this model has the same result in batches of other sizes: "
            "the logits of a request may depend, by rounding, on the requests that are computed with it."
        )
    return forward


class CPURunner:
    """Prefill by spans, decoding by rows."""

    runs_ahead = False

    def __init__(
        self, forward: Forward, shape: KVShape, num_blocks: int, block_size: int, *, routers: Any = None
    ) -> None:
        """`routers`: those of a mixture whose experts are recorded, as the plug-in part "experts" has them."""
        self._model = forward
        self._routers = routers
        self._min_rows = forward.min_rows
        self.pool = KVPool(shape, num_blocks, block_size)
        self._rows: _DenseRows[Sequence] = _DenseRows(self.pool)
        self._prefix_rows: _DenseRows[Prefix] = _DenseRows(self.pool)
        self._prefixes: dict[tuple[int, bytes], Prefix] = {}
        """The prefixes by adapter and tokens."""
        self._shared: SharedPrefixes | None = None
        self._rows_changed = False
        self._is_plain = True
        """True if all layers attend to all keys by plain softmax, so that attention can be computed in two parts."""

    def weights_changed(self) -> None:
        self._model.refresh()

    # --- prompts ---

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> Read:
        """Compute parts of prompts; sample a first token for those that reach the end of their sequence."""
        tokens: list[int] = []
        positions: list[int] = []
        spans, slots = [], []
        last: list[int] = []
        logits_of: dict[int, int] = {}
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.source is not None:
                continue
            before = self.pool.slots(sequence.blocks, 0, chunk.start)
            spans.append(Span(len(tokens), chunk.start, chunk.end, before))
            slots.append(self.pool.slots(sequence.blocks, chunk.start, chunk.end))
            tokens += sequence.tokens[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            if chunk.reaches_the_end:
                logits_of[sequence.number] = len(last)
                last.append(len(tokens) - 1)
        padding = max(0, self._min_rows - len(tokens))
        slots.append(torch.full((padding,), self.pool.scratch_slot))
        slots_T = torch.cat(slots)
        state = PrefillState(self.pool, spans, slots_T)
        computed = [(chunk.sequence.adapter, chunk.length) for chunk in chunks if chunk.source is None]
        self._use_adapters(computed, [0] * padding, last)
        logits_NV = self._forward(tokens + [0] * padding, positions + [0] * padding, state, last, lambda: slots_T)
        self._is_plain &= state.is_plain
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        if len(ended) > len(last):
            self.pool.copy_last_blocks((chunk.source, chunk.sequence) for chunk in ended if chunk.source is not None)
            logits_NV = logits_NV[[logits_of[(chunk.source or chunk.sequence).number] for chunk in ended]]
        return sampled_from(logits_NV, [chunk.sequence for chunk in ended])

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        flat = FlatTexts.of(texts)
        starts = np.cumsum([0, *flat.lengths[:-1]]).tolist()
        padding = [0] * max(0, self._min_rows - len(flat.tokens))
        spans = [Span(start, 0, length, torch.empty(0)) for start, length in zip(starts, flat.lengths, strict=True)]
        tokens, positions, where = flat.tokens.tolist(), flat.positions.tolist(), flat.where.tolist()
        self._use_adapters([(text.adapter, len(text.tokens)) for text in texts], padding, where)
        state = PrefillState(None, spans, None)
        logits_NV = self._forward(tokens + padding, positions + padding, state, where).float()
        logits_NV /= texts[0].temperature
        return scores_of(texts, lambda rows: logits_NV[rows])

    # --- decoding ---

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int = 1) -> Read:
        """One token for every sequence."""
        assert num_rounds == 1, "several rounds only pay off on a GPU"
        self._join([sequence for sequence in sequences if sequence.row < 0])
        num_rows = max(len(sequences), self._min_rows)
        if self._rows_changed:
            self._rows.close_gaps()
            self._prefix_rows.close_gaps()
            self._shared = SharedPrefixes(self._prefix_rows, num_rows) if self._prefixes else None
            self._rows_changed = False
        owners = self._rows.owners()
        assert len(owners) == len(sequences), "every row belongs to a decoding sequence"
        length = padded_length(max(owner.num_in_row for owner in owners) + 1)
        self._rows.reserve(num_rows, length)
        padding = [0] * (num_rows - len(owners))
        in_row_R = torch.tensor([owner.num_in_row for owner in owners] + padding)
        state = _DecodeState(self._rows, in_row_R, length, self._shared)
        tokens, positions = [owner.tokens[-1] for owner in owners], [owner.num_computed for owner in owners]
        where = list(range(len(owners)))
        self._use_adapters([(owner.adapter, 1) for owner in owners], padding, where)
        logits_NV = self._forward(tokens + padding, positions + padding, state, where, lambda: self._next_slots(owners))
        return sampled_from(logits_NV, owners)

    def _next_slots(self, owners: list[Sequence]) -> Tensor:
        """Slots in the pool of the tokens that a step decodes."""
        return torch.cat([self.pool.slots(o.blocks, o.num_computed, o.num_computed + 1) for o in owners])

    def experts(self, sequence: Sequence) -> np.ndarray[Any, Any] | None:
        """The experts of all its tokens but the last, which has not been computed."""
        return self.pool.experts_of(sequence.blocks, len(sequence.tokens) - 1)

    def keep(self, sequence: Sequence) -> None:
        """Copy its decoded tokens to the pool, for requests that continue from it."""
        if sequence.row >= 0 and sequence.num_computed > sequence.num_pooled:
            slots = self.pool.slots(sequence.blocks, sequence.num_pooled, sequence.num_computed)
            self._rows.store(sequence.row, sequence.num_pooled - sequence.num_shared, slots)

    def leave(self, sequence: Sequence) -> None:
        """Free its row, and that of its prefix if no other has it."""
        if sequence.row < 0:
            return
        self._rows.leave(sequence)
        self._rows_changed = True
        if sequence.num_shared:
            key = _prefix_key(sequence)
            prefix = self._prefixes[key]
            prefix.members.remove(sequence)
            if not prefix.members:
                self._prefix_rows.leave(self._prefixes.pop(key))

    def _join(self, sequences: list[Sequence]) -> None:
        """Give rows to sequences with a finished prompt, filled from the pool."""
        if not sequences:
            return
        self._rows_changed = True
        new_prefixes = []
        for sequence in sequences:
            sequence.num_pooled = sequence.num_computed
            sequence.num_shared = num_shared(sequence.num_prompt) if self._is_plain else 0
            if sequence.num_shared:
                key = _prefix_key(sequence)
                if key not in self._prefixes:
                    self._prefixes[key] = Prefix(sequence.num_shared)
                    new_prefixes.append(self._prefixes[key])
                self._prefixes[key].members.append(sequence)
        if new_prefixes:
            slots = [self.pool.slots(prefix.members[0].blocks, 0, prefix.num_in_row) for prefix in new_prefixes]
            self._prefix_rows.join(new_prefixes, slots)
        self._rows.join(sequences, [self.pool.slots(s.blocks, s.num_shared, s.num_computed) for s in sequences])

    # --- the model ---

    def _use_adapters(self, rows: AdapterRows, padding: list[int], where: list[int]) -> None:
        """Before a pass over these rows, padding after them; padding and the positions that pad `where` have no adapter."""
        if isinstance(self._model, AdaptedForward):
            num_rows = sum(count for _, count in rows)
            num_extra = max(0, self._min_rows - len(where))
            self._model.use([*rows, (None, len(padding) + 1)], [*where, *[num_rows] * num_extra])

    def _forward(
        self,
        tokens: list[int],
        positions: list[int],
        state: AttentionState,
        where: list[int],
        slots: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        """Logits [N, V] at the flat positions `where`. `slots` returns where the experts of the first tokens are recorded."""
        padded = where + [0] * max(0, self._min_rows - len(where))  # the head is a matrix product too
        ids_T, positions_T, where_N = torch.tensor(tokens), torch.tensor(positions), torch.tensor(padded)
        if self._routers is None or slots is None:
            return self._model.logits(ids_T, positions_T, state, where_N)[: len(where)]
        with self._routers.watched() as routed:
            logits_NV = self._model.logits(ids_T, positions_T, state, where_N)[: len(where)]
        assert self.pool.experts is not None, "made for a shape with experts"
        slots_S = slots()
        self.pool.experts.index_copy_(0, slots_S, routed.experts_TLK()[: len(slots_S)])
        return logits_NV


def _prefix_key(sequence: Sequence) -> tuple[int, bytes]:
    return sequence.adapter_number, tokens_as_bytes(sequence.tokens[: sequence.num_shared])
