"""The tensors behind the block pool, attention of prompts over them on a CPU, and the size of the cache.

Keys and values of every token are in a pool of slots (slot = block × block size + offset).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ludic.inference.local.sequence import Sequence
from ludic.models.attention import AttentionRules, explicit_attention
from ludic.models.packed_attention import to_device
from ludic.types import ConfigError

# Letters: T flat tokens, L context length, B spans, H query heads, K key/value heads, D head size, S slots.


@dataclass(frozen=True, kw_only=True, slots=True)
class KVShape:
    """Shape and dtype of one token's keys and values in every layer."""

    heads: tuple[tuple[int, int], ...]
    """(K, D) of each layer."""
    dtype: torch.dtype
    device: torch.device
    experts: tuple[int, int] | None = None
    """(mixture layers, experts per token), if the experts of every token are recorded."""

    @property
    def bytes_per_token(self) -> int:
        recorded = 0 if self.experts is None else math.prod(self.experts) * torch.int16.itemsize
        return sum(2 * k * d for k, d in self.heads) * self.dtype.itemsize + recorded


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
        self.experts: Tensor | None = None
        """[S, mixture layers, experts per token] of the tokens whose keys and values are in the slots, if they are recorded."""
        if shape.experts is not None:
            self.experts = torch.full((num_slots, *shape.experts), -1, dtype=torch.int16, device=shape.device)

    def slots(self, blocks: list[int], start: int, end: int) -> Tensor:
        """Slots of tokens start … end of a sequence with these blocks."""
        first = start // self.block_size
        table = torch.tensor(blocks[first : -(-end // self.block_size)], dtype=torch.long)
        offsets = torch.arange(self.block_size)
        flat = (table[:, None] * self.block_size + offsets).flatten()
        return flat[start - first * self.block_size : end - first * self.block_size]

    def copy(self, sources_N: Tensor, targets_N: Tensor) -> None:
        """Copy slots to other slots, in every layer."""
        for store in (*self.keys, *self.values, *([] if self.experts is None else [self.experts])):
            store[targets_N] = store[sources_N]

    def copy_last_blocks(self, pairs: Iterable[tuple[Sequence, Sequence]]) -> None:
        """From the first to the second of sequences with equal tokens, copy what follows the full blocks, which they share."""
        found = []
        for source, copy in pairs:
            end = len(copy.tokens)
            start = end - end % self.block_size
            found.append(torch.stack([self.slots(own.blocks, start, end) for own in (source, copy)]))
        sources_N, targets_N = to_device(torch.cat(found, dim=1).numpy(), self.shape.device)
        self.copy(sources_N, targets_N)

    def experts_of(self, blocks: list[int], num_tokens: int) -> np.ndarray[Any, Any] | None:
        """The recorded experts of a sequence's first tokens; None if they are not recorded."""
        if self.experts is None:
            return None
        slots = self.slots(blocks, 0, num_tokens).to(self.experts.device)
        return self.experts.index_select(0, slots).cpu().numpy()


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a flat prefill: its tokens `start` … `end`, at `flat` in the batch."""

    flat: int
    start: int
    end: int
    slots_L: Tensor
    """Slots of the tokens before `start`; empty at the beginning of a sequence."""


KEY_MULTIPLE, QUERY_BLOCK = 32, 32
_QUERIES_PER_CALL = 64
"""Queries of a prompt that attend in one call, to the keys up to the last of them: about half of all pairs are masked, and
most of these are never computed."""


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
        self._new_slots_T = new_slots_T
        alike: dict[tuple[int, int], list[Span]] = {}
        for span in spans:
            alike.setdefault((span.start, _padded_queries(span.end - span.start)), []).append(span)
        self._groups = [_SpanGroup(spans, num_queries, new_slots_T) for (_, num_queries), spans in alike.items()]
        self.is_plain = True
        """True if no layer has had a sliding window, soft-capped scores or sinks."""

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        self.is_plain &= rules.sliding_window is None and rules.softcap is None and rules.sinks_H is None
        keys, values = key_TKD, value_TKD
        if self._pool is not None and self._new_slots_T is not None:
            keys, values = self._pool.keys[layer], self._pool.values[layer]
            keys.index_copy_(0, self._new_slots_T, key_TKD)
            values.index_copy_(0, self._new_slots_T, value_TKD)
        out_THD = torch.zeros_like(query_THD)
        for group in self._groups:
            group.attend(query_THD, keys, values, rules, out_THD)
        return out_THD


def _padded_queries(num_queries: int) -> int:
    """A power of two up to a block, then whole blocks: prompts of similar lengths attend together."""
    if num_queries > QUERY_BLOCK:
        return -(-num_queries // QUERY_BLOCK) * QUERY_BLOCK
    return max(2, 1 << (num_queries - 1).bit_length())


class _SpanGroup:
    """Spans with one start and about one length, B of them."""

    def __init__(self, spans: list[Span], num_queries: int, new_slots_T: Tensor | None) -> None:
        self._start, self._num_queries = spans[0].start, num_queries
        lengths = [span.end - span.start for span in spans]
        num_keys = padded_length(self._start + num_queries)
        # Padding repeats tokens of the span: as queries their results are dropped, as keys they are masked.
        flat = [span.flat + torch.arange(num_queries).clamp_(max=n - 1) for span, n in zip(spans, lengths, strict=True)]
        self._queries_BT = torch.stack(flat)
        self._flat_N, self._kept_N = self._queries_BT.flatten(), None
        if min(lengths) < num_queries:
            self._kept_N = (torch.arange(num_queries) < torch.tensor(lengths)[:, None]).flatten().nonzero()[:, 0]
            self._flat_N = self._flat_N[self._kept_N]
        new = [torch.arange(span.flat, span.flat + n) for span, n in zip(spans, lengths, strict=True)]
        if new_slots_T is not None:
            new = [torch.cat([span.slots_L.long(), new_slots_T[own]]) for span, own in zip(spans, new, strict=True)]
        self._keys_BL = torch.stack([F.pad(own[None], (0, num_keys - len(own)), "replicate")[0] for own in new])
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, query_THD: Tensor, keys: Tensor, values: Tensor, rules: AttentionRules, out_THD: Tensor) -> None:
        query_BHTD = query_THD[self._queries_BT].transpose(1, 2)
        key_BKLD, value_BKLD = (x[self._keys_BL].transpose(1, 2) for x in (keys, values))
        mask = self._mask(rules.sliding_window)
        parts = []
        for first in range(0, self._num_queries, _QUERIES_PER_CALL):
            here = slice(first, min(first + _QUERIES_PER_CALL, self._num_queries))
            seen = slice(padded_length(self._start + here.stop))
            parts.append(
                _attend(query_BHTD[:, :, here], key_BKLD[:, :, seen], value_BKLD[:, :, seen], mask[here, seen], rules)
            )
        out_BTHD = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)).transpose(1, 2)
        out_NHD = out_BTHD.flatten(0, 1)
        out_THD.index_copy_(0, self._flat_N, out_NHD if self._kept_N is None else out_NHD[self._kept_N])

    def _mask(self, window: int | None) -> Tensor:
        """Query i of a span sees itself and what precedes it, within the window; what pads a span comes last."""
        if window not in self._masks:
            positions_T = torch.arange(self._start, self._start + self._num_queries)[:, None]
            positions_L = torch.arange(self._keys_BL.shape[1])[None]
            mask = positions_L <= positions_T
            if window is not None:
                mask &= positions_L > positions_T - window
            # An additive mask: SDPA would convert a boolean one in every layer.
            self._masks[window] = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        return self._masks[window]


def _attend(query_BHTD: Tensor, key_BKLD: Tensor, value_BKLD: Tensor, mask_TL: Tensor, rules: AttentionRules) -> Tensor:
    if rules.softcap is None and rules.sinks_H is None:
        out: Tensor = F.scaled_dot_product_attention(
            query_BHTD, key_BKLD, value_BKLD, attn_mask=mask_TL, scale=rules.scaling, enable_gqa=True
        )
        return out
    return explicit_attention(query_BHTD, key_BKLD, value_BKLD, mask_TL, rules)


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
    bytes_per_token: int,
    device: torch.device,
    block_size: int,
    *,
    fraction: float,
    kv_tokens: int | None,
    most: int,
    reserved: int = 0,
) -> int:
    """Blocks for `kv_tokens`, else for a fraction of the free memory less the `reserved` bytes, and for at most `most` tokens."""
    if block_size < 1:
        raise ConfigError(f"block_size={block_size}; it must be at least 1.")
    if kv_tokens is None:
        free = free_memory(device)
        if reserved >= free:
            raise ConfigError(
                f"The recurrent states of all sequences take {reserved / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free; lower "
                "max_sequences (--concurrency)."
            )
        kv_tokens = min(int((free - reserved) * fraction) // max(bytes_per_token, 1), most)
    if kv_tokens < block_size:
        raise ConfigError(f"The KV cache would hold {kv_tokens} tokens; raise kv_tokens or kv_memory_fraction.")
    return -(-kv_tokens // block_size)


def rope_limit(config: Any) -> int | None:
    """Tokens up to which the rotary embedding is the same for every sequence; None without such a limit.

    "dynamic" and "longrope" change the frequencies of all positions once the longest sequence of a batch is longer than this:
    keys in a cache would then belong to other frequencies.
    """
    rope = getattr(config, "rope_parameters", None)
    kinds = [] if rope is None else [rope] if "rope_type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    found = [kind for kind in kinds if kind.get("rope_type") in _ROPE_BY_LENGTH]
    original = getattr(config, "original_max_position_embeddings", None)
    limits = [
        (kind["rope_type"] == "longrope" and (kind.get("original_max_position_embeddings") or original))
        or config.max_position_embeddings
        for kind in found
    ]
    return min(limits) if limits else None
