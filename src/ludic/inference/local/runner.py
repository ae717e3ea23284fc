"""Runs the model for the scheduler on a CPU: flat batches in, logits of the requested tokens out.

Batches are padded to a minimum number of tokens, and keys to a multiple (`kv.padded_length`), because products with very few
rows and sums with a remainder take another path through the math library and round differently. With this padding a request
gets the same logits, bit for bit, alone and in any batch, if the library's other choices depend on neither (measured on
aarch64). Otherwise logits differ by rounding, and `sampling` still draws the same tokens except for near ties.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.kv import KVPool, KVShape, PrefillState, Span, padded_length
from ludic.inference.local.rows import DecodeState, DenseRows, Prefix, SharedPrefixes, num_shared
from ludic.inference.local.sampling import sample
from ludic.inference.local.sequence import Chunk, Sampled, Sequence, tokens_as_bytes
from ludic.models.attention import AttentionState
from ludic.models.forward import Forward


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """A text to score from `num_prompt` on, and the future of its result."""

    tokens: np.ndarray[Any, Any]
    num_prompt: int
    """Tokens at the start that are not scored."""
    temperature: float
    answer: Future[np.ndarray[Any, Any]] = field(default_factory=Future)

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_prompt

    def predictors(self, start: int) -> range:
        """Positions of the logits that predict the scored tokens, for a text at flat position `start`."""
        return range(start + self.num_prompt - 1, start + len(self.tokens) - 1)


def take_batch(waiting: list[Scoring], *, max_tokens: int, max_logits: int) -> list[Scoring]:
    """Remove and return the first text and those of the same temperature that still fit; one alone always fits."""
    batch: list[Scoring] = []
    num_tokens = num_logits = 0
    for scoring in list(waiting):
        if batch and scoring.temperature != batch[0].temperature:
            continue
        num_tokens, num_logits = num_tokens + len(scoring.tokens), num_logits + scoring.num_scored
        if batch and (num_tokens > max_tokens or num_logits > max_logits):
            break
        batch.append(scoring)
        waiting.remove(scoring)
    return batch


Read = Callable[[], list[Sampled]]
"""Waits for a launched computation and returns its tokens."""


class Runner(Protocol):
    """The engine's interface to a device."""

    runs_ahead: bool
    """Whether a step can be launched before the tokens of the one before are read."""

    def prefill(self, chunks: Seq[Chunk]) -> Read: ...

    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> Read: ...

    def score(self, texts: Seq[Scoring]) -> list[np.ndarray[Any, Any]]: ...

    def keep(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def weights_changed(self) -> None: ...


class CPURunner:
    """Prefill by spans, decoding by rows."""

    runs_ahead = False

    def __init__(self, forward: Forward, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self._model = forward
        self._min_rows = forward.min_rows
        self.pool = KVPool(shape, num_blocks, block_size)
        self._rows: DenseRows[Sequence] = DenseRows(self.pool)
        self._prefix_rows: DenseRows[Prefix] = DenseRows(self.pool)
        self._prefixes: dict[bytes, Prefix] = {}
        """By their tokens."""
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
        state = PrefillState(self.pool, spans, torch.cat(slots))
        logits_NV = self._forward(tokens + [0] * padding, positions + [0] * padding, state, last)
        self._is_plain &= state.is_plain
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        if len(ended) > len(last):
            self._copy_last_blocks([(chunk.source, chunk.sequence) for chunk in ended if chunk.source is not None])
            logits_NV = logits_NV[[logits_of[(chunk.source or chunk.sequence).number] for chunk in ended]]
        return _sampled(logits_NV, [chunk.sequence for chunk in ended])

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
    def score(self, texts: Seq[Scoring]) -> list[np.ndarray[Any, Any]]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        flat = [int(t) for text in texts for t in text.tokens]
        positions = [p for length in lengths for p in range(length)]
        padding = [0] * max(0, self._min_rows - len(flat))
        spans = [Span(start, 0, length, torch.empty(0)) for start, length in zip(starts, lengths, strict=True)]
        where = [i for text, start in zip(texts, starts, strict=True) for i in text.predictors(start)]
        logits_NV = self._forward(flat + padding, positions + padding, PrefillState(None, spans, None), where).float()
        logits_NV /= texts[0].temperature
        targets_N1 = torch.tensor([flat[i + 1] for i in where])[:, None]
        chosen_N = logits_NV.gather(-1, targets_N1)[:, 0] - logits_NV.logsumexp(dim=-1)
        return list(np.split(chosen_N.numpy(), np.cumsum([text.num_scored for text in texts])[:-1]))

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
        logits_NV = self._forward(tokens + padding, positions + padding, state, list(range(len(owners))))
        return _sampled(logits_NV, owners)

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
            key = tokens_as_bytes(sequence.tokens[: sequence.num_shared])
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
                key = tokens_as_bytes(sequence.tokens[: sequence.num_shared])
                if key not in self._prefixes:
                    self._prefixes[key] = Prefix(sequence.num_shared)
                    new_prefixes.append(self._prefixes[key])
                self._prefixes[key].members.append(sequence)
        if new_prefixes:
            slots = [self.pool.slots(prefix.members[0].blocks, 0, prefix.num_in_row) for prefix in new_prefixes]
            self._prefix_rows.join(new_prefixes, slots)
        self._rows.join(sequences, [self.pool.slots(s.blocks, s.num_shared, s.num_computed) for s in sequences])

    # --- the model ---

    def _forward(self, tokens: list[int], positions: list[int], state: AttentionState, where: list[int]) -> Tensor:
        """Logits [N, V] at the flat positions `where`."""
        padded = where + [0] * max(0, self._min_rows - len(where))  # the head is a matrix product too
        ids_T, positions_T, where_N = torch.tensor(tokens), torch.tensor(positions), torch.tensor(padded)
        return self._model.logits(ids_T, positions_T, state, where_N)[: len(where)]


def _sampled(logits_NV: Tensor, sequences: list[Sequence]) -> Read:
    tokens, logprobs = sample(logits_NV, sequences) if sequences else ([], [])
    sampled = [(s, [token], [logprob]) for s, token, logprob in zip(sequences, tokens, logprobs, strict=True)]
    return lambda: sampled
