"""Runs the model on a GPU: packed prefill, and decoding as CUDA graphs.

A decoding round is one graph: forward pass with paged attention, sampling, and the preparation of the next round, all on the
device. So several rounds run without the host, which reads their tokens together. Graphs are captured per batch size
(rounded up to a bucket) at its first use.

The decoder layers are compiled for the capture, which fuses their many small kernels and halves the time of a round. The
compiled code exists only in the graphs: the module itself is unchanged, for the trainer and other callers.
"""

import contextlib
import threading
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.kv import KVPool, KVShape
from ludic.inference.local.runner import Scoring
from ludic.inference.local.sampling import sample
from ludic.inference.local.sequence import Chunk, Sampled, Sequence
from ludic.inference.local.triton_kernels import paged_decode, sample_rows
from ludic.models.attention import SKIP_MASK, AttentionRules, AttentionState
from ludic.models.execution import decoder_layers, raise_recompile_limits
from ludic.models.packed_attention import varlen_attention


class PackedState:
    """Attention of several prompts (or parts of them) in one flat batch: block-diagonal, causal."""

    def __init__(
        self, pool: KVPool | None, new_slots_T: Tensor | None, all_slots_L: Tensor | None, spans: Seq[tuple[int, int]]
    ) -> None:
        """`spans`: (new tokens, all tokens up to their end) of each sequence."""
        device = torch.device("cuda")
        self._pool, self._new_slots_T, self._all_slots_L = pool, new_slots_T, all_slots_L
        lengths_q, lengths_k = [q for q, _ in spans], [k for _, k in spans]
        self._cu_q = torch.tensor([0, *np.cumsum(lengths_q)], dtype=torch.int32, device=device)
        self._cu_k = torch.tensor([0, *np.cumsum(lengths_k)], dtype=torch.int32, device=device)
        self._max_q, self._max_k = max(lengths_q), max(lengths_k)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        if self._pool is not None and self._new_slots_T is not None:
            self._pool.keys[layer].index_copy_(0, self._new_slots_T, key_TKD)
            self._pool.values[layer].index_copy_(0, self._new_slots_T, value_TKD)
            if self._all_slots_L is not None:
                key_TKD = self._pool.keys[layer].index_select(0, self._all_slots_L)
                value_TKD = self._pool.values[layer].index_select(0, self._all_slots_L)
        return varlen_attention(query_THD, key_TKD, value_TKD, self._cu_q, self._cu_k, self._max_q, self._max_k, rules)


class PagedState:
    """Attention of one new token per row, through block tables."""

    def __init__(self, pool: KVPool, slots_R: Tensor, tables: Tensor, lengths_R: Tensor) -> None:
        self._pool, self._slots_R, self._tables, self._lengths_R = pool, slots_R, tables, lengths_R

    @torch.compiler.disable
    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys.index_copy_(0, self._slots_R, key_TKD)
        values.index_copy_(0, self._slots_R, value_TKD)
        return paged_decode(query_THD, keys, values, self._tables, self._lengths_R, self._pool.block_size, rules)


class CUDARunner:
    """Packed prefill, decoding by graph."""

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
        compile_layers: bool = True,
    ) -> None:
        self.model = model
        self._layers = _CompiledLayers(model) if compile_layers else None
        self.pool = KVPool(shape, num_blocks, block_size)
        self._mask = SKIP_MASK.cuda()
        self._buckets = sorted({*(b for b in _BUCKETS if b < max_sequences), max_sequences})
        self._rows: list[Sequence | None] = []
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # Rounds may run past the end of a sequence; there they write to the scratch block.
        self._num_extra = -(-max_rounds // block_size) + 1
        self._make_buffers(max_sequences, -(-max_length // block_size) + self._num_extra, max_rounds)

    def _make_buffers(self, max_rows: int, max_blocks: int, max_rounds: int) -> None:
        """Device buffers that graphs read and write, and host copies of what is uploaded."""
        new = lambda *shape, dtype: torch.zeros(*shape, dtype=dtype, device="cuda")  # noqa: E731
        self._tokens = new(max_rows, dtype=torch.long)
        self._positions = new(max_rows, dtype=torch.long)
        self._seeds = new(max_rows, dtype=torch.long)
        self._temperatures = new(max_rows, dtype=torch.float32)
        self._tables = new(max_rows, max_blocks, dtype=torch.int32)
        self._round = new(1, dtype=torch.long)
        self._out_tokens = new(max_rounds, max_rows, dtype=torch.long)
        self._out_logprobs = new(max_rounds, max_rows, dtype=torch.float32)
        scratch = self.pool.scratch_slot // self.pool.block_size
        self._host_tables = np.full((max_rows, max_blocks), scratch, dtype=np.int32)
        self._table_lengths = [0] * max_rows

    def weights_changed(self) -> None:
        """Nothing to do: graphs read the parameters in place."""

    # --- prompts ---

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> list[Sampled]:
        """Compute parts of prompts; sample a first token for those that reach the end of their sequence."""
        size = self.pool.block_size
        tokens = np.concatenate([c.sequence.tokens[c.start : c.end] for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.end) for c in chunks])
        slots = [_slots(c.sequence.blocks, c.start, c.end, size) for c in chunks]
        everything = None
        if any(chunk.start for chunk in chunks):
            everything = _to_gpu(np.concatenate([_slots(c.sequence.blocks, 0, c.end, size) for c in chunks]))
        spans = [(chunk.length, chunk.end) for chunk in chunks]
        state = PackedState(self.pool, _to_gpu(np.concatenate(slots)), everything, spans)
        ends = np.cumsum([chunk.length for chunk in chunks]) - 1
        ready = [i for i, chunk in enumerate(chunks) if chunk.reaches_the_end]
        logits_NV = self._forward(tokens, positions, state, ends[ready])
        return self._sample_logits(logits_NV, [chunks[i].sequence for i in ready])

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[np.ndarray[Any, Any]]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        lengths = [len(text.tokens) for text in texts]
        flat = np.concatenate([text.tokens for text in texts])
        positions = np.concatenate([np.arange(length) for length in lengths])
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        where = np.concatenate([text.predictors(start) for text, start in zip(texts, starts, strict=True)])
        state = PackedState(None, None, None, [(length, length) for length in lengths])
        scores = []
        logits_NV = self._forward(flat, positions, state, where)
        targets = _to_gpu(flat[where + 1].astype(np.int64))
        for piece, target in zip(logits_NV.split(1024), targets.split(1024), strict=True):
            scaled = piece.float() / texts[0].temperature
            scores.append(scaled.gather(-1, target[:, None])[:, 0] - scaled.logsumexp(dim=-1))
        return list(np.split(torch.cat(scores).cpu().numpy(), np.cumsum([text.num_scored for text in texts])[:-1]))

    def _sample_logits(self, logits_NV: Tensor, sequences: list[Sequence]) -> list[Sampled]:
        if not sequences:
            return []
        seeds = _to_gpu(np.array([s.seed for s in sequences], dtype=np.int64))
        lengths = _to_gpu(np.array([len(s.tokens) for s in sequences], dtype=np.int64))
        temperatures = _to_gpu(np.array([s.sampling.temperature for s in sequences], dtype=np.float32))
        drawn, logps = sample_rows(logits_NV, seeds, lengths, temperatures)
        sampled = [(s, [t], [p]) for s, t, p in zip(sequences, drawn.tolist(), logps.tolist(), strict=True)]
        return _with_filters(logits_NV, sampled)

    def _forward(
        self, tokens: np.ndarray[Any, Any], positions: np.ndarray[Any, Any], state: AttentionState, where: Any
    ) -> Tensor:
        out = self.model(
            input_ids=_to_gpu(tokens.astype(np.int64))[None],
            position_ids=_to_gpu(positions.astype(np.int64))[None],
            attention_mask=self._mask,
            use_cache=False,
            logits_to_keep=_to_gpu(np.asarray(where, dtype=np.int64)) if len(where) else 1,
            ludic_state=state,
        )
        logits: Tensor = out.logits[0, : len(where)]
        return logits

    # --- decoding ---

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> list[Sampled]:
        """`num_rounds` tokens for every sequence."""
        self._assign_rows(sequences)
        owners = [owner for owner in self._rows if owner is not None]
        bucket = next(b for b in self._buckets if b >= len(owners))
        self._upload(owners, bucket)
        graph, logits = self._graph(bucket)
        for _ in range(num_rounds):
            graph.replay()
        count = len(owners)
        tokens = self._out_tokens[:num_rounds, :count].t().tolist()
        logprobs = self._out_logprobs[:num_rounds, :count].t().tolist()
        sampled = list(zip(owners, tokens, logprobs, strict=True))
        return _with_filters(logits[:count], sampled) if num_rounds == 1 else sampled

    def keep(self, sequence: Sequence) -> None:
        """Nothing to do: rounds write to the pool itself."""

    def leave(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._rows[sequence.row] = None
            sequence.row = -1

    def _assign_rows(self, sequences: Seq[Sequence]) -> None:
        """Give every sequence a row, without gaps from row 0."""
        free = [i for i, owner in enumerate(self._rows) if owner is None]
        for sequence in sequences:
            if sequence.row < 0:
                row = free.pop() if free else len(self._rows)
                if row == len(self._rows):
                    self._rows.append(None)
                self._rows[row] = sequence
                sequence.row = row
                self._table_lengths[row] = 0
        while self._rows and self._rows[-1] is None:
            self._rows.pop()
        for gap in sorted(i for i in free if i < len(self._rows)):
            if gap >= len(self._rows):
                break
            last = self._rows.pop()
            assert last is not None, "empty rows at the end were dropped"
            self._rows[gap] = last
            last.row = gap
            self._table_lengths[gap] = 0
            while self._rows and self._rows[-1] is None:
                self._rows.pop()

    def _upload(self, owners: list[Sequence], bucket: int) -> None:
        count = len(owners)
        for row, owner in enumerate(owners):
            known, blocks = self._table_lengths[row], owner.blocks
            if known == 0:
                self._host_tables[row] = self.pool.scratch_slot // self.pool.block_size
            if known != len(blocks):
                self._host_tables[row, known : len(blocks)] = blocks[known:]
                self._table_lengths[row] = len(blocks)
        width = max(self._table_lengths[:count]) + self._num_extra
        self._tables[:count, :width].copy_(torch.from_numpy(self._host_tables[:count, :width]))
        if bucket > count:
            self._tables[count:bucket].fill_(self.pool.scratch_slot // self.pool.block_size)
        state = np.zeros((3, bucket), dtype=np.int64)
        state[0, :count] = [owner.tokens[-1] for owner in owners]
        state[1, :count] = [len(owner.tokens) - 1 for owner in owners]
        state[2, :count] = [owner.seed for owner in owners]
        uploaded = _to_gpu(state)
        self._tokens[:bucket], self._positions[:bucket], self._seeds[:bucket] = uploaded[0], uploaded[1], uploaded[2]
        temperatures = np.zeros(bucket, dtype=np.float32)
        temperatures[:count] = [owner.sampling.temperature for owner in owners]
        self._temperatures[:bucket] = _to_gpu(temperatures)
        self._round.zero_()

    def _graph(self, bucket: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        if bucket not in self._graphs:
            with _CAPTURING, self._layers if self._layers is not None else contextlib.nullcontext():
                self._graphs[bucket] = self._capture(bucket)
        return self._graphs[bucket]

    def _capture(self, bucket: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        changed = (self._tokens, self._positions, self._round)
        saved = [buffer.clone() for buffer in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # compile kernels and allocate buffers before the capture
                self._one_round(bucket)
                self._round.zero_()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        memory_pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        # thread_local: the trainer allocates in another thread meanwhile, which would invalidate a capture in the default mode.
        with torch.cuda.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
            logits = self._one_round(bucket)
        for buffer, value in zip(changed, saved, strict=True):
            buffer.copy_(value)
        return graph, logits

    def _one_round(self, bucket: int) -> Tensor:
        tokens, positions = self._tokens[:bucket], self._positions[:bucket]
        tables, size = self._tables[:bucket], self.pool.block_size
        slots = tables.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size
        lengths = positions + 1
        state = PagedState(self.pool, slots, tables, lengths.int())
        logits: Tensor = self.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            attention_mask=self._mask,
            use_cache=False,
            ludic_state=state,
        ).logits[0]
        drawn, logprobs = sample_rows(logits, self._seeds[:bucket], lengths, self._temperatures[:bucket])
        self._out_tokens[:, :bucket].index_copy_(0, self._round, drawn[None])
        self._out_logprobs[:, :bucket].index_copy_(0, self._round, logprobs[None])
        tokens.copy_(drawn)
        positions.add_(1)
        self._round.add_(1)
        return logits


_CAPTURING = threading.Lock()
"""A live engine and its snapshot may capture at once; a device synchronisation by one would invalidate the other's capture."""
_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


class _CompiledLayers:
    """Context manager: the model's decoder layers run compiled inside it."""

    def __init__(self, model: Any) -> None:
        self._layers = decoder_layers(model)
        self._calls = [torch.compile(layer._call_impl) for layer in self._layers]
        self._before: list[Any] = []

    def __enter__(self) -> None:
        raise_recompile_limits(len(self._layers))
        self._before = [layer._compiled_call_impl for layer in self._layers]
        for layer, call in zip(self._layers, self._calls, strict=True):
            layer._compiled_call_impl = call

    def __exit__(self, *exc: object) -> None:
        for layer, before in zip(self._layers, self._before, strict=True):
            layer._compiled_call_impl = before


def _with_filters(logits_NV: Tensor, sampled: list[Sampled]) -> list[Sampled]:
    """Sample rows with filters or penalties again on the host; the others keep their tokens."""
    rows = [row for row, (sequence, _, _) in enumerate(sampled) if not sequence.is_plain]
    if rows:
        sequences = [sampled[row][0] for row in rows]
        tokens, logprobs = sample(logits_NV[rows].cpu(), sequences)
        for row, sequence, token, logprob in zip(rows, sequences, tokens, logprobs, strict=True):
            sampled[row] = (sequence, [token], [logprob])
    return sampled


def _slots(blocks: list[int], start: int, end: int, size: int) -> np.ndarray[Any, Any]:
    first = start // size
    table = np.array(blocks[first : -(-end // size)], dtype=np.int64)
    flat = (table[:, None] * size + np.arange(size)).reshape(-1)
    return flat[start - first * size : end - first * size]


def _to_gpu(array: np.ndarray[Any, Any]) -> Tensor:
    return torch.from_numpy(array).cuda(non_blocking=True)
