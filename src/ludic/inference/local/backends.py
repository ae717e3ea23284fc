"""The ways to run a model in the embedded engine, and which one a model gets.

Those of plug-ins (entry-point group `ludic.backends`) are asked first, then the core's, which end with the one that runs most
models and is slowest.
"""

from typing import Any

from ludic import plugins
from ludic.inference.local.cached import CachedBackend
from ludic.inference.local.cpu import CPURunner, cpu_forward
from ludic.inference.local.kv import KVShape, rope_limit
from ludic.inference.local.runner import Backend, EngineNeeds, Runner, RunnerSettings
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import NotRoutable, say_once
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model, part, recurrent_layers
from ludic.models.passes.routing import route_attention
from ludic.models.weights import shared_view
from ludic.types import ConfigError, MissingExtra


class PagedBackend(Backend):
    """The block cache on a CPU, for models whose layers all attend through it."""

    _shape: KVShape

    @classmethod
    def is_for(cls, model: Any) -> bool:
        return device_type(model) == "cpu"

    def suits(self, model: Any, needs: EngineNeeds) -> str | None:
        if (reason := needs.changed_rope(model)) is not None:
            return reason
        if is_vision_model(plain_model(model)):
            return "its prompts hold embeddings of pictures"
        if recurrent_layers(model):
            return "it has recurrent layers"
        return self._use_blocks(model, needs)

    def _use_blocks(self, model: Any, needs: EngineNeeds) -> str | None:
        view = shared_view(model)
        try:
            heads = route_attention(view)
        except NotRoutable as error:
            return error.reason
        routers = self._routers(view) if needs.records_experts else None
        recorded = None if routers is None else (routers.num_layers, routers.num_chosen)
        embedding = model.get_input_embeddings().weight
        self._shape = KVShape(heads=heads, dtype=embedding.dtype, device=embedding.device, experts=recorded)
        self.max_length, self.bytes_per_token = needs.max_length, self._shape.bytes_per_token
        return None

    def _routers(self, view: Any) -> Any:
        return part("experts").Routers(view)

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        view.set_attn_implementation(ATTENTION_NAME)
        routers = None if self._shape.experts is None else self._routers(view)
        blocks = settings.num_blocks, settings.block_size
        return CPURunner(cpu_forward(view, settings), self._shape, *blocks, routers=routers)


def device_type(model: Any) -> str:
    found: str = model.get_input_embeddings().weight.device.type
    return found


_USUAL_LENGTH = 32_768
"""Tokens of a sequence for a model that names no maximum: its state does not grow."""


def choose_backend(
    model: Any,
    max_length: int | None,
    *,
    images: Any = None,
    records_experts: bool = False,
    has_adapters: bool = False,
) -> Backend:
    """The first backend that suits the model, ready to make runners; ConfigError with the reasons of all if none does.

    `images`: the image processor of a vision-language model."""
    needs = EngineNeeds(
        max_length=max_length or _own_length(model),
        images=images,
        records_experts=records_experts,
        has_adapters=has_adapters,
    )
    installed, reasons = _installed()
    kinds: list[type[Backend]] = [*installed, PagedBackend]
    for kind in kinds:
        if not kind.is_for(model):
            continue
        backend = kind()
        if (reason := backend.suits(model, needs)) is None:
            return backend
        reasons.append(reason)
    return _last(model, needs, "; ".join(dict.fromkeys(reasons)))


def _last(model: Any, needs: EngineNeeds, reasons: str) -> CachedBackend:
    """transformers' own cache, said by a warning with the reasons against the others."""
    name, last = type(model).__name__, CachedBackend()
    reason = last.suits(model, needs)
    if reason is None:
        say_once(
            f"{name} runs {last.how}, which is slower than the engine's block cache: {reasons}. vLLM is the fast server for it."
        )
        return last
    for option, is_on in (("record_experts", needs.records_experts), ("adapters", needs.has_adapters)):
        if is_on:
            raise ConfigError(
                f"Leave {option}=True out: it needs the engine's block cache alone, which cannot run {name}: {reasons}."
            )
    raise ConfigError(f"The embedded engine cannot run {name}: {reasons}; {reason}.")


def _installed() -> tuple[list[type[Backend]], list[str]]:
    """The backends of plug-ins by name, and for those whose package is gone what is missing."""
    found: list[type[Backend]] = []
    missing: list[str] = []
    for point in plugins.points("backends"):
        try:
            found.append(point.load())
        except MissingExtra:
            missing.append(f"the backend {point.name!r} of {point.package} is not installed")
    return found, missing


def _own_length(model: Any) -> int:
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ConfigError(f"{type(model).__name__} is not a transformers model: it has no config.")
    text_config = model.config.get_text_config()
    found: int | None = rope_limit(text_config) or getattr(text_config, "max_position_embeddings", None)
    return found or _USUAL_LENGTH
