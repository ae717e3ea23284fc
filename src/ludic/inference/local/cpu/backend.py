"""The block cache: attention of every layer goes through it. On a CPU here; a plug-in's subclass has the runners of a GPU."""

from typing import Any

from ludic.inference.local.cpu.runner import CPURunner, cpu_forward
from ludic.inference.local.kv import KVShape
from ludic.inference.local.runner import Backend, EngineNeeds, Runner, RunnerSettings
from ludic.models.attention import NAME as ATTENTION_NAME
from ludic.models.attention import NotRoutable
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model, part, recurrent_layers
from ludic.models.passes.routing import route_attention
from ludic.models.weights import shared_view


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
