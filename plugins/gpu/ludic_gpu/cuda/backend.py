"""The block cache on a GPU: CUDA graphs, and a step at a time for adapters outside the Llama family."""

from typing import Any

from ludic.inference.local.cpu.backend import PagedBackend, device_type
from ludic.inference.local.kv import free_memory, rope_limit
from ludic.inference.local.runner import EngineNeeds, Runner, RunnerSettings
from ludic.models.adapters.forward import AdaptedForward
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import has_sinks
from ludic_gpu.cuda.adapted import AdaptedRunner


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
