"""Runs a model outside the Llama family with adapters on a GPU: its own modules over the block pool, without CUDA graphs.

A prompt, a part of one and a decoded token are all spans of tokens that attend to what is stored before them, as in the bitwise
runner. The attention of a step gathers the keys of its sequences from the pool. It runs on a CPU, too, where tests compare it.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.kv import KVPool, KVShape
from ludic.inference.local.runner import Read, sampled_from
from ludic.inference.local.sampling import PromptScores, Scoring, scores_of
from ludic.inference.local.sequence import Sequence
from ludic.models.adapters.forward import AdaptedForward, AdapterRows
from ludic.models.attention import AttentionRules, AttentionState, say_once
from ludic.models.packed_attention import PackedSequences, to_device, varlen_attention
from ludic_gpu.bitwise_engine import BitwiseRunner


class AdaptedRunner(BitwiseRunner):
    """A `Runner` whose sequences may have adapters."""

    def __init__(self, forward: AdaptedForward, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self._forward = forward
        self._device = shape.device
        self.pool = KVPool(shape, num_blocks, block_size)
        if shape.device.type == "cuda":
            say_once("This family has no fused pass: with adapters it decodes without CUDA graphs, which is slower.")

    def weights_changed(self) -> None:
        self._forward.refresh()

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        where = np.concatenate([text.predictors(start) for text, start in zip(texts, starts, strict=True)])
        logits_NV = self._logits(
            np.concatenate([text.tokens for text in texts]),
            np.concatenate([np.arange(length) for length in lengths]),
            PackedSequences(lengths, self._device),
            where,
            [(text.adapter, len(text.tokens)) for text in texts],
        )
        return scores_of(texts, lambda rows: logits_NV[rows].float() / texts[0].temperature)

    def _step(self, new: list[tuple[Sequence, int, int]], wanted: list[Sequence]) -> Tensor:
        if not new:
            return torch.empty(0, 0)
        slots = [self._slots(sequence, end) for sequence, _, end in new]
        tokens = np.concatenate([sequence.tokens[start:end] for sequence, start, end in new])
        positions = np.concatenate([np.arange(start, end) for _, start, end in new])
        lengths = [end - start for _, start, end in new]
        state = _Gathered(
            self.pool,
            self._to_device(np.concatenate([own[start:] for own, (_, start, _) in zip(slots, new, strict=True)])),
            self._to_device(np.concatenate(slots)),
            lengths,
            [len(own) for own in slots],
        )
        last = dict(zip((sequence.number for sequence, _, _ in new), np.cumsum(lengths) - 1, strict=True))
        where = np.array([last[sequence.number] for sequence in wanted], dtype=np.int64)
        rows = [(sequence.adapter, end - start) for sequence, start, end in new]
        return self._logits(tokens, positions, state, where, rows)

    def _logits(
        self, tokens: np.ndarray, positions: np.ndarray, state: AttentionState, where: np.ndarray, rows: AdapterRows
    ) -> Tensor:
        """[N, V] at the flat positions `where`."""
        at = where if len(where) else np.zeros(1, dtype=np.int64)
        self._forward.use(rows, at.tolist())
        ids_T, positions_T = self._to_device(tokens), self._to_device(positions)
        return self._forward.logits(ids_T, positions_T, state, self._to_device(at))[: len(where)]

    def _sample(self, logits_NV: Tensor, sequences: list[Sequence]) -> Read:
        if all(sequence.is_plain for sequence in sequences):
            return super()._sample(logits_NV.float(), sequences)
        return sampled_from(logits_NV.float().cpu(), sequences)


class _Gathered:
    """Attention of new tokens to the keys and values of their sequences in the pool, theirs included."""

    def __init__(
        self, pool: KVPool, new_slots_T: Tensor, all_slots_L: Tensor, num_new: list[int], num_all: list[int]
    ) -> None:
        """`num_new` and `num_all` tokens of each sequence."""
        self._pool, self._new_slots_T, self._all_slots_L = pool, new_slots_T, all_slots_L
        self._cu_q, self._cu_k = (
            to_device(np.array([0, *np.cumsum(counts)], dtype=np.int32), pool.shape.device)
            for counts in (num_new, num_all)
        )
        self._max_q, self._max_k = max(num_new), max(num_all)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys.index_copy_(0, self._new_slots_T, key_TKD)
        values.index_copy_(0, self._new_slots_T, value_TKD)
        key_LKD, value_LKD = (x.index_select(0, self._all_slots_L) for x in (keys, values))
        return varlen_attention(query_THD, key_LKD, value_LKD, self._cu_q, self._cu_k, self._max_q, self._max_k, rules)
