"""Attention whose result for a query depends on its position and the tokens before it alone.

A query attends to its keys in blocks of `BLOCK` from position 0 on, the last one padded and masked. Scores, weights and outputs
of a block are products of one shape (`products.batch_product`); sums over blocks are added in order. Queries are computed in
tiles of rows, of any queries that see the same keys: prompts, decoded tokens and packed training differ in how full tiles are.
A block that lies behind a query adds exact zeros.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ludic.models.attention import AttentionRules, AttentionState
from ludic.models.packed_attention import to_device
from ludic_gpu.bitwise.products import batch_product
from ludic_gpu.bitwise.rows import tree_sum

BLOCK = 64
_SMALL, _LARGE = 8, 64
"""Rows of a tile: a decoded token has one query head or a few for each key head, a prompt fills large tiles."""
_CPU_ELEMENTS, _GPU_ELEMENTS = 1 << 21, 1 << 27
"""Scores, or gathered keys, in memory at a time."""


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive tokens of one sequence that attend."""

    first: int
    """Where its tokens are among the flat tokens of the forward pass."""
    start: int
    """Position of the first of them."""
    keys: np.ndarray
    """Where the keys of the sequence are stored, from position 0 to the last token of the span."""

    @property
    def num_queries(self) -> int:
        return len(self.keys) - self.start


# Letters: T flat tokens, S stored keys, H query heads, K key/value heads, G = H / K, D head size; N tiles, R rows of a tile,
# P pairs of a tile and a block of keys, B keys of a block, U blocks.
class BlockAttention:
    """Attention of the spans of one forward pass."""

    def __init__(self, spans: Sequence[Span], device: torch.device, *, zero: int) -> None:
        """`zero`: where zeros are stored, for the padding of the last blocks."""
        self._spans, self._device, self._zero = list(spans), device, zero
        self._tiles: dict[int, list[_Tiles]] = {}
        self.longest = max((len(span.keys) for span in self._spans), default=0)

    @torch.no_grad()
    def attend(self, query_THD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, rules: AttentionRules) -> Tensor:
        """[T, H, D]; tokens outside all spans get zeros."""
        num_tokens, num_heads, size = query_THD.shape
        group = num_heads // keys_SKD.shape[1]
        # Rows (token, query head of the group), and a last one for padding.
        rows_KQD = query_THD.float().view(num_tokens, -1, group, size).transpose(0, 1).flatten(1, 2)
        rows_KQD = F.pad(rows_KQD, (0, 0, 0, 1))
        out_KQD = torch.zeros_like(rows_KQD)
        for tiles in self._tiles_of(group, num_tokens, keys_SKD.shape[1], size):
            tiles.attend(rows_KQD, keys_SKD, values_SKD, rules, out_KQD)
        out_TKGD = out_KQD[:, :-1].unflatten(1, (num_tokens, group)).transpose(0, 1)
        return out_TKGD.reshape(num_tokens, num_heads, size).to(query_THD.dtype)

    def _tiles_of(self, group: int, num_tokens: int, num_kv: int, size: int) -> "list[_Tiles]":
        if group not in self._tiles:
            budget = (_CPU_ELEMENTS if self._device.type == "cpu" else _GPU_ELEMENTS) // (num_kv * BLOCK)
            self._tiles[group] = [
                _Tiles(part, rows, group, num_tokens * group, self._zero, self._device)
                for rows, found in self._cut(group, tile_rows(size, self._device)).items()
                for part in _parts(found, budget // max(rows, size))
            ]
        return self._tiles[group]

    def _cut(self, group: int, sizes: tuple[int, ...]) -> "dict[int, list[_Tile]]":
        """All spans in the largest tiles, and the rest of each in small ones; tiles that see most blocks first."""
        found: dict[int, list[_Tile]] = {rows: [] for rows in sizes}
        small, large = sizes[0], sizes[-1]
        for span in self._spans:
            num_rows = span.num_queries * group
            rest = num_rows - num_rows % large
            for first, end in pairwise([*range(0, rest, large), *range(rest, num_rows, small), num_rows]):
                last = span.start + (end - 1) // group
                found[large if end - first == large else small].append(_Tile(span, first, end, last // BLOCK + 1))
        for tiles in found.values():
            tiles.sort(key=lambda tile: -tile.num_blocks)
        return found


def tile_rows(size: int, device: torch.device) -> tuple[int, ...]:
    """Rows of tiles for heads of this size, after a test that rows get the same bits in all of them; large tiles are optional."""
    return _checked_tiles(size, device, torch.get_num_threads() if device.type == "cpu" else 0)


@cache
def _checked_tiles(size: int, device: torch.device, num_threads: int) -> tuple[int, ...]:
    generator = torch.Generator(device).manual_seed(size)
    for num_in, num_out in ((size, BLOCK), (BLOCK, size)):
        left, right = (
            torch.randn(16, *shape, generator=generator, device=device)
            for shape in ((_LARGE, num_in), (num_in, num_out))
        )
        cut = left.unflatten(1, (-1, _SMALL)).flatten(0, 1)
        in_small = batch_product(cut, right.repeat_interleave(_LARGE // _SMALL, 0))
        if not torch.equal(batch_product(left, right), in_small.view(16, _LARGE, num_out)):
            return (_SMALL,)
    return (_SMALL, _LARGE)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Rows `first` … `end` of a span, counted by query head."""

    span: Span
    first: int
    end: int
    num_blocks: int


def _parts(tiles: list[_Tile], max_pairs: int) -> list[list[_Tile]]:
    """Consecutive tiles with at most so many pairs of a tile and a block, or one tile."""
    parts: list[list[_Tile]] = []
    room = 0
    for tile in tiles:
        if room < tile.num_blocks:
            parts.append([])
            room = max_pairs
        parts[-1].append(tile)
        room -= tile.num_blocks
    return parts


class _Tiles:
    """Tiles of one size that are computed together, and where their rows and keys are."""

    def __init__(
        self, tiles: Sequence[_Tile], num_rows: int, group: int, padding: int, zero: int, device: torch.device
    ) -> None:
        rows_NR = np.full((len(tiles), num_rows), padding, dtype=np.int64)
        positions_NR = np.zeros((len(tiles), num_rows), dtype=np.int64)
        blocks: list[np.ndarray] = []
        first_of: dict[int, int] = {}
        blocks_of_tile: list[int] = []
        for i, tile in enumerate(tiles):
            span = tile.span
            own = np.arange(tile.first, tile.end)
            rows_NR[i, : len(own)] = span.first * group + own
            positions_NR[i, : len(own)] = span.start + own // group
            if id(span) not in first_of:  # its first tile here sees the most blocks
                first_of[id(span)] = len(blocks)
                keys = np.full(tile.num_blocks * BLOCK, zero, dtype=np.int64)
                seen = span.keys[: len(keys)]
                keys[: len(seen)] = seen
                blocks += list(keys.reshape(-1, BLOCK))
            blocks_of_tile.append(first_of[id(span)])
        self._num_blocks = [tile.num_blocks for tile in tiles]
        # Pairs in the order of blocks: the pairs of block b are those of the first tiles.
        numbers = np.array(self._num_blocks)
        self._counts = [int((numbers > b).sum()) for b in range(self._num_blocks[0])]
        tile_P = np.concatenate([np.arange(count) for count in self._counts])
        block_P = np.repeat(np.arange(len(self._counts)), self._counts)
        self._rows_NR = to_device(rows_NR, device)
        self._tile_P = to_device(tile_P, device)
        keys_UB, own_P = np.stack(blocks), np.array(blocks_of_tile)[tile_P] + block_P
        is_shared = len(own_P) > len(keys_UB)  # by several tiles; else every pair gathers its own block
        self._keys_UB = to_device(keys_UB if is_shared else keys_UB[own_P], device)
        self._block_P = to_device(own_P, device) if is_shared else None
        self._positions_NR = to_device(positions_NR, device)
        self._starts_P = to_device(block_P * BLOCK, device)
        self._hidden: dict[int | None, Tensor] = {}

    def attend(
        self, rows_KQD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, rules: AttentionRules, out_KQD: Tensor
    ) -> None:
        tile_NKRD = rows_KQD[:, self._rows_NR].transpose(0, 1)
        scores_PKRB = self._product(tile_NKRD[self._tile_P], keys_SKD, (0, 2, 3, 1)) * rules.scaling
        scores_PKRB = scores_PKRB.masked_fill_(self._is_hidden(rules.sliding_window), float("-inf"))
        highest_NKR = self._over_blocks(scores_PKRB.amax(dim=-1), torch.maximum)
        weights_PKRB = scores_PKRB.sub_(highest_NKR[self._tile_P][..., None]).exp_()
        total_NKR1 = self._over_blocks(tree_sum(weights_PKRB), torch.add)
        out_NKRD = self._over_blocks(self._product(weights_PKRB, values_SKD, (0, 2, 1, 3)), torch.add) / total_NKR1
        # All padding goes to the last row, which no token has.
        out_KQD[:, self._rows_NR] = out_NKRD.transpose(0, 1)

    def _product(self, left_PKRX: Tensor, store_SKD: Tensor, order: tuple[int, int, int, int]) -> Tensor:
        """Of the rows of every pair with its block of keys (transposed) or values."""
        blocks = store_SKD[self._keys_UB].float().permute(order).contiguous()  # [U, K, D, B] or [U, K, B, D]
        right_PKXY = blocks if self._block_P is None else blocks[self._block_P]
        found = batch_product(left_PKRX.flatten(0, 1), right_PKXY.flatten(0, 1))
        return found.unflatten(0, left_PKRX.shape[:2])

    def _over_blocks(self, x_P: Tensor, merge: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """From values of pairs to values of tiles, block after block."""
        first, *others = x_P.split(self._counts)
        total_N = first.clone()
        for count, own in zip(self._counts[1:], others, strict=True):
            total_N[:count] = merge(total_N[:count], own)
        return total_N

    def _is_hidden(self, window: int | None) -> Tensor:
        """[P, 1, R, B]: keys that a row does not see."""
        if window not in self._hidden:
            positions_PR1 = self._positions_NR[self._tile_P][..., None]
            keys_P1B = (self._starts_P[:, None] + torch.arange(BLOCK, device=self._starts_P.device))[:, None]
            is_hidden = keys_P1B > positions_PR1
            if window is not None:
                is_hidden |= keys_P1B <= positions_PR1 - window
            self._hidden[window] = is_hidden[:, None]
        return self._hidden[window]


# --- training ---


class TrainedAttention:
    """`AttentionState` of a packed batch: values by blocks, gradients by the usual attention of the same batch."""

    def __init__(self, spans: Sequence[Span], num_tokens: int, usual: AttentionState, device: torch.device) -> None:
        self._blocks, self._usual = BlockAttention(spans, device, zero=num_tokens), usual
        self.longest = self._blocks.longest

    def attend(
        self, layer: int, query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor, rules: AttentionRules
    ) -> Tensor:
        def usual(query_THD: Tensor, key_TKD: Tensor, value_TKD: Tensor) -> Tensor:
            return self._usual.attend(layer, query_THD, key_TKD, value_TKD, rules)

        out: Tensor = _Attention.apply(query_THD, key_TKD, value_TKD, self._blocks, usual, rules)
        return out


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_THD: Tensor,
        key_TKD: Tensor,
        value_TKD: Tensor,
        blocks: BlockAttention,
        usual: Callable[..., Tensor],
        rules: AttentionRules,
    ) -> Tensor:
        ctx.save_for_backward(query_THD, key_TKD, value_TKD)
        ctx.usual = usual
        keys, values = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key_TKD, value_TKD))  # zeros at the end
        return blocks.attend(query_THD, keys, values, rules)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THD: Tensor) -> Any:
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out_THD = ctx.usual(*inputs)
        return *torch.autograd.grad(out_THD, inputs, grad_THD), None, None, None
