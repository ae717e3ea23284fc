"""Adapters that change something, and peft's models of them."""

import copy
from typing import Any

import peft
import torch

from ludic.models.adapters import AdapterSpec, LoraAdapter


def tuned(model: Any, spec: AdapterSpec, seed: int = 1, size: float = 0.05) -> LoraAdapter:
    """An adapter with random values: a new one has B = 0."""
    adapter = LoraAdapter.create(model, spec)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        adapter.flat.add_(torch.randn(adapter.flat.shape, generator=generator) * size)
    return adapter


def peft_model(model: Any, adapter: LoraAdapter) -> Any:
    """peft's model of the same adapter."""
    config = peft.LoraConfig(**adapter.peft_config("base"))
    config.inference_mode = False
    found = peft.get_peft_model(copy.deepcopy(model), config)
    peft.set_peft_model_state_dict(found, adapter.named())
    return found
