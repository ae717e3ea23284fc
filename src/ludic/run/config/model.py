"""Settings of the section model: which model, and how it is held."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from ludic.models import TINY
from ludic.run.config.entries import Section
from ludic.run.settings import may_change

Dtype: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


def is_served(model: str | None) -> bool:
    """True if a setting names a server instead of a model."""
    return model is not None and model.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Section):
    """The model, its adapter and the format of its weights."""

    model: str = "smollm2-135m"
    """A folder, a checkpoint or run, a hub id, a .gguf file, smollm2-135m; or random weights: a config.json, or tiny, with a
    token per character."""
    lora_rank: int = 0
    """Train a LoRA adapter of this rank; 0 trains all weights."""
    lora_alpha_mult: float = 2.0
    """LoRA's alpha, in units of the rank."""
    lora_experts: bool = False
    """Put the adapter of a mixture on its experts as well, each with its own matrices of that rank."""
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

    RANGES = ("lora_rank in [0, inf)", "lora_dropout in [0, 1)", "threads in [1, inf)", "lora_alpha_mult in (0, inf)")

    def problems(self) -> Iterator[str]:
        if self.lora_experts and (not self.lora_rank or self.lora_dropout):
            yield (
                f"lora_experts with lora_rank = {self.lora_rank} and lora_dropout = {self.lora_dropout}: adapters on experts need "
                "a rank, and cannot drop out. Give --lora-rank, and leave --lora-dropout out."
            )
        if self.quantize_base is not None and not self.lora_rank:
            yield (
                f"quantize_base = {self.quantize_base!r} holds a frozen base, but lora_rank = 0 trains all weights. Give "
                "--lora-rank."
            )

    @property
    def num_threads(self) -> int | None:
        return 1 if self.threads is None and self.model == TINY else self.threads
