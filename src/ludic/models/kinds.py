"""Special kinds of models: with pictures, mixtures of experts, with recurrent layers, in four bits.

The core recognises them here and asks `part` for the code that computes them, which is in a plug-in (entry-point group
`ludic.models`). A run that meets none of them needs no plug-in.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from ludic import plugins
from ludic.types import ConfigError, MissingExtra

PARTS: Mapping[str, str] = {
    "experts": "watching the routers of a mixture of experts, and LoRA on experts",
    "head_kernels": "kernels of the output layer for a GPU",
    "offload": "offloading activations to host memory",
    "quantized": "a base model in four bits",
    "recurrent": "computing the recurrent layers of a hybrid in packed rows",
    "sliced": "context parallelism",
    "vision": "computing a vision-language model",
}
"""Name of a part → what it does, for the error where it is missing."""


@functools.cache
def part(name: str) -> Any:
    """The module that does this. MissingPlugin where its package is not installed."""
    point = plugins.find("models", name)
    if point is None:
        raise plugins.missing("ludic_gpu", _sentence(name))
    try:
        return point.load()
    except MissingExtra as error:
        package: str = getattr(error, "package", point.package)
        raise plugins.missing(package, _sentence(name)) from error


def part_if_installed(name: str) -> Any:
    """The module, or None."""
    try:
        return part(name)
    except MissingExtra:
        return None


def _sentence(name: str) -> str:
    return PARTS[name][0].upper() + PARTS[name][1:]


# --- recurrent layers ------------------------------------------------------------------------------------------


# Letters: T flat tokens, B rows, L tokens of a row, D width.
class Mix(Protocol):
    """A layer's own forward over rows, from the states in a transformers cache, which it renews."""

    def __call__(self, hidden_BLD: Tensor, cache: Any, mask_BL: Tensor | None = None, /) -> Tensor:
        """`mask_BL`: 0 where a row is padding, on its left."""
        ...


class RecurrentState(Protocol):
    """Computes the recurrent layers of one forward pass."""

    def recur(self, layer: int, mix: Mix, hidden_TD: Tensor) -> Tensor:
        """Run the layer over every sequence of the flat tokens: [T, D]."""
        ...


def is_recurrent(module: nn.Module) -> bool:
    """True if the module is the mixer of a recurrent layer: all of them begin with a causal convolution."""
    children = [getattr(child, "base_layer", child) for child in module.children()]  # a LoRA layer holds another
    return hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in children)


def recurrent_layers(model: nn.Module) -> dict[int, nn.Module]:
    """The mixers by layer."""
    return {module.layer_idx: module for module in model.modules() if is_recurrent(module)}  # type: ignore[misc]


# --- mixtures of experts, and weights in four bits -------------------------------------------------------------


def router_modules(model: Any) -> list[tuple[str, nn.Module]]:
    """Routers with their names, in the order of the layers, by the classes whose logits transformers itself can record."""
    classes: list[type[nn.Module]] = []
    modules: list[tuple[str, nn.Module]] = list(model.named_modules())
    for _, module in modules:
        recorded: Mapping[str, Any] = getattr(module, "_can_record_outputs", None) or {}
        recorders = recorded.get("router_logits") or []
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            # An index of 0: the logits come first. Others (Llama 4, Switch) return something else.
            if getattr(recorder, "index", None) == 0:
                classes.append(recorder.target_class)
    return [
        (name, module)
        for name, module in modules
        if isinstance(module, tuple(classes)) and hasattr(module, "top_k") and hasattr(module, "num_experts")
    ]


def adapts_experts(module: nn.Module) -> bool:
    """True if it is peft's wrapper of one parameter, as LoRA on experts has them; peft need not be installed."""
    return type(module).__name__ == "ParamWrapper" and hasattr(module, "parameter_name")


def is_quantized(module: nn.Module) -> bool:
    """True if it is a linear layer in four bits."""
    kind = type(module)  # asked without importing bitsandbytes; peft has a class of the same name around it
    return kind.__name__ == "Linear4bit" and kind.__module__.startswith("bitsandbytes.")


# --- pictures --------------------------------------------------------------------------------------------------


VISION_TYPES = ("qwen2_vl", "qwen2_5_vl")
"""`model_type` of the configs of models with pictures that Ludic knows."""
_PROCESSOR = "ludic_image_processor"
"""Attribute of a tokenizer: the image processor of its model. It goes where the tokenizer goes."""


def _is_vision_config(config: Any) -> bool:
    """True if a model of this config takes pictures, as far as Ludic knows."""
    return getattr(config, "model_type", None) in VISION_TYPES


def is_vision_model(model: Any) -> bool:
    """The same of a transformers model."""
    return _is_vision_config(getattr(model, "config", None))


def auto_class(config: Any) -> Any:
    """transformers' class that chooses the model's: of text, or of text and pictures. `None` is a text model's config."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    if _is_vision_config(config):
        return AutoModelForImageTextToText
    kind, text, pictures = type(config), AutoModelForCausalLM._model_mapping, AutoModelForImageTextToText._model_mapping
    if kind in pictures and kind not in text:
        raise ConfigError(
            f"Ludic does not know how a model of type {config.model_type!r} takes pictures; it knows {' and '.join(VISION_TYPES)}. "
            "Give one of those, or a text model of the same family, which AutoModelForCausalLM loads."
        )
    return AutoModelForCausalLM


def give_image_processor(tokenizer: Any, processor: Any) -> Any:
    """The tokenizer, which from now on has the image processor of its model."""
    setattr(tokenizer, _PROCESSOR, processor)
    return tokenizer


def image_processor_of(tokenizer: Any) -> Any | None:
    return getattr(tokenizer, _PROCESSOR, None)


def load_image_processor(tokenizer: Any, place: str, config: Any) -> Any:
    """The tokenizer with the image processor of the model in the folder or hub repository, if that takes pictures."""
    if not _is_vision_config(config):
        return tokenizer
    from transformers import AutoImageProcessor

    try:
        processor = AutoImageProcessor.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(
            f"The image processor of {place!r} cannot be loaded: {str(error).strip().splitlines()[0]} Its folder needs a "
            "preprocessor_config.json, and reading pictures needs Pillow (the 'vision' extra)."
        ) from error
    return give_image_processor(tokenizer, processor)


def save_tokenizer(tokenizer: Any, folder: str | Path) -> None:
    """Write the tokenizer, and the image processor if it has one."""
    tokenizer.save_pretrained(folder)
    if (processor := image_processor_of(tokenizer)) is not None:
        processor.save_pretrained(folder)


def vision_modules(model: Any) -> str | None:
    """For LoRA: a regular expression of the modules that get none, the vision tower's; None for a model of text."""
    return r".*\bvisual\b.*" if is_vision_model(model) else None


def freeze_vision(model: Any) -> None:
    """The vision tower, with what maps its output to the decoder's embeddings, is not trained."""
    if not is_vision_model(model):
        raise ConfigError(f"freeze_vision: {type(model).__name__} has no vision tower that Ludic knows.")
    model.model.visual.requires_grad_(False)
