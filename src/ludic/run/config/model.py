"""Settings of the section model: which model, and how it is held."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ludic.models import TINY
from ludic.run.config.entries import at_least
from ludic.run.settings import may_change
from ludic.types import ConfigError

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


def is_served(model: str | None) -> bool:
    """Whether a setting names a server instead of a model."""
    return model is not None and model.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """Which model, and how it is held."""

    model: str = "smollm2-135m"
    """A folder, a checkpoint or run, a hub id, a .gguf file, smollm2-135m; or random weights: a config.json, or tiny, with a
    token per character."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank; 0 trains all weights."""
    lora_alpha_mult: float = 2.0
    """LoRA's alpha, in units of the rank."""
    lora_experts: bool = False
    """Of a mixture: the adapter is on the experts, too, each with its own matrices of that rank."""
    lora_dropout: float = 0.0
    """Dropout before the adapter, while training."""
    quantize_base: Literal["4bit"] | None = None
    """With --lora-rank: hold the frozen base in four bits (QLoRA; the package bitsandbytes)."""
    freeze_vision: bool = False
    """Do not train the vision tower of a vision-language model. An adapter is never put on it."""
    fork_from: Path | None = None
    """Checkpoint of another run, or its run folder, to take the weights of (and nothing else)."""
    dtype: Dtype = "auto"
    """Number format of the weights; auto is what the hardware is fast at."""
    device: str | None = may_change(None)
    """cpu, cuda, cuda:1. Default: the GPU if there is one."""
    threads: int | None = may_change(None)
    """CPU threads of PyTorch. Default: 1 for the tiny model, else PyTorch's own choice."""

    def __post_init__(self) -> None:
        at_least(0, lora_rank=self.lora_rank)
        if not 0 <= self.lora_dropout < 1:
            raise ConfigError(f"lora_dropout = {self.lora_dropout}; it is a share of the values, from 0 to below 1.")
        at_least(1, threads=self.threads)
        if self.lora_experts and (not self.lora_rank or self.lora_dropout):
            raise ConfigError(
                f"lora_experts with lora_rank = {self.lora_rank} and lora_dropout = {self.lora_dropout}: adapters on experts need "
                "a rank, and cannot drop out. Give --lora-rank, and leave --lora-dropout out."
            )
        if self.lora_alpha_mult <= 0:
            raise ConfigError(f"lora_alpha_mult = {self.lora_alpha_mult}; it must be above 0.")
        if self.quantize_base is not None and not self.lora_rank:
            raise ConfigError(
                f"quantize_base = {self.quantize_base!r} holds a frozen base, but lora_rank = 0 trains all weights. Give "
                "--lora-rank."
            )

    @property
    def num_threads(self) -> int | None:
        return 1 if self.threads is None and self.model == TINY else self.threads
