"""Vision-language models: inputs of the decoder from token ids and pictures, the chat template, the embedded engine.

Sampling and training use the same functions, so both see the same prompt. Which tokens stand for a picture is given
(`ImageSpan`), not looked up by their id: a model may sample the placeholder itself, and that token is no picture.

One family: Qwen2-VL and Qwen2.5-VL. A picture becomes patches and, after the vision tower, one embedding per `merge_size`²
patches; positions have three axes (time, height, width).
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.cached import CachedBackend, CachedRunner
from ludic.inference.local.runner import EngineNeeds, RunnerSettings
from ludic.inference.local.sequence import Sequence
from ludic.inference.templates.chat import ToolSchemas
from ludic.inference.templates.hf import HFChatTemplate
from ludic.models.attention import say_once
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model
from ludic.models.weights import shared_view
from ludic.types import ConfigError, Image, ImageSpan, Message, MissingExtra, TemplateError, TokenArray, images_in
from ludic.types.messages import is_picture


def as_pil(image: Image) -> Any:
    """The picture as a PIL image in RGB."""
    try:
        from PIL import Image as PILImage
    except ImportError as error:
        raise MissingExtra("vision", "Reading a picture") from error
    return PILImage.open(BytesIO(image.data)).convert("RGB")


class Pictures:
    """Pictures as pixels and as numbers of tokens, by a model's image processor. The last ones are kept."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.pixels = lru_cache(maxsize=512)(self._pixels)
        """Image → its patches [number, values], and its grid [3]: time, height and width in patches."""

    def num_tokens(self, image: Image) -> int:
        """Embeddings of the picture, so tokens that stand for it."""
        grid_3 = self.pixels(image)[1]
        return int(grid_3.prod()) // self.processor.merge_size**2

    def _pixels(self, image: Image) -> tuple[Tensor, Tensor]:
        found = self.processor(images=[as_pil(image)], return_tensors="pt")
        return found["pixel_values"], found["image_grid_thw"][0]


def image_token(tokenizer: Any) -> str:
    """The placeholder of a picture in the chat template."""
    return str(getattr(tokenizer, "image_token", None) or "<|image_pad|>")


# Letters: B rows, L tokens of the longest, D hidden size, N pictures.
class VisionDecoder:
    """The decoder of one vision-language model, with pictures among its tokens."""

    def __init__(self, model: Any, pictures: Pictures | None) -> None:
        """`model` is the transformers model, not a peft wrapper of it. `pictures=None`: it gets text only."""
        self._model, self._pictures = model, pictures
        self.offset = lru_cache(maxsize=4096)(self._offset)
        """The pictures of a prompt → position of a token behind them, less its number among the tokens."""

    @property
    def decoder(self) -> Any:
        """The language model, from embeddings to hidden states."""
        return self._model.model.language_model

    def inputs(
        self, ids_BL: Tensor, images_B: Seq[Seq[ImageSpan]], mask_BL: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embeddings [B, L, D] and positions [3, B, L] of rows with these pictures."""
        embeds_BLD: Tensor = self._model.get_input_embeddings()(ids_BL)
        spans = [(row, span) for row, images in enumerate(images_B) for span in images]
        kinds_BL = torch.zeros_like(ids_BL)
        grids_N3 = None
        if spans:
            features, grids_N3 = self._features([span.image for _, span in spans], ids_BL.device)
            _check_lengths(spans, features, ids_BL.shape[1])
            rows = torch.cat([torch.full((span.length,), row) for row, span in spans]).to(ids_BL.device)
            columns = torch.cat([torch.arange(span.start, span.end) for _, span in spans]).to(ids_BL.device)
            embeds_BLD = embeds_BLD.index_put((rows, columns), torch.cat(features).to(embeds_BLD.dtype))
            kinds_BL[rows, columns] = 1
        return embeds_BLD, self._positions(ids_BL, kinds_BL, grids_N3, mask_BL)

    def hidden(self, ids_BL: Tensor, mask_BL: Tensor, images_B: Seq[Seq[ImageSpan]]) -> Tensor:
        """The last hidden states [B, L, D] of rows that are padded on the right."""
        embeds_BLD, positions_3BL = self.inputs(ids_BL, images_B, mask_BL)
        out: Tensor = self.decoder(
            inputs_embeds=embeds_BLD, position_ids=positions_3BL, attention_mask=mask_BL, use_cache=False
        ).last_hidden_state
        return out

    def _offset(self, images: tuple[ImageSpan, ...]) -> int:
        if not images:
            return 0
        assert self._pictures is not None, "a prompt with pictures has been computed"
        kinds_BL = torch.zeros(1, images[-1].end + 1, dtype=torch.long)
        for span in images:
            kinds_BL[0, span.start : span.end] = 1
        grids_N3 = torch.stack([self._pictures.pixels(span.image)[1] for span in images])
        positions_3BL = self._positions(torch.zeros_like(kinds_BL), kinds_BL, grids_N3, None)
        return int(positions_3BL[0, 0, -1]) - images[-1].end

    def _features(self, images: Seq[Image], device: torch.device) -> tuple[list[Tensor], Tensor]:
        """Embeddings of each picture, and the grids [N, 3]."""
        if self._pictures is None:
            raise ConfigError(
                "A prompt holds a picture, but the tokenizer has no image processor. Load the model from a folder with a "
                "preprocessor_config.json, or give it one: give_image_processor(tokenizer, processor)."
            )
        pixels, grids = zip(*map(self._pictures.pixels, images), strict=True)
        grids_N3 = torch.stack(grids).to(device)
        found = self._model.model.get_image_features(torch.cat(pixels).to(device), grids_N3)
        return list(found.pooler_output), grids_N3

    def _positions(self, ids_BL: Tensor, kinds_BL: Tensor, grids_N3: Tensor | None, mask_BL: Tensor | None) -> Tensor:
        if grids_N3 is None:
            positions = torch.arange(ids_BL.shape[1], device=ids_BL.device)
            return positions.expand(3, *ids_BL.shape)
        found: Tensor = self._model.model.get_rope_index(
            ids_BL, mm_token_type_ids=kinds_BL, image_grid_thw=grids_N3, attention_mask=mask_BL
        )[0]
        return found


def _check_lengths(spans: Seq[tuple[int, ImageSpan]], features: Seq[Tensor], length: int) -> None:
    for (_, span), own in zip(spans, features, strict=True):
        if len(own) != span.length or span.end > length:
            raise ConfigError(
                f"{span.image} has {len(own)} embeddings, but {span.length} of the prompt's {length} tokens stand for it. The "
                "prompt was made with another image processor than this model's."
            )


class VisionTemplate(HFChatTemplate):
    """Renders texts and pictures with the tokenizer's own template."""

    def __init__(self, tokenizer: Any, image_token: str, count_tokens: Callable[[Image], int], **settings: Any) -> None:
        """`image_token` is the placeholder, `count_tokens` the number of embeddings of a picture (`ludic_gpu.vision`)."""
        self._image_token = image_token
        self._image_id = int(tokenizer.convert_tokens_to_ids(image_token))
        self._count = lru_cache(maxsize=4096)(count_tokens)
        super().__init__(tokenizer, **settings)

    def place_images(self, messages: Seq[Message], token_ids: TokenArray) -> tuple[ImageSpan, ...]:
        images = images_in(messages)
        if not images:
            return ()
        places = np.flatnonzero(token_ids == self._image_id)
        lengths = [self._count(image) for image in images]
        starts = np.cumsum([0, *lengths])
        if starts[-1] != len(places):  # `_render_as_given` has counted them, so the tokenizer has merged or split some
            raise TemplateError(f"{len(places)} tokens stand for pictures that need {starts[-1]}.")
        return tuple(
            ImageSpan(image, int(places[start]), length)
            for image, start, length in zip(images, starts.tolist(), lengths, strict=False)
        )

    def _render_as_given(self, messages: Seq[Message], tools: ToolSchemas | None, add_generation_prompt: bool) -> str:
        text = super()._render_as_given(messages, tools, add_generation_prompt)
        images = images_in(messages)
        pieces = text.split(self._image_token)
        if len(pieces) != len(images) + 1:
            raise TemplateError(
                f"The chat template wrote {len(pieces) - 1} placeholders {self._image_token} for {len(images)} pictures. It must "
                "write one per picture, and texts must not contain the placeholder."
            )
        repeated = [self._image_token * self._count(image) for image in images]
        return "".join(piece for pair in zip(pieces, [*repeated, ""], strict=True) for piece in pair)

    def _shaped(self, messages: Seq[Message]) -> Seq[Message]:
        """Templates look at the type of a part only; the bytes of pictures stay out of them."""
        return [
            {**message, "content": [{"type": "image"} if is_picture(part) else part for part in content]}
            if type(content := message.get("content")) is list
            else message
            for message in messages
        ]


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

    def runner(self, view: Any, settings: RunnerSettings) -> "_VisionRunner":
        return _VisionRunner(view, recompute=self.recompute, images=self._images)


class _VisionRunner(CachedRunner):
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
