"""What runs a model for the engine: the interface of runners and backends, and `choose_backend`.

A runner is chosen by device and model: that of a CPU (`cpu.runner`), of a GPU (`cuda.runner`), of hybrids (`hybrids`), or
transformers' own cache (`cached`). They import this file, so it imports them where it makes one.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from ludic.inference.local.kv import KVShape, free_memory, rope_limit
from ludic.inference.local.sampling import PromptScores, Scoring, sample
from ludic.inference.local.sequence import Chunk, Sampled, Sequence
from ludic.models.adapters.forward import AdaptedForward
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import NotRoutable, has_sinks, route_attention, say_once
from ludic.models.head import plain_model
from ludic.models.weights import shared_view
from ludic.types import ConfigError
from ludic_gpu.experts import Routers
from ludic_gpu.recurrent.layers import recurrent_layers
from ludic_gpu.vision.inputs import is_vision_model

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
        """Memory of one token's keys and values."""
        ...

    @property
    def bytes_per_sequence(self) -> int:
        """Memory of a sequence's recurrent states, whatever its length."""
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
            from ludic_gpu.hybrids.runners import HybridBackend

            return HybridBackend(model, length)
        return PagedBackend(model, length, records_experts=records_experts, has_adapters=has_adapters)
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
    bytes_per_sequence = 0

    def __init__(
        self,
        model: Any,
        max_length: int,
        *,
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
        on_gpu = self._shape.device.type == "cuda"
        self._fuses_adapters = on_gpu and has_adapters and _can_fuse(model)
        """Adapters in CUDA graphs; else a step at a time through the model's modules."""
        has_graphs = on_gpu and (self._fuses_adapters or not has_adapters)
        self.max_rounds = 8 if has_graphs else 1

    @property
    def bytes_per_token(self) -> int:
        return self._shape.bytes_per_token

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        view.set_attn_implementation(ATTENTION_NAME)
        shape, blocks = self._shape, (settings.num_blocks, settings.block_size)
        routers = None if shape.experts is None else Routers(view)
        if settings.adapters and shape.device.type != "cpu" and not self._fuses_adapters:
            from ludic_gpu.cuda.adapted import AdaptedRunner

            return AdaptedRunner(AdaptedForward(view, pack=False), shape, *blocks)
        if shape.device.type == "cpu":
            from ludic.inference.local.cpu.runner import CPURunner, cpu_forward

            return CPURunner(cpu_forward(view, settings), shape, *blocks, routers=routers)
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


def sampled_from(logits_NV: Tensor, sequences: list[Sequence]) -> Read:
    """One token for each of these sequences, sampled on the host."""
    tokens, logprobs = sample(logits_NV.cpu(), sequences) if sequences else ([], [])
    sampled = [(s, [token], [logprob]) for s, token, logprob in zip(sequences, tokens, logprobs, strict=True)]
    return lambda: sampled
