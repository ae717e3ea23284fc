"""`VisionTemplate`: the chat template of a vision-language model, with the tokens that stand for pictures.

The model's own template writes one placeholder token per picture. Here it is repeated as often as the picture has embeddings, as
transformers' processors do, so the prompt's tokens are what the model sees when it samples and when it is trained. Pictures of
later messages are rendered with the delta: earlier tokens, sampled ones included, stay as they are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from ludic.inference.templates.chat import ToolSchemas
from ludic.inference.templates.hf import HFChatTemplate
from ludic.types import Image, ImageSpan, Message, TemplateError, TokenArray, images_in
from ludic.types.messages import is_picture


class VisionTemplate(HFChatTemplate):
    """Renders texts and pictures with the tokenizer's own template."""

    def __init__(self, tokenizer: Any, image_token: str, count_tokens: Callable[[Image], int], **settings: Any) -> None:
        """`image_token` is the placeholder, `count_tokens` the number of embeddings of a picture (`ludic_gpu.vision`)."""
        self._image_token = image_token
        self._image_id = int(tokenizer.convert_tokens_to_ids(image_token))
        self._count = lru_cache(maxsize=4096)(count_tokens)
        super().__init__(tokenizer, **settings)

    def place_images(self, messages: Sequence[Message], token_ids: TokenArray) -> tuple[ImageSpan, ...]:
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

    def _render_as_given(
        self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool
    ) -> str:
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

    def _shaped(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Templates look at the type of a part only; the bytes of pictures stay out of them."""
        return [
            {**message, "content": [{"type": "image"} if is_picture(part) else part for part in content]}
            if type(content := message.get("content")) is list
            else message
            for message in messages
        ]
