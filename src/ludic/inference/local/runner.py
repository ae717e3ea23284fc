"""Runs the model for the scheduler on a CPU: flat batches in, logits of the requested tokens out. `choose_backend` decides what
runs a model: this runner, that of a GPU, that of hybrids (`recurrent`), or transformers' own cache (`cached`).

Batches are padded to a minimum number of tokens, and keys to a multiple (`kv.padded_length`), because products with very few
rows and sums with a remainder take another path through the math library and round differently. With this padding a request
gets the same logits, bit for bit, alone and in any batch, if the library's other choices depend on neither (measured on
aarch64). Otherwise logits differ by rounding, and `sampling` still draws the same tokens except for near ties.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.kv import KVPool, KVShape, PrefillState, Span, free_memory, padded_length, rope_limit
from ludic.inference.local.rows import DecodeState, DenseRows, Prefix, SharedPrefixes, num_shared
from ludic.inference.local.sampling import PromptScores, Scoring, sample, scores_of
from ludic.inference.local.sequence import Chunk, Sampled, Sequence, tokens_as_bytes
from ludic.models.adapters.forward import AdaptedForward, AdapterRows
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import AttentionState, NotRoutable, has_sinks, route_attention, say_once
from ludic.models.experts import Routers
from ludic.models.forward import Forward, make_forward, packed_bytes
from ludic.models.head import plain_model
from ludic.models.recurrent.layers import recurrent_layers
from ludic.models.vision.inputs import is_vision_model
from ludic.models.weights import shared_view
from ludic.types import ConfigError

Read = Callable[[], list[Sampled]]
"""Waits for a launched computation and returns its tokens."""


class Runner(Protocol):
    """The engine's interface to a device."""

    runs_ahead: bool
    """Whether a step can be launched before the tokens of the one before are read."""

    def prefill(self, chunks: Seq[Chunk]) -> Read: ...

    def decode(self, sequences: Seq[Sequence], num_rounds: int) -> Read: ...

    def score(self, texts: Seq[Scoring]) -> list[PromptScores]: ...

    def keep(self, sequence: Sequence) -> None: ...

    def leave(self, sequence: Sequence) -> None: ...

    def weights_changed(self) -> None: ...


@runtime_checkable
class RecordsExperts(Protocol):
    """A runner that knows to which experts a mixture has sent the tokens of a sequence."""

    def experts(self, sequence: Sequence) -> np.ndarray[Any, Any] | None:
        """Of all its tokens but the last, which has not been computed."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    """What the engine asks of a runner."""

    num_blocks: int
    block_size: int
    max_sequences: int
    max_length: int
    compile_layers: bool = True
    pack_weights: bool | None = None
    adapters: bool = False
    """Whether sequences may have adapters."""


class Backend(Protocol):
    """A way to run one model, known before the first request."""

    @property
    def max_length(self) -> int:
        """Tokens of one sequence."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's state."""
        ...

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can continue from the blocks of another."""
        ...

    @property
    def max_rounds(self) -> int:
        """Decoding rounds per step."""
        ...

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        """A runner over `view`, a module tree for it alone."""
        ...


def choose_backend(
    model: Any,
    max_length: int | None,
    *,
    is_bitwise: bool = False,
    images: Any = None,
    records_experts: bool = False,
    has_adapters: bool = False,
) -> Backend:
    """The block cache where every layer's attention can be routed through it; else transformers' own cache, said by a warning.

    `images`: the image processor of a vision-language model."""
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a transformers model: it has no config.")
    text_config = model.config.get_text_config()
    limit = rope_limit(text_config)
    length = max_length or limit or getattr(text_config, "max_position_embeddings", None) or _USUAL_LENGTH
    try:
        if limit is not None and length > limit:
            raise NotRoutable(
                f"its rotary embedding changes when a sequence is longer than {limit} tokens, and max_model_len={length}"
            )
        if is_vision_model(plain_model(model)):
            raise NotRoutable("its prompts hold embeddings of pictures")
        if (records_experts or has_adapters) and recurrent_layers(model):
            raise NotRoutable("it has recurrent layers")
        if recurrent_layers(model):
            from ludic.inference.local.recurrent import HybridBackend  # that module imports this one

            return HybridBackend(model, length)
        return PagedBackend(
            model, length, is_bitwise=is_bitwise, records_experts=records_experts, has_adapters=has_adapters
        )
    except NotRoutable as error:
        for option, is_on in (("record_experts", records_experts), ("adapters", has_adapters)):
            if is_on:
                raise ConfigError(
                    f"{option}=True needs the engine's block cache alone, which cannot run {type(model).__name__}: "
                    f"{error.reason}. Leave {option} out."
                ) from error
        from ludic.inference.local.cached import CachedBackend

        found = CachedBackend(shared_view(model), length, recompute=limit is not None and length > limit, images=images)
        say_once(
            f"{type(model).__name__} runs {found.how}, which is slower than the engine's block cache: {error.reason}. "
            "vLLM is the fast server for it."
        )
        return found


_USUAL_LENGTH = 32_768
"""Tokens of a sequence for a model that names no maximum: its state does not grow."""


class PagedBackend:
    """The block cache, on a CPU or a GPU. Raises `NotRoutable` for a model with a layer that cannot use it."""

    shares_prefixes = True

    def __init__(
        self,
        model: Any,
        max_length: int,
        *,
        is_bitwise: bool = False,
        records_experts: bool = False,
        has_adapters: bool = False,
    ) -> None:
        view = shared_view(model)
        heads = route_attention(view)
        if has_sinks(model) and model.get_input_embeddings().weight.device.type == "cuda":
            raise NotRoutable("the GPU's decoding kernel has no attention sinks")
        routers = Routers(view) if records_experts else None
        recorded = None if routers is None else (routers.num_layers, routers.num_chosen)
        embedding = model.get_input_embeddings().weight
        self.max_length = max_length
        self._shape = KVShape(heads=heads, dtype=embedding.dtype, device=embedding.device, experts=recorded)
        self._is_bitwise = is_bitwise
        on_gpu = self._shape.device.type == "cuda"
        self._fuses_adapters = on_gpu and has_adapters and _can_fuse(model)
        """Adapters in CUDA graphs; else a step at a time through the model's modules."""
        has_graphs = on_gpu and not is_bitwise and (self._fuses_adapters or not has_adapters)
        self.max_rounds = 8 if has_graphs else 1

    @property
    def bytes_per_token(self) -> int:
        return self._shape.bytes_per_token

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        view.set_attn_implementation(ATTENTION_NAME)
        shape, blocks = self._shape, (settings.num_blocks, settings.block_size)
        if self._is_bitwise:
            from ludic.inference.local.bitwise import BitwiseRunner  # that module imports this one

            return BitwiseRunner(view, shape, *blocks)
        routers = None if shape.experts is None else Routers(view)
        if settings.adapters and shape.device.type != "cpu" and not self._fuses_adapters:
            from ludic.inference.local.cuda.adapted import AdaptedRunner  # that module imports this one

            return AdaptedRunner(AdaptedForward(view, pack=False), shape, *blocks)
        if shape.device.type == "cpu":
            return CPURunner(cpu_forward(view, settings), shape, *blocks, routers=routers)
        from ludic.inference.local.cuda.forward import fused_bytes  # imports triton, which needs a GPU machine
        from ludic.inference.local.cuda.runner import CUDARunner

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
    from ludic.inference.local.cuda.forward import can_fuse  # imports triton, which needs a GPU machine

    return can_fuse(model) and rope_limit(model.config.get_text_config()) is None


def cpu_forward(view: Any, settings: RunnerSettings) -> Forward:
    """The fastest forward pass on a CPU: with a packed copy of the matrices, if memory is plentiful."""
    pack = settings.pack_weights
    if pack is None:
        pack = packed_bytes(view) < free_memory(torch.device("cpu")) // 4
    return AdaptedForward(view, pack=pack) if settings.adapters else make_forward(view, pack=pack)


class CPURunner:
    """Prefill by spans, decoding by rows."""

    runs_ahead = False

    def __init__(
        self, forward: Forward, shape: KVShape, num_blocks: int, block_size: int, *, routers: Routers | None = None
    ) -> None:
        """`routers` of a mixture whose experts are recorded."""
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


def sampled_from(logits_NV: Tensor, sequences: list[Sequence]) -> Read:
    """One token for each of these sequences, sampled on the host."""
    tokens, logprobs = sample(logits_NV, sequences) if sequences else ([], [])
    sampled = [(s, [token], [logprob]) for s, token, logprob in zip(sequences, tokens, logprobs, strict=True)]
    return lambda: sampled
