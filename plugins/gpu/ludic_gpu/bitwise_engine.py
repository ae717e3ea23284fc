"""Runs the model for the scheduler in bitwise mode, on a CPU or a GPU: the trainer's own forward pass over the block pool.

A prompt, a part of one and a decoded token are all spans of tokens that attend to what is stored before them, so one method
computes a step. Log-probabilities come from the function that the trainer uses (`ludic_gpu.bitwise`).
"""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.kv import KVPool, KVShape
from ludic.inference.local.runner import Read
from ludic.inference.local.sampling import PromptScores, Scoring, filter_logits, race, scores_of
from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import PackedSequences, to_device
from ludic.types import ConfigError, SamplingParams
from ludic_gpu.bitwise.attention import BlockAttention, Span, TrainedAttention
from ludic_gpu.bitwise.decoder import BitwiseDecoder, BitwiseState
from ludic_gpu.bitwise.rows import log_probs

_SCORED_ROWS = 256
"""Positions whose log-probabilities are read at a time."""


def check_sampling(params: SamplingParams) -> None:
    """Raise for settings that change the distribution in a way that no trainer repeats."""
    usual = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "min_tokens": 0}
    changed = [name for name, value in usual.items() if getattr(params, name) != value]
    if changed:
        raise ConfigError(
            f"A bitwise engine got {', '.join(changed)}: the trainer computes log-probabilities without them, so they could not be "
            "equal. Leave them out, or make the engine without bitwise."
        )


# Letters: T flat tokens, N sequences, V vocabulary.
class BitwiseRunner:
    """A `Runner` whose log-probabilities are the trainer's, bit for bit."""

    runs_ahead = False

    def __init__(self, view: Any, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self._decoder = BitwiseDecoder(view, caches=True)
        self._device = shape.device
        self.pool = KVPool(shape, num_blocks, block_size)

    def weights_changed(self) -> None:
        self._decoder.refresh()

    def prefill(self, chunks: Seq[Chunk]) -> Read:
        """Compute parts of prompts; sample a first token for those that reach the end of their sequence."""
        computed = [chunk for chunk in chunks if chunk.source is None]
        copies = [(chunk.source, chunk.sequence) for chunk in chunks if chunk.source is not None]
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        own = [chunk.sequence for chunk in computed if chunk.reaches_the_end]
        with torch.inference_mode():
            logits_NV = self._step([(chunk.sequence, chunk.start, chunk.end) for chunk in computed], own)
            if copies:
                self._copy_last_blocks(copies)
                place = {sequence.number: i for i, sequence in enumerate(own)}
                logits_NV = logits_NV[[place[(chunk.source or chunk.sequence).number] for chunk in ended]]
            return self._sample(logits_NV, [chunk.sequence for chunk in ended])

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int = 1) -> Read:
        """One token for every sequence."""
        assert num_rounds == 1, "the engine asks for one round at a time"
        new = [(sequence, sequence.num_computed, sequence.num_computed + 1) for sequence in sequences]
        return self._sample(self._step(new, list(sequences)), list(sequences))

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]])
        flat = np.concatenate([text.tokens for text in texts]).astype(np.int64)
        positions = np.concatenate([np.arange(length) for length in lengths])
        spans = [Span(a, 0, np.arange(a, a + n)) for a, n in zip(starts.tolist(), lengths, strict=True)]
        state = TrainedAttention(spans, len(flat), PackedSequences(lengths, self._device), self._device)
        where = np.concatenate([text.predictors(start) for text, start in zip(texts, starts.tolist(), strict=True)])
        hidden = self._hidden(flat, positions, state, where)
        scale = torch.tensor(1 / texts[0].temperature, dtype=torch.float32, device=self._device)
        return scores_of(
            texts, lambda rows: self._decoder.logits(hidden[rows]) * scale, rows=_SCORED_ROWS, logps=log_probs
        )

    def keep(self, sequence: Sequence) -> None:
        """Nothing to do: every step writes to the pool itself."""

    def leave(self, sequence: Sequence) -> None:
        """Nothing to do: a sequence holds its blocks only."""

    def _sample(self, logits_NV: Tensor, sequences: list[Sequence]) -> Read:
        """Draw as `sampling.sample` does, on the device; log-probabilities are the trainer's."""
        if not sequences:
            return list
        device = logits_NV.device
        # As the trainer has it: times the inverse, in fp32. A greedy request keeps temperature 1.
        inverse = [1 / (sequence.sampling.temperature or 1.0) for sequence in sequences]
        x_NV = logits_NV * torch.tensor(inverse, dtype=torch.float32, device=device)[:, None]
        filter_logits(x_NV, sequences)
        places_N2 = torch.tensor([[s.seed, len(s.tokens)] for s in sequences], device=device)
        drawn_N = race((x_NV - x_NV.amax(dim=-1, keepdim=True)).exp_(), places_N2)[0][:, 0]
        is_greedy_N = torch.tensor([s.sampling.temperature == 0 for s in sequences], device=device)
        drawn_N = torch.where(is_greedy_N, x_NV.max(dim=-1).indices, drawn_N)
        tokens, logprobs = drawn_N.tolist(), log_probs(x_NV, drawn_N)[1].tolist()
        sampled = [(s, [token], [logprob]) for s, token, logprob in zip(sequences, tokens, logprobs, strict=True)]
        return lambda: sampled

    def _step(self, new: list[tuple[Sequence, int, int]], wanted: list[Sequence]) -> Tensor:
        """Compute tokens (sequence, start, end); logits [N, V] after the last token of the wanted sequences."""
        spans: list[Span] = []
        tokens: list[int] = []
        last: dict[int, int] = {}
        for sequence, start, end in new:
            spans.append(Span(len(tokens), start, self._slots(sequence, end)))
            tokens += sequence.tokens[start:end]
            last[sequence.number] = len(tokens) - 1
        if not spans:
            return torch.empty(0, 0)
        positions = np.concatenate([np.arange(start, end) for _, start, end in new])
        slots = np.concatenate([span.keys[span.start :] for span in spans])
        state = _Pooled(self.pool, spans, self._to_device(slots))
        where = np.array([last[sequence.number] for sequence in wanted], dtype=np.int64)
        hidden = self._hidden(np.array(tokens, dtype=np.int64), positions, state, where)
        return self._decoder.logits(hidden) if len(where) else hidden

    def _hidden(self, tokens: np.ndarray, positions: np.ndarray, state: BitwiseState, where: np.ndarray) -> Tensor:
        hidden = self._decoder.hidden(self._to_device(tokens), self._to_device(positions), state)
        return hidden.index_select(0, self._to_device(where))

    def _slots(self, sequence: Sequence, end: int) -> np.ndarray:
        size = self.pool.block_size
        blocks = np.array(sequence.blocks[: -(-end // size)], dtype=np.int64)
        return (blocks[:, None] * size + np.arange(size)).reshape(-1)[:end]

    def _copy_last_blocks(self, pairs: list[tuple[Sequence, Sequence]]) -> None:
        """Copy what follows the last full block, which sequences with equal tokens share."""
        found = []
        for source, copy in pairs:
            end = len(copy.tokens)
            start = end - end % self.pool.block_size
            found.append(np.stack([self._slots(source, end)[start:], self._slots(copy, end)[start:]]))
        self.pool.copy(*self._to_device(np.concatenate(found, axis=1)))

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64), self._device)


class _Pooled:
    """Attention of new tokens to the keys and values in the pool, theirs included."""

    def __init__(self, pool: KVPool, spans: list[Span], slots_T: Tensor) -> None:
        self._pool, self._slots_T = pool, slots_T
        self._blocks = BlockAttention(spans, pool.shape.device, zero=pool.zero_slot)
        self.longest = self._blocks.longest

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys.index_copy_(0, self._slots_T, key_TKD)
        values.index_copy_(0, self._slots_T, value_TKD)
        return self._blocks.attend(query_THD, keys, values, rules)
