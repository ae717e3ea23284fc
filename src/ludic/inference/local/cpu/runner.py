"""Runs the model for the scheduler on a CPU: flat batches in, logits of the requested tokens out.

Batches are padded to a minimum number of tokens, and keys to a multiple (`kv.padded_length`), because products with very few
rows and sums with a remainder take another path through the math library and round differently. With this padding a request
gets the same logits, bit for bit, alone and in company, if the forward pass `keeps_rows`, which it tries on the processor at hand.
Otherwise logits differ by rounding, and `sampling` still draws the same tokens except for near ties.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.cpu.rows import DecodeState, DenseRows, Prefix, SharedPrefixes, num_shared
from ludic.inference.local.kv import KVPool, KVShape, PrefillState, Span, free_memory, padded_length
from ludic.inference.local.runner import Read, RunnerSettings, sampled_from
from ludic.inference.local.sampling import PromptScores, Scoring, scores_of
from ludic.inference.local.sequence import Chunk, Sequence, tokens_as_bytes
from ludic.models.adapters.forward import AdaptedForward, AdapterRows
from ludic.models.attention import AttentionState, say_once
from ludic.models.forward import Forward, make_forward, packed_bytes


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
        self._rows: DenseRows[Sequence] = DenseRows(self.pool)
        self._prefix_rows: DenseRows[Prefix] = DenseRows(self.pool)
        self._prefixes: dict[tuple[int, bytes], Prefix] = {}
        """By their adapters and tokens."""
        self._shared: SharedPrefixes | None = None
        self._rows_changed = False
        self._is_plain = True
        """Whether all layers attend to all keys by plain softmax, so that attention can be computed in two parts."""

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
            self._copy_last_blocks([(chunk.source, chunk.sequence) for chunk in ended if chunk.source is not None])
            logits_NV = logits_NV[[logits_of[(chunk.source or chunk.sequence).number] for chunk in ended]]
        return sampled_from(logits_NV, [chunk.sequence for chunk in ended])

    def _copy_last_blocks(self, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Copy what follows the last full block, which sequences with equal tokens share."""
        sources, copies = [], []
        for source, copy in pairs:
            end = len(copy.tokens)
            start = end - end % self.pool.block_size
            sources.append(self.pool.slots(source.blocks, start, end))
            copies.append(self.pool.slots(copy.blocks, start, end))
        self.pool.copy(torch.cat(sources), torch.cat(copies))

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        flat = [int(t) for text in texts for t in text.tokens]
        positions = [p for length in lengths for p in range(length)]
        padding = [0] * max(0, self._min_rows - len(flat))
        spans = [Span(start, 0, length, torch.empty(0)) for start, length in zip(starts, lengths, strict=True)]
        where = [i for text, start in zip(texts, starts, strict=True) for i in text.predictors(start)]
        self._use_adapters([(text.adapter, len(text.tokens)) for text in texts], padding, where)
        logits_NV = self._forward(flat + padding, positions + padding, PrefillState(None, spans, None), where).float()
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
        state = DecodeState(self._rows, in_row_R, length, self._shared)
        tokens, positions = [owner.tokens[-1] for owner in owners], [owner.num_computed for owner in owners]
        where = list(range(len(owners)))
        self._use_adapters([(owner.adapter, 1) for owner in owners], padding, where)
        logits_NV = self._forward(tokens + padding, positions + padding, state, where, lambda: self._next_slots(owners))
        return sampled_from(logits_NV, owners)

    def _next_slots(self, owners: list[Sequence]) -> Tensor:
        """Slots in the pool of the tokens that a step decodes."""
        return torch.cat([self.pool.slots(o.blocks, o.num_computed, o.num_computed + 1) for o in owners])

    def experts(self, sequence: Sequence) -> np.ndarray[Any, Any] | None:
        """Of all its tokens but the last, which has not been computed."""
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
