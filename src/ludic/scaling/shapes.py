"""The numbers of a decoder that decide what it costs, and where they come from: a config.json, or a name."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A dense decoder of the Llama family (Llama, Mistral, Qwen 2 and 3)."""

    name: str
    width: int
    """Of the hidden state."""
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False
    """One matrix is embedding and head."""
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    """Queries and keys are normed head by head (Qwen 3)."""

    def __post_init__(self) -> None:
        numbers = {
            "width": self.width, "mlp_width": self.mlp_width, "layers": self.layers, "heads": self.heads,
            "kv_heads": self.kv_heads, "head_dim": self.head_dim, "vocab": self.vocab,
        }  # fmt: skip
        wrong = [f"{name}={value!r}" for name, value in numbers.items() if not isinstance(value, int) or value < 1]
        if wrong:
            raise ConfigError(f"The shape {self.name} has {', '.join(wrong)}; all of them are whole numbers above 0.")

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def block_params(self) -> int:
        """Of one decoder block."""
        attention = self.width * (2 * self.q_width + 2 * self.kv_width)
        biases = self.qkv_bias * (self.q_width + 2 * self.kv_width) + self.out_bias * self.width
        biases += self.mlp_bias * (2 * self.mlp_width + self.width)
        norms = 2 * self.width + self.head_norms * 2 * self.head_dim
        return attention + 3 * self.width * self.mlp_width + biases + norms

    @property
    def root_params(self) -> int:
        """Everything else: embedding, last norm, head."""
        return self.vocab * self.width * (1 if self.is_tied else 2) + self.width

    @property
    def params(self) -> int:
        return self.layers * self.block_params + self.root_params

    @property
    def multiplied_params(self) -> int:
        """Those that every token is multiplied with; looking up an embedding costs nothing."""
        return self.layers * self.block_params + self.vocab * self.width

    def lora_params(self, rank: int) -> int:
        """Of an adapter on all linear layers of the blocks."""
        d, q, kv, f = self.width, self.q_width, self.kv_width, self.mlp_width
        return self.layers * rank * ((d + q) + 2 * (d + kv) + (q + d) + 3 * (d + f))


SMOLLM2_135M = ModelShape(
    name="135m", width=576, mlp_width=1536, layers=30, heads=9, kv_heads=3, head_dim=64, vocab=49_152, is_tied=True
)
QWEN_1_5B = ModelShape(
    name="1.5b", width=1536, mlp_width=8960, layers=28, heads=12, kv_heads=2, head_dim=128, vocab=151_936, is_tied=True,
    qkv_bias=True,
)  # fmt: skip
QWEN_7B = ModelShape(
    name="7b", width=3584, mlp_width=18_944, layers=28, heads=28, kv_heads=4, head_dim=128, vocab=152_064, qkv_bias=True
)
QWEN_32B = ModelShape(
    name="32b",
    width=5120,
    mlp_width=27_648,
    layers=64,
    heads=40,
    kv_heads=8,
    head_dim=128,
    vocab=152_064,
    qkv_bias=True,
)
LLAMA_70B = ModelShape(
    name="70b", width=8192, mlp_width=28_672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128_256
)
SHAPES = {shape.name: shape for shape in (SMOLLM2_135M, QWEN_1_5B, QWEN_7B, QWEN_32B, LLAMA_70B)}
"""SmolLM2-135M, Qwen2.5-1.5B, -7B and -32B, Llama-3.1-70B."""

_FAMILY = ("llama", "mistral", "qwen2", "qwen3")


def read_shape(source: str | Path) -> ModelShape:
    """A name from SHAPES, a config.json, or a folder with one in it."""
    known = SHAPES.get(str(source).lower())
    if known is not None:
        return known
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        near = difflib.get_close_matches(str(source).lower(), SHAPES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"No model {str(source)!r}: it is neither a config.json, nor a folder with one, nor a known shape "
            f"({', '.join(SHAPES)}).{hint} `ludic plan` fetches nothing; of a hub model, save its config.json first."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds {type(config).__name__}, not the settings of a model.")
    return shape_from_config(config, name=path.parent.name or str(path))


def shape_from_config(config: Mapping[str, Any], *, name: str) -> ModelShape:
    """From the contents of a transformers config.json."""
    kind = config.get("model_type")
    if kind not in _FAMILY:
        raise ConfigError(
            f"The model {name} is of type {kind!r}; the formulae hold for dense decoders of the types {', '.join(_FAMILY)}. "
            "Take the known shape nearest in size for a rough answer."
        )
    wanted = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in wanted if key not in config]
    if missing:
        raise ConfigError(f"The config of {name} lacks {', '.join(missing)}; is it the model's own config.json?")
    heads = config["num_attention_heads"]
    all_biased = kind in ("llama", "qwen3") and bool(config.get("attention_bias"))
    return ModelShape(
        name=name,
        width=config["hidden_size"],
        mlp_width=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        is_tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=kind == "qwen2" or all_biased,
        out_bias=all_biased,
        mlp_bias=bool(config.get("mlp_bias")),
        head_norms=kind == "qwen3",
    )
