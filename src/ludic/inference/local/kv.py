"""The tensors behind the block pool, attention of prompts over them on a CPU, and the size of the cache.

Keys and values of every token are in a pool of slots (slot = block × block size + offset).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.models.attention import AttentionRules, softcapped_attention
from ludic.types import ConfigError

# Letters: T flat tokens, L context length, R rows, H query heads, K key/value heads, D head size, S slots.


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape and dtype of one token's keys and values in every layer."""

    heads: tuple[tuple[int, int], ...]
    """(K, D) of each layer."""
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return sum(2 * k * d for k, d in self.heads) * self.dtype.itemsize


class KVPool:
    """One [S, K, D] tensor of keys and one of values per layer. Padding writes to the scratch block after the last block."""

    def __init__(self, shape: KVShape, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        self.scratch_slot = num_blocks * block_size
        self.zero_slot = self.scratch_slot + block_size
        """Never written; always zero."""
        num_slots = self.zero_slot + 1
        make = lambda k, d: torch.zeros(num_slots, k, d, dtype=shape.dtype, device=shape.device)  # noqa: E731
        self.keys = [make(k, d) for k, d in shape.heads]
        self.values = [make(k, d) for k, d in shape.heads]

    def slots(self, blocks: list[int], start: int, end: int) -> Tensor:
        """Slots of tokens start … end of a sequence with these blocks."""
        first = start // self.block_size
        table = torch.tensor(blocks[first : -(-end // self.block_size)], dtype=torch.long)
        offsets = torch.arange(self.block_size)
        flat = (table[:, None] * self.block_size + offsets).flatten()
        return flat[start - first * self.block_size : end - first * self.block_size]

    def copy(self, sources_N: Tensor, targets_N: Tensor) -> None:
        """Copy slots to other slots, in every layer."""
        for store in (*self.keys, *self.values):
            store[targets_N] = store[sources_N]


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a flat prefill: its tokens `start` … `end`, at `flat` in the batch."""

    flat: int
    start: int
    end: int
    slots_L: Tensor
    """Slots of the tokens before `start`; empty at the beginning of a sequence."""


KEY_MULTIPLE, QUERY_BLOCK = 32, 32


def padded_length(num_keys: int) -> int:
    """Number of keys that attention computes with, including masked ones at the end.

    Loops over keys end in a remainder that is summed in another order. With whole multiples the remainder holds only masked
    keys, so a token's result does not depend on how many keys its neighbours have. For the same reason a block of queries
    (SDPA takes 32, 64 or 256) never holds a single query, which would take another kernel.
    """
    return -(-num_keys // KEY_MULTIPLE) * KEY_MULTIPLE


class PrefillState:
    """Attention of several prompts (or parts of them) in one flat batch."""

    def __init__(self, pool: KVPool | None, spans: list[Span], new_slots_T: Tensor | None) -> None:
        self._pool = pool
        self._spans = spans
        self._new_slots_T = new_slots_T
        self.is_plain = True
        """Whether no layer has had a sliding window or soft-capped scores."""

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        self.is_plain &= rules.sliding_window is None and rules.softcap is None
        out_THD = torch.zeros_like(query_THD)
        if self._pool is not None and self._new_slots_T is not None:
            self._pool.keys[layer].index_copy_(0, self._new_slots_T, key_TKD)
            self._pool.values[layer].index_copy_(0, self._new_slots_T, value_TKD)
        for span in self._spans:
            here = slice(span.flat, span.flat + span.end - span.start)
            key, value = key_TKD[here], value_TKD[here]
            if span.start and self._pool is not None:
                key = torch.cat([self._pool.keys[layer][span.slots_L], key])
                value = torch.cat([self._pool.values[layer][span.slots_L], value])
            query_HTD, key_KLD, value_KLD = (x.transpose(0, 1) for x in (query_THD[here], key, value))
            num_queries, num_keys = query_HTD.shape[1], key_KLD.shape[1]
            query_HTD = F.pad(query_HTD, (0, 0, 0, num_queries % QUERY_BLOCK == 1))
            missing = padded_length(num_keys) - num_keys
            key_KLD, value_KLD = F.pad(key_KLD, (0, 0, 0, missing)), F.pad(value_KLD, (0, 0, 0, missing))
            mask = _causal_mask(span, query_HTD.shape[1], key_KLD.shape[1], rules.sliding_window)
            out_THD[here] = _attend(query_HTD, key_KLD, value_KLD, mask, rules)[:, :num_queries].transpose(0, 1)
        return out_THD


def _causal_mask(span: Span, num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """Query i of the span sees itself and what precedes it, within the window; padding comes last."""
    positions_T = torch.arange(span.start, span.start + num_queries)[:, None]
    positions_L = torch.arange(num_keys)[None]
    mask = positions_L <= positions_T
    if window is not None:
        mask &= positions_L > positions_T - window
    return mask


def _attend(query_HTD: Tensor, key_KLD: Tensor, value_KLD: Tensor, mask: Tensor, rules: AttentionRules) -> Tensor:
    if rules.softcap is None:
        out: Tensor = F.scaled_dot_product_attention(
            query_HTD[None], key_KLD[None], value_KLD[None], attn_mask=mask, scale=rules.scaling, enable_gqa=True
        )
        return out[0]
    return softcapped_attention(query_HTD, key_KLD, value_KLD, mask, rules.scaling, rules.softcap)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on this device now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 4 << 30


_ROPE_BY_LENGTH = ("dynamic", "longrope")


def eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """All end-of-sequence tokens of the model and its tokenizer."""
    eos = (getattr(model, "generation_config", None) or model.config).eos_token_id
    found = {*eos} if isinstance(eos, list) else {eos}
    if tokenizer is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found - {None})


def num_blocks(
    shape: KVShape, block_size: int, fraction: float, kv_tokens: int | None, max_sequences: int, max_length: int
) -> int:
    """Blocks for `kv_tokens`, else for a fraction of free memory, at most all that could ever be used."""
    if block_size < 1:
        raise ConfigError(f"block_size={block_size}; it must be at least 1.")
    if kv_tokens is None:
        affordable = int(free_memory(shape.device) * fraction) // shape.bytes_per_token
        kv_tokens = min(affordable, max_sequences * max_length)
    if kv_tokens < block_size:
        raise ConfigError(f"The KV cache would hold {kv_tokens} tokens; raise kv_tokens or kv_memory_fraction.")
    return -(-kv_tokens // block_size)


def check_rope(config: Any) -> None:
    """Raise for rotary embeddings that depend on the longest sequence in the batch: nothing could be cached or shared."""
    rope = config.rope_parameters if hasattr(config, "rope_parameters") else None
    kinds = [] if rope is None else [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    found = [kind["rope_type"] for kind in kinds if kind.get("rope_type") in _ROPE_BY_LENGTH]
    if found:
        raise ConfigError(
            f"The model's rotary embedding has rope_type {found[0]!r}, which changes with the longest sequence in the batch, so "
            "the embedded engine cannot cache keys. Serve it with vLLM, or set another rope_type."
        )
