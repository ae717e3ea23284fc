"""The block cache on a GPU: CUDA graphs, and a step at a time for adapters outside the Llama family."""

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.backends import PagedBackend, device_type
from ludic.inference.local.kv import KVPool, KVShape, free_memory, rope_limit
from ludic.inference.local.runner import EngineNeeds, Read, Runner, RunnerSettings, sampled_from
from ludic.inference.local.sampling import FlatTexts, PromptScores, Scoring, scores_of
from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.adapters.forward import AdaptedForward, AdapterRows
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import AttentionRules, AttentionState, has_sinks, say_once
from ludic.models.packed_attention import PackedSequences, to_device, varlen_attention


# Letters: T flat tokens, L stored tokens, N sequences, V vocabulary.
class AdaptedRunner:
    """A `Runner` whose sequences may have adapters."""

    runs_ahead = False

    def __init__(self, forward: AdaptedForward, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self._forward = forward
        self._device = shape.device
        self.pool = KVPool(shape, num_blocks, block_size)
        if shape.device.type == "cuda":
            say_once("This family has no fused pass: with adapters it decodes without CUDA graphs, which is slower.")

    def weights_changed(self) -> None:
        self._forward.refresh()

    def prefill(self, chunks: Seq[Chunk]) -> Read:
        """Compute parts of prompts; sample a first token for those that reach the end of their sequence."""
        computed = [chunk for chunk in chunks if chunk.source is None]
        copies = [(chunk.source, chunk.sequence) for chunk in chunks if chunk.source is not None]
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        own = [chunk.sequence for chunk in computed if chunk.reaches_the_end]
        with torch.inference_mode():
            logits_NV = self._step([(chunk.sequence, chunk.start, chunk.end) for chunk in computed], own)
            if copies:
                self.pool.copy_last_blocks(copies)
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
        flat = FlatTexts.of(texts)
        rows = [(text.adapter, len(text.tokens)) for text in texts]
        state = PackedSequences(flat.lengths, self._device)
        logits_NV = self._logits(flat.tokens, flat.positions, state, flat.where, rows)
        return scores_of(texts, lambda rows: logits_NV[rows].float() / texts[0].temperature)

    def keep(self, sequence: Sequence) -> None:
        """Nothing to do: every step writes to the pool itself."""

    def leave(self, sequence: Sequence) -> None:
        """Nothing to do: a sequence holds its blocks only."""

    def _step(self, new: list[tuple[Sequence, int, int]], wanted: list[Sequence]) -> Tensor:
        if not new:
            return torch.empty(0, 0)
        slots = [self.pool.slots(sequence.blocks, 0, end).numpy() for sequence, _, end in new]
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
        """On the device, except for requests with filters or penalties."""
        is_plain = all(sequence.is_plain for sequence in sequences)
        return sampled_from(logits_NV.float() if is_plain else logits_NV.float().cpu(), sequences)

    def _to_device(self, array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64), self._device)


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


class CUDABackend(PagedBackend):
    """The block cache, for models whose layers all attend through it."""

    @classmethod
    def is_for(cls, model: Any) -> bool:
        return device_type(model) == "cuda"

    def _use_blocks(self, model: Any, needs: EngineNeeds) -> str | None:
        if (reason := super()._use_blocks(model, needs)) is not None:
            return reason
        if has_sinks(model):
            return "the GPU's decoding kernel has no attention sinks"
        self._fuses_adapters = needs.has_adapters and _can_fuse(model)
        """Adapters in CUDA graphs; else a step at a time through the model's modules."""
        has_graphs = self._fuses_adapters or not needs.has_adapters
        self.max_rounds = 8 if has_graphs else 1
        return None

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        view.set_attn_implementation(ATTENTION_NAME)
        shape, blocks = self._shape, (settings.num_blocks, settings.block_size)
        routers = None if shape.experts is None else self._routers(view)
        if settings.adapters and not self._fuses_adapters:
            return AdaptedRunner(AdaptedForward(view, pack=False), shape, *blocks)
        from ludic_gpu.cuda.forward import fused_bytes  # imports triton, which needs a GPU machine
        from ludic_gpu.cuda.runner import CUDARunner

        pack = settings.pack_weights
        if pack is None:
            pack = fused_bytes(view) < free_memory(shape.device) // 4
        # The fused pass reads a table of rotary angles beyond the longest sequence, which some embeddings do not survive.
        is_plain_rope = rope_limit(view.config.get_text_config()) is None
        return CUDARunner(
            view, shape, *blocks, max_sequences=settings.max_sequences, max_length=settings.max_length,
            max_rounds=self.max_rounds, compile_layers=settings.compile_layers,
            fuse=settings.adapters or (pack and settings.compile_layers and is_plain_rope), routers=routers,
            adapters=settings.adapters,
        )  # fmt: skip


def _can_fuse(model: Any) -> bool:
    from ludic_gpu.cuda.forward import can_fuse  # imports triton, which needs a GPU machine

    return can_fuse(model) and rope_limit(model.config.get_text_config()) is None
