"""Runs a vision-language model in the embedded engine, through transformers' own cache."""

from collections.abc import Sequence as Seq
from typing import Any

import torch
from torch import Tensor

from ludic.inference.local.cached import CachedBackend, CachedRunner
from ludic.inference.local.runner import EngineNeeds, RunnerSettings
from ludic.inference.local.sequence import Sequence
from ludic.models.attention import say_once
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model
from ludic.models.weights import shared_view
from ludic_gpu.vision.inputs import Pictures, VisionDecoder


class VisionBackend(CachedBackend):
    """transformers' own cache, with pictures in prompts."""

    @classmethod
    def is_for(cls, model: Any) -> bool:
        return is_vision_model(plain_model(model))

    def suits(self, model: Any, needs: EngineNeeds) -> str | None:
        reason = needs.changed_rope(model) or "its prompts hold embeddings of pictures"
        if needs.records_experts or needs.has_adapters:
            return reason
        self._images = needs.images
        self.use(shared_view(model), needs)
        say_once(
            f"{type(model).__name__} runs {self.how}, which is slower than the engine's block cache: {reason}. vLLM is the fast "
            "server for it."
        )
        return None

    def runner(self, view: Any, settings: RunnerSettings) -> "VisionRunner":
        return VisionRunner(view, recompute=self.recompute, images=self._images)


class VisionRunner(CachedRunner):
    """The same for a vision-language model: prompts are computed with their pictures, and positions continue behind them."""

    def __init__(self, view: Any, *, recompute: bool, images: Any) -> None:
        super().__init__(view, recompute=recompute)
        self._vision = VisionDecoder(plain_model(view), None if images is None else Pictures(images))

    def _forward(self, sequences: Seq[Sequence], cache: Any) -> tuple[Tensor, Any]:
        ids_BL = self.new_ids(sequences, cache)
        images_B = [sequence.request.images for sequence in sequences]
        if cache is None:
            embeds_BLD, positions_3BL = self._vision.inputs(ids_BL, images_B)
        else:
            embeds_BLD = self._model.get_input_embeddings()(ids_BL)
            next_B = [len(s.tokens) - 1 + self._vision.offset(s.request.images) for s in sequences]
            positions_3BL = torch.tensor(next_B, device=self._device)[None, :, None].expand(3, -1, 1)
        out = self._vision.decoder(
            inputs_embeds=embeds_BLD,
            position_ids=positions_3BL,
            past_key_values=cache,
            use_cache=not self._recompute,
        )
        logits_BV = self._model.get_output_embeddings()(out.last_hidden_state[:, -1])
        return logits_BV, None if self._recompute else out.past_key_values
