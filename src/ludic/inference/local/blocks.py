"""The allocator of KV blocks: sharing by prefix, eviction. It holds numbers only; `kv.py` holds the tensors.

A sequence's keys and values are in blocks of `block_size` tokens. A full block never changes again, so it can be shared: it is
published under (policy version, adapter, all tokens up to its end), and the next sequence with the same beginning uses it
instead of computing it. Unused blocks stay published until their space is needed, least recently used first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from ludic.types import ConfigError

Chain = int
"""Id of a whole prefix: the number of a (parent chain, tokens of a block) pair, so that prefixes never collide."""


class BlockPool:
    """Reference-counted blocks with an index of published prefixes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(f"BlockPool(num_blocks={num_blocks}, block_size={block_size}): both must be positive.")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Published blocks without users, least recently used first."""
        self._chains: dict[tuple[Chain, bytes], Chain] = {}
        self._block_of: dict[Chain, int] = {}
        self._published_as: dict[int, tuple[Chain, tuple[Chain, bytes]]] = {}
        self._next_chain = 1

    # --- counting ---

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: free ones and idle published ones."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_with_users(self, blocks: Sequence[int]) -> int:
        """The number of them in use: sharing them takes nothing."""
        return sum(self._users[block] > 0 for block in blocks)

    # --- allocation ---

    def take(self, count: int) -> list[int] | None:
        """`count` blocks for one user, or None (and nothing is allocated) if there are fewer."""
        if count > self.num_available:
            return None
        taken = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._idle.popitem(last=False)
                self._unpublish(block)
            self._users[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a user to blocks found by `match`."""
        for block in blocks:
            if self._users[block] == 0:
                del self._idle[block]
            self._users[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """Remove a user. Later blocks of a prefix are evicted before earlier ones, which more sequences share."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._published_as:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    # --- sharing ---

    def root(self, version: int, adapter: int = 0) -> Chain:
        """The empty prefix under one policy version and the adapter of this number; 0 is none."""
        return self._chain(0, b"".join(number.to_bytes(8, "little", signed=True) for number in (version, adapter)))

    def match(self, version: int, tokens: bytes, token_bytes: int, adapter: int = 0) -> tuple[list[int], Chain]:
        """Blocks that hold the longest published prefix of `tokens` (raw array bytes), and its chain."""
        chain, found = self.root(version, adapter), []
        step = self.block_size * token_bytes
        for start in range(0, len(tokens) - step + 1, step):
            following = self._chains.get((chain, tokens[start : start + step]))
            block = self._block_of.get(following) if following is not None else None
            if following is None or block is None:
                break
            found.append(block)
            chain = following
        return found, chain

    def publish(self, block: int, parent: Chain, tokens: bytes) -> Chain:
        """Publish a full block. If the same prefix is already published, the older block keeps the id."""
        chain = self._chain(parent, tokens)
        if chain not in self._block_of and block not in self._published_as:
            self._block_of[chain] = block
            self._published_as[block] = (chain, (parent, tokens))
        return chain

    def forget_all(self) -> None:
        """Invalidate all published prefixes (new weights). Blocks in use stay with their users."""
        for block in list(self._published_as):
            self._unpublish(block)
        self._free.extend(self._idle)
        self._idle.clear()
        self._chains.clear()

    def _chain(self, parent: Chain, tokens: bytes) -> Chain:
        key = (parent, tokens)
        chain = self._chains.get(key)
        if chain is None:
            chain = self._next_chain
            self._next_chain += 1
            self._chains[key] = chain
        return chain

    def _unpublish(self, block: int) -> None:
        chain, key = self._published_as.pop(block)
        del self._block_of[chain]
        # Longer prefixes keep their ids but are never found again: if this block is published again it gets a new id,
        # because an id is never reused.
        self._chains.pop(key, None)


# How the rows of a decoding round read their blocks on a GPU.

GROUP_ROWS, MIN_GROUP = 16, 4
"""Rows that read a shared prefix together: a larger group is cut, a smaller one reads row by row."""


MAX_SPLITS = 8


def num_splits(num_programs: int, num_processors: int, mean_length: float) -> int:
    """Into how many parts to cut each row's tokens, if whole rows take `num_programs` programs on `num_processors`.

    Few rows do not fill the GPU. Long ones are cut further, so that every processor reads about as much; for short ones the merge
    costs more. Measured on an H200 with 16 to 1,024 rows of 1.5B, 7B and 135M models.
    """
    wanted = num_processors * (2 if mean_length < 384 else 12)
    splits = 1
    while splits < MAX_SPLITS and num_programs * splits < wanted:
        splits *= 2
    return splits


def shared_prefixes(blocks: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Groups of rows whose first blocks are the same, and how many blocks that are; a row is in one group at most.

    Where a large group shares little and parts of it share more, it takes what saves more reads.
    """
    found = [group for rows in _equal_at(0, range(len(blocks)), blocks) for group in _best_groups(rows, blocks)]
    return [group for group in found if len(group[0]) >= MIN_GROUP]


def _best_groups(rows: list[int], blocks: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    lists = [blocks[row] for row in rows]
    low, high = min(lists), max(lists)
    depth = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    cut = [(rows[i : i + GROUP_ROWS], depth) for i in range(0, len(rows), GROUP_ROWS)]
    deeper = [group for part in _equal_at(depth, rows, blocks) for group in _best_groups(part, blocks)]
    return max(cut, deeper, key=lambda groups: sum((len(r) - 1) * n for r, n in groups if len(r) >= MIN_GROUP))


def _equal_at(depth: int, rows: Iterable[int], blocks: Sequence[list[int]]) -> list[list[int]]:
    """Rows with the same block at this place, at least `MIN_GROUP` of them."""
    by_block: dict[int, list[int]] = {}
    for row in rows:
        if len(blocks[row]) > depth:
            by_block.setdefault(blocks[row][depth], []).append(row)
    return [part for part in by_block.values() if len(part) >= MIN_GROUP]
