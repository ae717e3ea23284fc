"""Facts about a model that decide what an engine for it looks like."""

from typing import Any

from ludic.inference.local.kv import KVShape
from ludic.inference.local.memory import free_memory
from ludic.types import ConfigError

_ROPE_BY_LENGTH = ("dynamic", "longrope")


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every token that the model or its tokenizer ends a sequence with."""
    found: set[int] = set()
    configured = getattr(model, "generation_config", None) or model.config
    eos = configured.eos_token_id
    found |= set(eos) if isinstance(eos, list) else set() if eos is None else {eos}
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def kv_shape(model: Any, heads: tuple[tuple[int, int], ...]) -> KVShape:
    weight = model.get_input_embeddings().weight
    return KVShape(heads=heads, dtype=weight.dtype, device=weight.device)


def num_blocks(
    shape: KVShape, block_size: int, fraction: float, kv_tokens: int | None, max_sequences: int, max_length: int
) -> int:
    """As many as the given number of tokens, or the given fraction of free memory, or all that could ever be used."""
    if block_size < 1:
        raise ConfigError(f"block_size={block_size}; a block holds at least one token.")
    if kv_tokens is None:
        affordable = int(free_memory(shape.device) * fraction) // shape.bytes_per_token
        kv_tokens = min(affordable, max_sequences * max_length)
    if kv_tokens < block_size:
        raise ConfigError(f"The KV cache would hold {kv_tokens} tokens; raise kv_tokens or kv_memory_fraction.")
    return -(-kv_tokens // block_size)


def check_rope(config: Any) -> None:
    """Refuse positions whose meaning depends on the longest sequence in the batch: nothing could be cached or shared."""
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else None
    kinds = [] if rope is None else [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    found = [kind["rope_type"] for kind in kinds if kind.get("rope_type") in _ROPE_BY_LENGTH]
    if found:
        raise ConfigError(
            f"Its rotary embedding is of the type {found[0]!r}, which changes with the longest sequence in the batch; the "
            "embedded engine cannot keep its promises with that. Serve it with vLLM, or set another rope_type."
        )
