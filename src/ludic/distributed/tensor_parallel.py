"""Tensor parallelism: transformers' own plan splits every weight matrix over the ranks.

All ranks compute the same samples, each a part of every layer, so a model may be larger than one GPU without being gathered.
It does not combine with FSDP, adapters or a critic.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ludic.distributed.ranks import Ranks
from ludic.types import ConfigError


def load_tensor_parallel(folder: str | Path, ranks: Ranks, *, dtype: torch.dtype | None = None) -> Any:
    """Load the causal language model of a folder or hub id, its layers split over all ranks."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    heads = config.get_text_config().num_key_value_heads
    if heads % ranks.world_size:
        raise ConfigError(
            f"{ranks.world_size} ranks cannot share the {heads} key/value heads of {folder}: the number of ranks must "
            f"divide it. Choose one of {[n for n in range(1, heads + 1) if heads % n == 0]}, or use FSDP (shard_model)."
        )
    with torch.device("meta"):
        plan = AutoModelForCausalLM.from_config(config).tp_plan
    if not plan:
        raise ConfigError(
            f"transformers has no tensor-parallel plan for {config.model_type}; shard it with FSDP (shard_model)."
        )
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        distributed_config=DistributedConfig(tp_plan="auto"),
        use_safetensors=True,
        trust_remote_code=False,
        **({} if dtype is None else {"dtype": dtype}),
    )
    model: Any = loaded
    return model


def is_tensor_parallel(model: nn.Module) -> bool:
    return not isinstance(model, FSDPModule) and any(isinstance(p, DTensor) for p in model.parameters())
