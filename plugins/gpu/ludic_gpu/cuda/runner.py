"""Runs the model on a GPU: packed prefill, and decoding as CUDA graphs.

A decoding round is one graph: forward pass with paged attention, sampling, and the preparation of the next round, all on the
device. So several rounds run without the host, and the next step can be launched before the host has read their tokens: the
state of every row stays on the device. Graphs are captured per batch size (rounded up to a bucket) at its first use.

Models of the Llama family run through `forward`. The decoder layers of others are compiled for the capture, which fuses
their many small kernels; the compiled code exists only in the graphs, and the module itself is unchanged.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.blocks import GROUP_ROWS, MIN_GROUP, num_splits, shared_prefixes
from ludic.inference.local.kv import KVPool, KVShape
from ludic.inference.local.runner import Read
from ludic.inference.local.sampling import FlatTexts, PromptScores, Scoring, sample, scores_of
from ludic.inference.local.sequence import Chunk, Sampled, Sequence
from ludic.models.adapters.forward import AdapterRows
from ludic.models.attention import SKIP_MASK, AttentionRules, AttentionState
from ludic.models.execution import CAPTURING, decoder_layers, raise_recompile_limits
from ludic.models.packed_attention import varlen_attention
from ludic.types import ConfigError
from ludic_gpu.cuda.adapter_slots import NO_SLOT
from ludic_gpu.cuda.decode_attention import DecodeAttention, SharedPrefixes
from ludic_gpu.cuda.forward import RowSlots, can_fuse, fused_forward
from ludic_gpu.cuda.kernels import DecodeRows, sample_round, sample_rows
from ludic_gpu.experts import Routers

logger = logging.getLogger(__name__)


class _PackedState:
    """Attention of several prompts (or parts of them) in one flat batch: block-diagonal, causal."""

    def __init__(
        self, pool: KVPool | None, new_slots_T: Tensor | None, all_slots_L: Tensor | None, spans: Seq[tuple[int, int]]
    ) -> None:
        """`spans`: (new tokens, all tokens up to their end) of each sequence."""
        self._pool, self._new_slots_T, self._all_slots_L = pool, new_slots_T, all_slots_L
        lengths_q, lengths_k = [q for q, _ in spans], [k for _, k in spans]
        self._cu_q = _to_gpu(np.array([0, *np.cumsum(lengths_q)], dtype=np.int32))
        self._cu_k = _to_gpu(np.array([0, *np.cumsum(lengths_k)], dtype=np.int32))
        self._max_q, self._max_k = max(lengths_q), max(lengths_k)

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        if self._pool is not None and self._new_slots_T is not None:
            self._pool.keys[layer].index_copy_(0, self._new_slots_T, key_TKD)
            self._pool.values[layer].index_copy_(0, self._new_slots_T, value_TKD)
        return self.attend_stored(layer, query_THD, key_TKD, value_TKD, rules)

    def attend_stored(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        """`attend` for keys and values that are in the pool already."""
        if self._pool is not None and self._all_slots_L is not None:
            key_TKD = self._pool.keys[layer].index_select(0, self._all_slots_L)
            value_TKD = self._pool.values[layer].index_select(0, self._all_slots_L)
        return varlen_attention(query_THD, key_TKD, value_TKD, self._cu_q, self._cu_k, self._max_q, self._max_k, rules)


class _PagedState:
    """Attention of one new token per row, through block tables."""

    def __init__(self, pool: KVPool, slots_R: Tensor, attention: DecodeAttention) -> None:
        self._pool, self._slots_R, self._attention = pool, slots_R, attention

    @torch.compiler.disable
    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        self._pool.keys[layer].index_copy_(0, self._slots_R, key_TKD)
        self._pool.values[layer].index_copy_(0, self._slots_R, value_TKD)
        return self.attend_stored(layer, query_THD, key_TKD, value_TKD, rules)

    def attend_stored(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        """`attend` for keys and values that are in the pool already."""
        return self._attention(query_THD, self._pool.keys[layer], self._pool.values[layer], rules)


class Kernels(NamedTuple):
    """The choices that a graph is captured for."""

    num_rows: int
    splits: int
    """Parts into which attention cuts every row."""
    has_groups: bool
    """True if rows attend to a shared prefix together."""
    num_slots: int
    """Slots of adapters that the round computes; 0 if no row has an adapter."""


class CUDARunner:
    """Packed prefill, decoding by graph."""

    runs_ahead = True

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
        fuse: bool = True,
        routers: Routers | None = None,
        adapters: bool = False,
    ) -> None:
        """`routers` of a mixture whose experts are recorded. `adapters`: sequences may have some; the model can be fused."""
        self.model = model
        self._routers = routers
        # Rounds may run past the end of a sequence; there they write to the scratch block.
        self._num_extra = -(-max_rounds // block_size) + 1
        max_blocks = -(-max_length // block_size) + self._num_extra
        length = max_blocks * block_size
        self._fused = fused_forward(model, length, has_slots=adapters) if fuse and can_fuse(model) else None
        if adapters and self._fused is None:
            raise ConfigError(
                f"adapters=True cannot be used on a GPU with {type(model).__name__}, which computes in its own way."
            )
        self._layers = _CompiledLayers(model) if compile_layers and self._fused is None else None
        self.pool = KVPool(shape, num_blocks, block_size)
        self._mask = SKIP_MASK.cuda()
        sizes = _COMPILED_BUCKETS if self._layers is not None else _BUCKETS
        self._buckets = sorted({*(b for b in sizes if b < max_sequences), max_sequences})
        self._owners: list[Sequence | None] = []
        """The sequence of each row."""
        self._graphs: dict[Kernels, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._is_capturable = True
        new = lambda *shape, dtype=torch.long: torch.zeros(*shape, dtype=dtype, device="cuda")  # noqa: E731
        rows = max_sequences
        self._rows = DecodeRows(
            tokens=new(rows), positions=new(rows), lengths=new(rows, dtype=torch.int32), num_shared=new(rows, dtype=torch.int32),
            slots=new(rows), seeds=new(rows), temperatures=new(rows, dtype=torch.float32),
            tables=new(rows, max_blocks, dtype=torch.int32), rounds=new(rows), out_tokens=new(max_rounds, rows),
            out_logprobs=new(max_rounds, rows, dtype=torch.float32),
        )  # fmt: skip
        self._scratch = self.pool.scratch_slot // block_size
        self._host_tables = np.full((rows, max_blocks), self._scratch, dtype=np.int32)
        self._table_lengths = [0] * rows
        self._can_group = self._fused is not None and not self._fused.has_windows and shape.dtype.itemsize == 2
        self._num_processors = torch.cuda.get_device_properties(shape.device).multi_processor_count
        self._groups = SharedPrefixes(
            new(_max_groups(rows), GROUP_ROWS, dtype=torch.int32), new(_max_groups(rows), dtype=torch.int32)
        )
        self._host_num_shared = np.zeros(rows, dtype=np.int32)
        self._row_slots = new(rows, dtype=torch.int32)
        """The slot of each row's adapter."""
        self._generation = 0
        """The generation of the slots that the graphs read."""
        self._grouped: list[Sequence] = []
        """The rows for which `_groups` was filled."""
        self._has_groups = False

    def weights_changed(self) -> None:
        """Graphs read the parameters in place; only joined copies are renewed."""
        if self._fused is not None:
            self._fused.refresh()

    # --- prompts ---

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> Read:
        """Compute parts of prompts; sample a first token for those that reach the end of their sequence, and give them rows."""
        size = self.pool.block_size
        own = [chunk for chunk in chunks if chunk.source is None]
        tokens = np.concatenate([c.sequence.tokens[c.start : c.end] for c in own])
        positions = np.concatenate([np.arange(c.start, c.end) for c in own])
        slots_T = _to_gpu(np.concatenate([_slots(c.sequence.blocks, c.start, c.end, size) for c in own]))
        everything = None
        if any(chunk.start for chunk in own):
            everything = _to_gpu(np.concatenate([_slots(c.sequence.blocks, 0, c.end, size) for c in own]))
        state = _PackedState(self.pool, slots_T, everything, [(chunk.length, chunk.end) for chunk in own])
        ends = np.cumsum([chunk.length for chunk in own]) - 1
        ready = [i for i, chunk in enumerate(own) if chunk.reaches_the_end]
        adapted = self._row_adapters([(chunk.sequence.adapter, chunk.length) for chunk in own])
        logits_NV = self._forward(tokens, positions, state, ends[ready], slots_T, adapted)
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        if len(ended) > len(ready):
            logits_of = {own[i].sequence.number: number for number, i in enumerate(ready)}
            self.pool.copy_last_blocks((chunk.source, chunk.sequence) for chunk in ended if chunk.source is not None)
            where = np.array([logits_of[(chunk.source or chunk.sequence).number] for chunk in ended])
            logits_NV = logits_NV.index_select(0, _to_gpu(where))
        return self._sample_first(logits_NV, [chunk.sequence for chunk in ended])

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature; stores nothing."""
        flat = FlatTexts.of(texts)
        state = _PackedState(None, None, None, [(length, length) for length in flat.lengths])
        adapted = self._row_adapters([(text.adapter, len(text.tokens)) for text in texts])
        logits_NV = self._forward(flat.tokens, flat.positions, state, flat.where, None, adapted)
        return scores_of(texts, lambda rows: logits_NV[rows].float() / texts[0].temperature)

    def _sample_first(self, logits_NV: Tensor, sequences: list[Sequence]) -> Read:
        if not sequences:
            return list
        numbers = np.array(
            [[s.seed, len(s.tokens), row] for s, row in zip(sequences, self._free_rows(sequences), strict=True)]
        )
        seeds, lengths, rows = _to_gpu(np.ascontiguousarray(numbers.T))
        temperatures = _to_gpu(np.array([s.sampling.temperature for s in sequences], dtype=np.float32))
        drawn, logps = sample_rows(logits_NV, seeds, lengths, temperatures)
        state = self._rows
        for buffer, values in (
            (state.tokens, drawn), (state.positions, lengths), (state.seeds, seeds), (state.temperatures, temperatures)
        ):  # fmt: skip
            buffer.index_copy_(0, rows, values)
        return self._reading(sequences, drawn[None], logps[None], logits_NV)

    def _free_rows(self, sequences: list[Sequence]) -> list[int]:
        """Give each of these sequences a row."""
        free = [i for i, owner in enumerate(self._owners) if owner is None]
        missing = max(0, len(sequences) - len(free))
        free += range(len(self._owners), len(self._owners) + missing)
        self._owners += [None] * missing
        for row, sequence in zip(free, sequences, strict=False):
            self._owners[row], sequence.row, self._table_lengths[row] = sequence, row, 0
        self._grouped = []  # a sequence that starts again has other blocks
        return free[: len(sequences)]

    def _forward(
        self,
        tokens: np.ndarray[Any, Any],
        positions: np.ndarray[Any, Any],
        state: _PackedState,
        where: Any,
        slots_T: Tensor | None,
        adapted: RowSlots | None,
    ) -> Tensor:
        """Logits [N, V] at the flat positions `where`; new keys and values go to `slots_T`."""
        ids_T, positions_T = _to_gpu(tokens.astype(np.int64)), _to_gpu(positions.astype(np.int64))
        where_N = _to_gpu(np.asarray(where, dtype=np.int64))
        if self._fused is not None:
            hidden_TD = self._fused.hidden(ids_T, positions_T, state.attend_stored, self._store(slots_T), adapted)
            if not len(where):
                return hidden_TD[:0]
            last = None if adapted is None else adapted.select(where_N)
            return self._fused.logits(hidden_TD.index_select(0, where_N), last)
        with self._recording(slots_T):
            out = self.model(
                input_ids=ids_T[None],
                position_ids=positions_T[None],
                attention_mask=self._mask,
                use_cache=False,
                logits_to_keep=where_N if len(where) else 1,
                ludic_state=self._layer_state(state),
            )
        logits: Tensor = out.logits[0, : len(where)]
        return logits

    def _layer_state(self, attention: AttentionState) -> AttentionState:
        """The state that the model's own layers use in a pass."""
        return attention

    def _row_adapters(self, rows: AdapterRows) -> RowSlots | None:
        """Put the adapters of the next pass into slots; None if its rows have none."""
        if self._fused is None or all(adapter is None for adapter, _ in rows):
            return None
        slots = self._fused.slots
        slots.place(adapter for adapter, _ in rows)
        own = slots.of(adapter for adapter, _ in rows)
        return RowSlots(_to_gpu(np.repeat(own, [count for _, count in rows])), slots.num_used(own))

    @contextlib.contextmanager
    def _recording(self, slots_T: Tensor | None) -> Iterator[None]:
        """The experts of the tokens of a forward pass inside go to these slots, also in a graph."""
        if self._routers is None or slots_T is None:
            yield
            return
        with self._routers.watched() as routed:
            yield
        assert self.pool.experts is not None, "made for a shape with experts"
        self.pool.experts.index_copy_(0, slots_T, routed.experts_TLK())

    def experts(self, sequence: Sequence) -> np.ndarray[Any, Any] | None:
        """The experts of all its tokens but the last, which has not been computed."""
        return self.pool.experts_of(sequence.blocks, len(sequence.tokens) - 1)

    def _store(self, slots: Tensor | None) -> Callable[[int], tuple[Tensor, Tensor, Tensor]] | None:
        if slots is None:
            return None
        return lambda layer: (self.pool.keys[layer], self.pool.values[layer], slots)

    # --- decoding ---

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> Read:
        """`num_rounds` tokens for every sequence."""
        self._arrange(sequences)
        owners = [owner for owner in self._owners if owner is not None]
        count, rows, size = len(owners), self._rows, self.pool.block_size
        bucket = self._bucket(count)
        self._upload_tables(owners)
        rows.tables[count:bucket].fill_(self._scratch)
        rows.positions[count:bucket].zero_()
        rows.rounds[:bucket].zero_()
        positions = rows.positions[:bucket]
        rows.lengths[:bucket] = positions + 1
        rows.slots[:bucket] = (
            rows.tables[:bucket].gather(1, (positions // size)[:, None])[:, 0] * size + positions % size
        )
        num_slots = self._upload_slots(owners, bucket)
        one_round = self._round(self._choose_kernels(owners, bucket, num_slots))
        for _ in range(num_rounds):
            logits = one_round()
        return self._reading(
            owners, rows.out_tokens[:num_rounds, :count], rows.out_logprobs[:num_rounds, :count], logits[:count]
        )

    def _bucket(self, count: int) -> int:
        """The number of rows that a round computes for `count` sequences."""
        return next(size for size in self._buckets if size >= count)

    def keep(self, sequence: Sequence) -> None:
        """Nothing to do: rounds write to the pool itself."""

    def leave(self, sequence: Sequence) -> None:
        if sequence.row >= 0:
            self._owners[sequence.row] = None
            sequence.row = -1

    def _arrange(self, sequences: Seq[Sequence]) -> None:
        """Move rows on the device so that these sequences have the first ones; the others lose theirs."""
        count = len(sequences)
        owners: list[Sequence | None] = [None] * count
        movers = [sequence for sequence in sequences if sequence.row >= count]
        for sequence in sequences:
            if sequence.row < count:
                owners[sequence.row] = sequence
        sources = [sequence.row for sequence in movers]
        for sequence in filter(None, self._owners):
            if sequence.row >= count or owners[sequence.row] is not sequence:
                sequence.row = -1
        if movers:
            gaps = [row for row, owner in enumerate(owners) if owner is None]
            for row, sequence in zip(gaps, movers, strict=True):
                owners[row], sequence.row, self._table_lengths[row] = sequence, row, 0
            target, source = _to_gpu(np.array([gaps, sources]))
            rows = self._rows
            for buffer in (rows.tokens, rows.positions, rows.seeds, rows.temperatures):
                buffer.index_copy_(0, target, buffer.index_select(0, source))
        self._owners = owners

    def _upload_tables(self, owners: list[Sequence]) -> None:
        for row, owner in enumerate(owners):
            known, blocks = self._table_lengths[row], owner.blocks
            if known == 0:
                self._host_tables[row] = self._scratch
            if known != len(blocks):
                self._host_tables[row, known : len(blocks)] = blocks[known:]
                self._table_lengths[row] = len(blocks)
        count = len(owners)
        width = max(self._table_lengths[:count]) + self._num_extra
        self._rows.tables[:count, :width] = _to_gpu(self._host_tables[:count, :width])

    def _upload_slots(self, owners: list[Sequence], bucket: int) -> int:
        """The number of slots that the rounds compute."""
        adapted = self._row_adapters([(owner.adapter, 1) for owner in owners])
        if adapted is None or self._fused is None:
            return 0
        self._row_slots[: len(owners)] = adapted.slots_T
        self._row_slots[len(owners) : bucket].fill_(NO_SLOT)
        if self._generation != self._fused.slots.generation:
            self._generation, self._graphs = self._fused.slots.generation, {}
        return adapted.num_slots

    def _choose_kernels(self, owners: list[Sequence], bucket: int, num_slots: int) -> Kernels:
        """The way in which this step's rounds read keys."""
        if self._can_group and owners != self._grouped:
            self._upload_groups(owners, bucket)
        lengths = np.array([owner.length for owner in owners]) - self._host_num_shared[: len(owners)]
        num_heads = max(kv_heads for kv_heads, _ in self.pool.shape.heads)  # recurrent layers have none
        splits = num_splits(bucket * num_heads, self._num_processors, float(lengths.mean()))
        return Kernels(bucket, splits, self._has_groups, num_slots)

    def _upload_groups(self, owners: list[Sequence], bucket: int) -> None:
        """Find rows that share blocks; fill the groups if reading these once saves enough."""
        groups = shared_prefixes([owner.blocks for owner in owners])
        size, had_groups = self.pool.block_size, self._has_groups
        saved = sum((len(rows) - 1) * num_blocks for rows, num_blocks in groups) * size
        self._grouped, self._has_groups = owners, saved >= _MIN_SAVED * sum(owner.length for owner in owners)
        if not self._has_groups and not had_groups:
            return
        rows_CM = np.full((_max_groups(bucket), GROUP_ROWS), -1, dtype=np.int32)
        lengths_C = np.zeros(len(rows_CM), dtype=np.int32)
        self._host_num_shared[:] = 0
        for number, (rows, num_blocks) in enumerate(groups if self._has_groups else []):
            rows_CM[number, : len(rows)] = rows
            lengths_C[number] = self._host_num_shared[rows] = num_blocks * size
        self._groups.rows_CM[: len(rows_CM)] = _to_gpu(rows_CM)
        self._groups.lengths_C[: len(lengths_C)] = _to_gpu(lengths_C)
        self._rows.num_shared.copy_(_to_gpu(self._host_num_shared))

    def _reading(self, sequences: list[Sequence], tokens_RN: Tensor, logprobs_RN: Tensor, logits_NV: Tensor) -> Read:
        """Start the copy of sampled tokens to the host; the result waits for it."""
        tokens_NR, logprobs_NR = (x.t().contiguous().to("cpu", non_blocking=True) for x in (tokens_RN, logprobs_RN))
        copied = torch.cuda.Event()
        copied.record()

        def read() -> list[Sampled]:
            copied.synchronize()
            sampled = list(zip(sequences, tokens_NR.tolist(), logprobs_NR.tolist(), strict=True))
            return sampled if all(s.is_plain for s in sequences) else self._with_filters(logits_NV, sampled)

        return read

    @torch.inference_mode()
    def _with_filters(self, logits_NV: Tensor, sampled: list[Sampled]) -> list[Sampled]:
        """Sample rows with filters or penalties again on the host; the others keep their tokens."""
        places = [i for i, (sequence, _, _) in enumerate(sampled) if not sequence.is_plain]
        sequences = [sampled[i][0] for i in places]
        tokens, logprobs = sample(logits_NV[places].cpu(), sequences)
        for i, sequence, token, logprob in zip(places, sequences, tokens, logprobs, strict=True):
            sampled[i] = (sequence, [token], [logprob])
        own = _to_gpu(np.array([[sequence.row for sequence in sequences], tokens]))
        self._rows.tokens.index_copy_(0, own[0], own[1])
        return sampled

    # --- graphs ---

    def _round(self, kernels: Kernels) -> Callable[[], Tensor]:
        """Decodes a token for every row and returns its logits: from a graph, or launched kernel by kernel where a model's code
        cannot be captured, as that of experts in fp32."""
        with CAPTURING, self._layers if self._layers is not None else contextlib.nullcontext():
            if self._is_capturable and kernels not in self._graphs:
                try:
                    self._graphs[kernels] = self._capture(kernels)
                except RuntimeError as error:
                    if self._fused is not None or isinstance(error, torch.OutOfMemoryError):
                        raise
                    self._is_capturable = False
                    reason = str(error).partition("\n")[0]
                    logger.warning("Decoding runs without CUDA graphs, which is slower for small batches: %s", reason)
        if not self._is_capturable:
            return partial(self._launched_round, kernels)
        graph, logits = self._graphs[kernels]

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay

    def _launched_round(self, kernels: Kernels) -> Tensor:
        with CAPTURING, self._layers if self._layers is not None else contextlib.nullcontext():
            return self._one_round(kernels)

    def _capture(self, kernels: Kernels) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        rows = self._rows
        changed = (rows.tokens, rows.positions, rows.lengths, rows.slots, rows.rounds)
        saved = [buffer.clone() for buffer in changed]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                for _ in range(
                    2 if self._layers is not None else 1
                ):  # compile kernels and allocate buffers before the capture
                    self._one_round(kernels)
                    rows.rounds.zero_()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            memory_pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
            # thread_local: the trainer allocates in another thread meanwhile, which would invalidate a capture in the default mode.
            with torch.cuda.graph(graph, pool=memory_pool, capture_error_mode="thread_local"):
                logits = self._one_round(kernels)
        finally:
            for buffer, value in zip(changed, saved, strict=True):
                buffer.copy_(value)
        return graph, logits

    def _one_round(self, kernels: Kernels) -> Tensor:
        rows, bucket, groups = self._rows, kernels.num_rows, None
        tokens, positions, slots = rows.tokens[:bucket], rows.positions[:bucket], rows.slots[:bucket]
        if kernels.has_groups:
            count = _max_groups(bucket)
            groups = SharedPrefixes(self._groups.rows_CM[:count], self._groups.lengths_C[:count])
        attention = DecodeAttention(
            rows.tables[:bucket],
            rows.lengths[:bucket],
            rows.num_shared[:bucket],
            self.pool.block_size,
            kernels.splits,
            groups,
        )
        state = _PagedState(self.pool, slots, attention)
        if self._fused is not None:
            adapted = RowSlots(self._row_slots[:bucket], kernels.num_slots) if kernels.num_slots else None
            hidden = self._fused.hidden(tokens, positions, state.attend_stored, self._store(slots), adapted)
            logits = self._fused.logits(hidden, adapted)
        else:
            with self._recording(slots):
                logits = self.model(
                    input_ids=tokens[None],
                    position_ids=positions[None],
                    attention_mask=self._mask,
                    use_cache=False,
                    ludic_state=self._layer_state(state),
                ).logits[0]
        sample_round(logits, rows, self.pool.block_size)
        return logits


_MIN_SAVED = 0.2
"""Share of all reads of keys that groups must save for a round to use them."""
_COMPILED_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Batch sizes if each is compiled, which takes seconds."""
_BUCKETS = (1, 2, 4, *range(8, 64, 8), *range(64, 256, 32), *range(256, 1024, 64), *range(1024, 4097, 256))


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


def _max_groups(num_rows: int) -> int:
    return max(1, num_rows // MIN_GROUP)


def _slots(blocks: list[int], start: int, end: int, size: int) -> np.ndarray[Any, Any]:
    first = start // size
    table = np.array(blocks[first : -(-end // size)], dtype=np.int64)
    flat = (table[:, None] * size + np.arange(size)).reshape(-1)
    return flat[start - first * size : end - first * size]


def _to_gpu(array: np.ndarray[Any, Any]) -> Tensor:
    """A copy on the device. From pageable memory it would wait for everything launched before."""
    return torch.from_numpy(array).pin_memory().cuda(non_blocking=True)
