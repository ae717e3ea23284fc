"""Runs hybrids: attention layers over the block cache, and one state per sequence for every recurrent layer."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.backends import PagedBackend, device_type
from ludic.inference.local.cpu import CPURunner, cpu_forward
from ludic.inference.local.kv import KVShape
from ludic.inference.local.runner import EngineNeeds, Read, Runner, RunnerSettings
from ludic.inference.local.sampling import PromptScores, Scoring
from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import AttentionState, has_sinks
from ludic.models.forward import Forward
from ludic.models.head import plain_model
from ludic.models.kinds import RecurrentState, is_vision_model, recurrent_layers
from ludic.models.weights import shared_view
from ludic_gpu.hybrids.states import (
    DecodingRows,
    HybridState,
    Mixers,
    PromptParts,
    StateRows,
    WholeTexts,
    bytes_per_sequence,
    probe_mixers,
)


class HybridBackend(PagedBackend):
    """The block cache, and a state of each sequence for every recurrent layer."""

    shares_prefixes = False

    @classmethod
    def is_for(cls, model: Any) -> bool:
        return bool(recurrent_layers(model))

    def suits(self, model: Any, needs: EngineNeeds) -> str | None:
        if (reason := needs.changed_rope(model)) is not None:
            return reason
        if is_vision_model(plain_model(model)):
            return "its prompts hold embeddings of pictures"
        if needs.records_experts or needs.has_adapters:
            return "it has recurrent layers"
        return self._use_blocks(model, needs) or self._use_states(model)

    def _use_states(self, model: Any) -> str | None:
        on_gpu = device_type(model) == "cuda"
        if on_gpu and has_sinks(model):
            return "the GPU's decoding kernel has no attention sinks"
        self.max_rounds = 8 if on_gpu else 1
        view = shared_view(model)
        view.set_attn_implementation(ATTENTION_NAME)
        self._mixers = probe_mixers(view)
        if not self._mixers.continue_by_one:
            return "its recurrent layers do not repeat its plain forward pass from a state"
        self.bytes_per_sequence = bytes_per_sequence(view)
        return None

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        view.set_attn_implementation(ATTENTION_NAME)
        blocks = settings.num_blocks, settings.block_size
        if self._shape.device.type == "cpu":
            return RecurrentRunner(cpu_forward(view, settings), self._shape, *blocks, mixers=self._mixers)
        # It imports triton, which needs a GPU machine.
        from ludic_gpu.hybrids.cuda import GraphedRecurrentRunner

        return GraphedRecurrentRunner(
            view, self._shape, *blocks, max_sequences=settings.max_sequences, max_length=settings.max_length,
            max_rounds=self.max_rounds, mixers=self._mixers,
        )  # fmt: skip


class RecurrentRunner(CPURunner):
    """A `CPURunner` with states."""

    def __init__(self, forward: Forward, shape: KVShape, num_blocks: int, block_size: int, *, mixers: Mixers) -> None:
        super().__init__(forward, shape, num_blocks, block_size)
        self._states = StateRows(shape.device)
        self._mixers = mixers
        self._recurrence: Callable[[int], RecurrentState]
        """(flat tokens of the pass, padding included) → its recurrent layers. Without a reference to the runner, so that the
        runner's memory is freed without the garbage collector."""

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> Read:
        computed = [chunk for chunk in chunks if chunk.source is None]
        states, mixers = self._states, self._mixers
        self._recurrence = lambda _: PromptParts(states, computed, mixers)
        read = super().prefill(chunks)
        self._states.copy((chunk.source, chunk.sequence) for chunk in chunks if chunk.source is not None)
        return read

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int = 1) -> Read:
        states, rows = self._states, self._rows

        def arranged(num_rows: int) -> DecodingRows:
            """Rows of states are in the order of the rows of keys, which is known when the model runs."""
            states.arrange(rows.owners(), num_rows)
            return DecodingRows(states)

        self._recurrence = arranged
        return super().decode(sequences, num_rounds)

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        lengths = [len(text.tokens) for text in texts]
        device = self._states.device
        self._recurrence = lambda num_tokens: WholeTexts([*lengths, num_tokens - sum(lengths)], device)
        return super().score(texts)

    def keep(self, sequence: Sequence) -> None:
        """Keys without a state serve no other sequence."""

    def leave(self, sequence: Sequence) -> None:
        self._states.leave(sequence)
        super().leave(sequence)

    def _forward(
        self,
        tokens: list[int],
        positions: list[int],
        state: AttentionState,
        where: list[int],
        slots: Callable[[], Tensor] | None = None,
    ) -> Tensor:
        return super()._forward(tokens, positions, HybridState(state, self._recurrence(len(tokens))), where)
