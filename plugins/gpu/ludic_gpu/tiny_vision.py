"""A small random vision-language model of the Qwen2.5-VL class, with a tokenizer and an image processor, without any file."""

from pathlib import Path
from typing import Any

import torch

from ludic.models.kinds import give_image_processor, save_tokenizer
from ludic.models.loading import LoadedModel, character_tokenizer, no_progress_bar

_SPECIAL = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
_SPREAD = 0.08
"""Standard deviation of the random weights: with transformers' 0.02 attention of so small a model is nearly uniform, and
it learns slowly."""
_PART = (
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
)


def vision_tokenizer(*, patch_size: int = 4) -> Any:
    """A token per character, the markers of pictures, and the image processor: `2 · patch_size` pixels a side are a token."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = character_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL)}, replace_extra_special_tokens=False)
    tokenizer.chat_template = tokenizer.chat_template.replace("{{ message['content'] }}", _PART)
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch_size, merge_size=2, temporal_patch_size=1, min_pixels=4 * patch_size**2, max_pixels=1 << 20
    )
    return give_image_processor(tokenizer, processor)


def tiny_vision(*, width: int = 64, layers: int = 2, patch_size: int = 4, seed: int = 0) -> LoadedModel:
    """Random weights: fast on a CPU, and able to learn `picture_grid`."""
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration

    tokenizer = vision_tokenizer(patch_size=patch_size)
    start, picture, end, video = tokenizer.convert_tokens_to_ids(list(_SPECIAL))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 4096,
            "initializer_range": _SPREAD,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [width // 16, width // 32, width // 32],
            },
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "out_hidden_size": width,
            "patch_size": patch_size,
            "spatial_merge_size": 2,
            "temporal_patch_size": 1,
            "window_size": 4 * patch_size,
            "fullatt_block_indexes": [1],
            "initializer_range": _SPREAD,
        },
        image_token_id=picture,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
    return LoadedModel(model, tokenizer, "tiny vision")


def save_tiny_vision(folder: str | Path, **settings: Any) -> Path:
    """Write such a model where `--model` finds it."""
    made = tiny_vision(**settings)
    with no_progress_bar():
        made.model.save_pretrained(folder)
    save_tokenizer(made.tokenizer, folder)
    return Path(folder)
