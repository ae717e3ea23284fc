"""Reads the adapter of a peft model and checks that vLLM can serve it.

vLLM rejects some adapters, but only on arrival, and it silently ignores weights that were trained besides the adapter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludic.types import ConfigError, MissingExtra

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_PREFIX = "base_model.model."
_ADVICE = "Publish merged weights instead: create_vllm_publisher(client)."
_PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""The others (PiSSA, OLoRA, CorDA, LoftQ) change the base too, so the server's base would differ from the trainer's."""
_UNSERVED = {
    "modules_to_save": "whole modules that are trained beside it",
    "trainable_token_indices": "trained embeddings of single tokens",
    "target_parameters": "LoRA on parameters instead of modules",
    "use_dora": "DoRA",
    "lora_bias": "a bias in LoRA's second matrix",
    "layer_replication": "layers that are repeated",
    "alora_invocation_tokens": "activated LoRA",
    "use_bdlora": "block-diagonal LoRA",
    "use_qalora": "QALoRA",
    "arrow_config": "Arrow routing",
}
"""peft settings that change what an adapter computes and that vLLM does not support."""


@dataclass(frozen=True, slots=True)
class PeftAdapter:
    """The tensors and settings that a server needs besides the base."""

    config: Any
    """peft's LoraConfig."""
    tensors: Mapping[str, Tensor]
    """By peft's names in files."""

    @property
    def rank(self) -> int:
        """The largest rank of its modules."""
        return max(tensor.shape[0] for name, tensor in self.tensors.items() if is_first_matrix(name))

    def write(self, folder: Path) -> None:
        """Write the files of `save_pretrained`, without the model card."""
        from safetensors.torch import save_file

        save_file({name: tensor.cpu().contiguous() for name, tensor in self.tensors.items()}, folder / WEIGHTS)
        self.config.save_pretrained(str(folder))


def is_first_matrix(name: str) -> bool:
    """Whether a tensor is the A of an adapter's B·A, whose number of rows is the rank."""
    return name.endswith((".lora_A.weight", ".lora_embedding_A"))


def read_adapter(model: Any) -> PeftAdapter:
    """The current values of the active adapter; ConfigError if vLLM cannot serve it."""
    from peft import get_peft_model_state_dict

    require_servable(model)
    (name,) = model.active_adapters
    tensors = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return PeftAdapter(model.peft_config[name], {key: tensor.detach() for key, tensor in tensors.items()})


def require_servable(model: Any) -> None:
    problem = problem_with(model)
    if problem is not None:
        raise ConfigError(f"The adapter alone cannot be published: {problem}. {_ADVICE}")


def problem_with(model: Any) -> str | None:
    """Why the adapter alone does not hold everything that is trained, or vLLM cannot serve it; None if all is well."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MissingExtra("lora", "publishing an adapter") from error
    if not isinstance(model, PeftModel):
        return f"{type(model).__name__} has no adapter; wrap the model with peft.get_peft_model first"
    configs = model.peft_config
    learned_prompts = [name for name, config in configs.items() if config.is_prompt_learning]
    if learned_prompts:
        return f"{learned_prompts} are learned prompts, but vLLM serves LoRA only"
    if len(model.active_adapters) != 1:
        return f"{len(model.active_adapters)} adapters are active ({model.active_adapters}), but a request names one"
    return problem_in(configs[model.active_adapters[0]].to_dict()) or _trained_beside(model)


def problem_in(config: Mapping[str, Any]) -> str | None:
    """The same check, from the settings alone."""
    kind = str(config["peft_type"]).rpartition(".")[2]
    if kind != "LORA":
        return f"it is of the kind {kind}, but vLLM serves LoRA only"
    for setting, meaning in _UNSERVED.items():
        if config.get(setting):
            return f"it has {setting}={config[setting]!r} ({meaning}), which vLLM does not serve"
    if config["bias"] != "none":
        return f"it has bias={config['bias']!r}, so biases of the base are trained too, which vLLM does not serve"
    init = config["init_lora_weights"]
    if isinstance(init, str) and init.lower() not in _PLAIN_INITS:
        return f"it has init_lora_weights={init!r}, which changes the base model, but the server has the original base"
    return None


def _trained_beside(model: Any) -> str | None:
    others = [name for name, weight in model.named_parameters() if weight.requires_grad and ".lora_" not in name]
    if not others:
        return None
    return f"{len(others)} weights outside it are trained too, such as {others[0].removeprefix(_PREFIX)}"


def base_parameters(model: Any) -> dict[str, Tensor]:
    """The frozen weights, by their names in the model without an adapter."""
    named = ((name, weight) for name, weight in model.named_parameters() if ".lora_" not in name)
    return {name.removeprefix(_PREFIX).replace(".base_layer.", "."): weight.detach() for name, weight in named}


def differing(ours: Mapping[str, Tensor], theirs: Mapping[str, list[float]]) -> list[str]:
    """Names of weights whose first values differ by more than half precision explains."""

    def is_other(name: str, values: list[float]) -> bool:
        own = ours[name].reshape(-1)[: len(values)].float().cpu()
        return not torch.allclose(own, torch.tensor(values), rtol=2e-2, atol=2e-2 * float(own.abs().max()))

    return [name for name, values in theirs.items() if is_other(name, values)]
