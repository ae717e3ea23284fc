"""The members of the Llama family, and where they differ, without torch. A new member is a line of `MEMBERS`."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from ludic.types import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class _LlamaMember:
    """One family of models that is computed as Llama is, but for these facts."""

    prefix: str
    """The beginning of the names of transformers' classes."""
    qkv_bias: bool = False
    """Queries, keys and values have biases."""
    may_bias_all: bool = False
    """A config may give biases to all projections of attention."""
    head_norms: bool = False
    """Queries and keys are normed head by head."""
    window: Literal["layer", "config"] | None = None
    """The place of the sliding window, if there may be one: on each attention layer, or in the config."""


MEMBERS: Mapping[str, _LlamaMember] = {
    "llama": _LlamaMember(prefix="Llama", may_bias_all=True),
    "mistral": _LlamaMember(prefix="Mistral", window="config"),
    "qwen2": _LlamaMember(prefix="Qwen2", qkv_bias=True, window="layer"),
    "qwen3": _LlamaMember(prefix="Qwen3", may_bias_all=True, head_norms=True, window="layer"),
}
"""`model_type` of a config → its member."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
"""The sizes that a config must name."""


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """A dense decoder of the Llama family (Llama, Mistral, Qwen 2 and 3)."""

    name: str
    width: int
    """Size of the hidden state."""
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

    @classmethod
    def of(cls, config: Mapping[str, Any], *, name: str) -> "LlamaShape":
        """The shape in the contents of a transformers config.json. KeyError for another family or a size that is missing."""
        kind, heads = config["model_type"], config["num_attention_heads"]
        member = MEMBERS[kind]
        all_biased = member.may_bias_all and bool(config.get("attention_bias"))
        return cls(
            name=name,
            width=config["hidden_size"],
            mlp_width=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab=config["vocab_size"],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=member.qkv_bias or all_biased,
            out_bias=all_biased,
            mlp_bias=bool(config.get("mlp_bias")),
            head_norms=member.head_norms,
        )

    def __post_init__(self) -> None:
        numbers = {f.name: getattr(self, f.name) for f in fields(self) if f.type is int}
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
        """Weights of one decoder block."""
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
    def cache_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, in bf16."""
        return 2 * self.layers * self.kv_width * 2

    @property
    def joined_bytes(self) -> int:
        """Bytes of the embedded engine's joined copies (queries, keys and values; gate and up), in bf16."""
        return 2 * self.layers * self.width * (self.q_width + 2 * self.kv_width + 2 * self.mlp_width)

    def lora_params(self, rank: int) -> int:
        """Weights of an adapter on all linear layers of the blocks."""
        d, q, kv, f = self.width, self.q_width, self.kv_width, self.mlp_width
        return self.layers * rank * ((d + q) + 2 * (d + kv) + (q + d) + 3 * (d + f))
