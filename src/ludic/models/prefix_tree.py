"""Shared prefixes computed once: samples laid out as a tree of tokens.

The samples of a group begin with the same prompt, and the turns of an episode with the same history. `TokenTree` holds every
shared token once, in depth-first order. A token sees its ancestors only, so each sample's hidden states and gradients are
those of the sample alone; the gradients of all samples that share a token add up in it.

Start with `TokenTree.of`. Attention over it is in `packed_attention.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np

T = TypeVar("T")

MIN_SHARED = 16
"""Shorter common beginnings are computed once per sample: a branch costs a separate attention call. See `_is_worth`."""


class Branch(NamedTuple):
    """Neighbouring subtrees that leave a chain at one token. Each of their tokens sees that part of the chain."""

    start: int
    stop: int
    chain_start: int
    chain_stop: int


# Letters: T tokens of the tree, C chains.
@dataclass(frozen=True)
class TokenTree:
    """Samples in depth-first order, with every shared token once.

    A chain is a stretch of tokens that each continue the one before: the tree's trunk, then a branch and its continuation, and
    so on. The child that most samples pass through continues the chain, so few chains lie on any path.
    """

    ids_T: np.ndarray
    positions_T: np.ndarray
    """Position of each token in its samples: they restart at every branch."""
    paths: list[np.ndarray]
    """For each sample, in the order given: where its tokens are."""
    starts_C: np.ndarray
    stops_C: np.ndarray
    above_C: np.ndarray
    """The token that a chain continues; −1 for a root. Chains lie end to end, and the one that is continued comes first."""

    @classmethod
    def of(cls, samples: Sequence[np.ndarray], min_shared: int = MIN_SHARED) -> "TokenTree":
        """Lay out these token ids."""
        paths: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * len(samples)
        parts: list[np.ndarray] = []
        before = np.empty(0, dtype=np.int64)
        size = 0
        for i, num_shared in _most_shared_first(samples, min_shared):
            num_new = len(samples[i]) - num_shared
            paths[i] = before = np.concatenate([before[:num_shared], np.arange(size, size + num_new)])
            parts.append(samples[i][num_shared:])
            size += num_new
        parent_T = np.full(size, -1, dtype=np.int64)
        positions_T = np.empty(size, dtype=np.int64)
        for path in paths:
            parent_T[path[1:]] = path[:-1]
            positions_T[path] = np.arange(len(path))
        starts_C = np.flatnonzero((parent_T != np.arange(-1, size - 1)) | (parent_T < 0))
        ids_T = np.concatenate(parts).astype(np.int64)
        return cls(ids_T, positions_T, paths, starts_C, np.append(starts_C[1:], size), parent_T[starts_C])

    @classmethod
    def joined(cls, trees: Sequence["TokenTree"]) -> "TokenTree":
        """Trees end to end: samples of different trees share no token. The paths are in the order of the trees."""
        if len(trees) == 1:
            return trees[0]
        offsets = np.cumsum([0, *(tree.num_tokens for tree in trees)])[:-1]
        moved = list(zip(trees, offsets, strict=True))
        return cls(
            np.concatenate([tree.ids_T for tree in trees]),
            np.concatenate([tree.positions_T for tree in trees]),
            [path + offset for tree, offset in moved for path in tree.paths],
            np.concatenate([tree.starts_C + offset for tree, offset in moved]),
            np.concatenate([tree.stops_C + offset for tree, offset in moved]),
            np.concatenate([np.where(tree.above_C < 0, -1, tree.above_C + offset) for tree, offset in moved]),
        )

    @property
    def num_tokens(self) -> int:
        return len(self.ids_T)

    @cached_property
    def parents_C(self) -> np.ndarray:
        """The chain that a chain continues; −1 for a root."""
        return np.where(self.above_C < 0, -1, np.searchsorted(self.starts_C, self.above_C, side="right") - 1)

    @cached_property
    def before_C(self) -> list[np.ndarray]:
        """For each chain: where the tokens before it are."""
        found: list[np.ndarray] = []
        for above, parent in zip(self.above_C, self.parents_C, strict=True):
            own = np.arange(self.starts_C[parent], above + 1)
            found.append(own[:0] if parent < 0 else np.concatenate([found[parent], own]))
        return found

    @cached_property
    def levels(self) -> list[list[Branch]]:
        """All branches: first those off the roots' chains, then those off these, and so on. In a level, no token is in two.

        A token sees its chain up to itself and what its branches see, each ancestor once.
        """
        ends_C = self.stops_C.copy()  # of the subtree below a chain
        depths_C = np.zeros(len(ends_C), dtype=np.int64)
        for chain in range(len(ends_C) - 1, -1, -1):
            if (parent := self.parents_C[chain]) >= 0:
                ends_C[parent] = max(ends_C[parent], ends_C[chain])
        found: list[list[Branch]] = []
        for chain, parent in enumerate(self.parents_C.tolist()):
            if parent < 0:
                continue
            depths_C[chain] = depth = depths_C[parent] + 1
            if depth > len(found):
                found.append([])
            level, above = found[depth - 1], int(self.above_C[chain])
            branch = Branch(int(self.starts_C[chain]), int(ends_C[chain]), int(self.starts_C[parent]), above + 1)
            if level and level[-1].stop == branch.start and level[-1].chain_stop == above + 1:
                level[-1] = level[-1]._replace(stop=branch.stop)
            else:
                level.append(branch)
        return found


def prefix_order(samples: Sequence[np.ndarray]) -> list[int]:
    """Indices of the samples in lexicographic order, which puts common beginnings side by side."""
    keys = [np.ascontiguousarray(sample, dtype=">u4").tobytes() for sample in samples]
    return sorted(range(len(samples)), key=keys.__getitem__)


def shared_lengths(rows: Sequence[np.ndarray], min_shared: int = MIN_SHARED) -> list[int]:
    """For each row in `prefix_order`: how many first tokens it shares with the row before.

    Rows branch where `_is_worth` says so; what they have in common beyond the last branch is not shared.
    """
    lengths = np.array([*map(len, rows)], dtype=np.int64)
    common = np.array([_num_common(before, row) for before, row in pairwise(rows)], dtype=np.int64)
    found = np.zeros(len(rows), dtype=np.int64)
    waiting = [(0, len(rows), 0)]  # rows from, to, and where they last branched
    while waiting:
        first, end, branch = waiting.pop()
        if end - first > 1:
            least = common[first : end - 1].min()
            cuts = np.flatnonzero(common[first : end - 1] == least) + first + 1
            longest = int(lengths[first:end].max()) - branch
            branch = int(least) if _is_worth(int(least) - branch, longest, min_shared, is_first=not branch) else branch
            found[cuts] = branch
            waiting += [(a, b, branch) for a, b in pairwise([first, *cuts.tolist(), end])]
    return found.tolist()


def _is_worth(num_more: int, longest: int, min_shared: int, *, is_first: bool) -> bool:
    """True if rows branch `num_more` tokens beyond their last branch, behind which the longest of them has `longest` more.

    Few tokens count below another branch where replies are short: all prompts of a task begin with the same examples, and the
    question that the samples of one group share is shorter than `min_shared`. A branch that is worth it for rows is so for any
    part of them: micro-batches are planned with all samples, and have some.
    """
    if num_more >= min_shared:
        return True
    return not is_first and 4 * num_more >= max(longest, min_shared)


def prefix_groups(samples: Sequence[np.ndarray], max_size: int) -> list[tuple[list[int], int]]:
    """Indices of samples with a common beginning, and their number of different tokens: at most `max_size`, or one sample."""
    found: list[tuple[list[int], int]] = []
    order = prefix_order(samples)
    for i, num_shared in zip(order, shared_lengths([samples[i] for i in order]), strict=True):
        members, size = found[-1] if num_shared else ([], 0)
        num_new = len(samples[i]) - num_shared
        if members and size + num_new <= max_size:
            found[-1] = ([*members, i], size + num_new)
        else:
            found.append(([i], len(samples[i])))
    return found


def first_fit(groups: Sequence[tuple[Sequence[T], int]], budget: int) -> list[list[T]]:
    """The members of (members, size) in bins of at most `budget`, or of one group: each group in the first bin with room."""
    bins: list[list[T]] = []
    room: list[int] = []
    for members, size in groups:
        place = next((i for i, left in enumerate(room) if left >= size), None)
        if place is None:
            bins.append([])
            room.append(budget)
            place = len(bins) - 1
        bins[place] += members
        room[place] -= size
    return bins


def _num_common(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differs = one[:size] != other[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


def _most_shared_first(samples: Sequence[np.ndarray], min_shared: int) -> list[tuple[int, int]]:
    """Samples in depth-first order, each with how many first tokens it shares with the one before.

    At each branch, the child of most samples comes first, then of most tokens: that makes long chains, and neighbours alike.
    """
    order = prefix_order(samples)
    lengths = np.array([len(samples[i]) for i in order])
    shared = np.array(shared_lengths([samples[i] for i in order], min_shared))
    new = lengths - shared
    found: list[tuple[int, int]] = []
    waiting = [(0, len(order), 0)]  # rows from, to; how much the first one shares with what comes before it
    while waiting:
        first, end, num_before = waiting.pop()
        if end - first == 1:
            found.append((order[first], num_before))
            continue
        num_shared = shared[first + 1 : end].min()
        cuts = [first, *(np.flatnonzero(shared[first + 1 : end] == num_shared) + first + 1).tolist(), end]
        children = [
            (b - a, int(new[a:b].sum() + shared[a] - num_shared), a, b) for a, b in pairwise(cuts)
        ]  # a child's first row counts from the branch on
        children.sort(key=lambda child: child[:2], reverse=True)
        waiting += [
            (a, b, int(num_shared) if rank else num_before) for rank, (*_, a, b) in reversed(list(enumerate(children)))
        ]
    return found
