"""Runs hybrids on a GPU: a decoding round with its states is one CUDA graph, where the layers' code can be captured.

The layers are transformers' own, not compiled. A graph reads the states of its first rows in place.
"""

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.kv import KVShape
from ludic.inference.local.runner import Read
from ludic.inference.local.sampling import PromptScores, Scoring
from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.attention import AttentionState
from ludic.models.kinds import RecurrentState
from ludic_gpu.cuda.runner import CUDARunner, Kernels
from ludic_gpu.hybrids.states import DecodingRows, HybridState, Mixers, PromptParts, StateRows, WholeTexts


class GraphedRecurrentRunner(CUDARunner):
    """A `CUDARunner` with states."""

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        num_blocks: int,
        block_size: int,
        *,
        max_sequences: int,
        max_length: int,
        max_rounds: int,
        mixers: Mixers,
    ) -> None:
        super().__init__(
            model, shape, num_blocks, block_size, max_sequences=max_sequences, max_length=max_length, max_rounds=max_rounds,
            compile_layers=False, fuse=False,
        )  # fmt: skip
        # Rows for every sequence, and for padding a round to the next size.
        gap = max((after - before - 1 for before, after in pairwise([0, *self._buckets])), default=0)
        self._states = StateRows(shape.device, max_sequences + gap)
        self._mixers = mixers
        self._recurrence: RecurrentState = DecodingRows(self._states)
        self._is_in_capture = False
        self._num_moves = 0
        """`num_moves` of the states when the graphs were captured."""

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> Read:
        computed = [chunk for chunk in chunks if chunk.source is None]
        self._recurrence = PromptParts(self._states, computed, self._mixers)
        read = super().prefill(chunks)
        self._states.copy((chunk.source, chunk.sequence) for chunk in chunks if chunk.source is not None)
        return read

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> Read:
        self._recurrence = DecodingRows(self._states)
        return super().decode(sequences, num_rounds)

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        self._recurrence = WholeTexts([len(text.tokens) for text in texts], self._states.device)
        return super().score(texts)

    def leave(self, sequence: Sequence) -> None:
        self._states.leave(sequence)
        super().leave(sequence)

    def _arrange(self, sequences: Seq[Sequence]) -> None:
        super()._arrange(sequences)
        owners = [owner for owner in self._owners if owner is not None]
        self._states.arrange(owners, self._bucket(len(owners)))
        if self._num_moves != self._states.num_moves:
            self._num_moves, self._graphs = self._states.num_moves, {}

    def _layer_state(self, attention: AttentionState) -> AttentionState:
        # Before a capture a round runs once, to allocate and compile: it must not change the states.
        is_trial = self._is_in_capture and not torch.cuda.is_current_stream_capturing()
        return HybridState(attention, DecodingRows(self._states, keeps=False) if is_trial else self._recurrence)

    def _capture(self, kernels: Kernels) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        self._is_in_capture = True
        try:
            return super()._capture(kernels)
        finally:
            self._is_in_capture = False
