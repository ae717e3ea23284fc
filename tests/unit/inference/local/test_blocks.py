"""The block pool against a model of it that is too simple to be wrong."""

import itertools
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.inference.local.blocks import GROUP_ROWS, MIN_GROUP, BlockPool, num_splits, shared_prefixes
from ludic.inference.local.sequence import TOKEN_BYTES, tokens_as_bytes
from ludic.types import ConfigError

SIZE = 2


def publish_all(pool: BlockPool, blocks: list[int], tokens: list[int], version: int = 0) -> None:
    chain = pool.root(version)
    for n, block in enumerate(blocks):
        start = n * pool.block_size
        chain = pool.publish(block, chain, tokens_as_bytes(tokens[start : start + pool.block_size]))


def matched(pool: BlockPool, tokens: list[int], version: int = 0) -> list[int]:
    return pool.match(version, tokens_as_bytes(tokens), TOKEN_BYTES)[0]


def test_blocks_are_taken_and_given_back():
    pool = BlockPool(4, SIZE)
    first = pool.take(3)
    assert first is not None and len(set(first)) == 3
    assert pool.num_used == 3 and pool.num_available == 1
    assert pool.take(2) is None
    assert pool.num_used == 3, "a refusal takes nothing"
    pool.give_back(first)
    assert pool.num_used == 0 and sorted(pool.take(4) or []) == [0, 1, 2, 3]


def test_taking_nothing_is_allowed():
    assert BlockPool(1, SIZE).take(0) == []


@pytest.mark.parametrize("num_tokens, expected", [(0, 0), (1, 1), (2, 1), (3, 2), (4, 2)])
def test_a_started_block_counts_as_a_block(num_tokens, expected):
    assert BlockPool(1, SIZE).blocks_for(num_tokens) == expected


@pytest.mark.parametrize("num_blocks, block_size", [(0, 4), (4, 0), (-1, 4)])
def test_a_pool_of_nothing_is_refused(num_blocks, block_size):
    with pytest.raises(ConfigError, match="must be positive"):
        BlockPool(num_blocks, block_size)


def test_a_published_prefix_is_found_up_to_where_it_differs():
    pool = BlockPool(4, SIZE)
    blocks = pool.take(3)
    publish_all(pool, blocks, [1, 2, 3, 4, 5, 6])
    assert matched(pool, [1, 2, 3, 4, 5, 6, 7]) == blocks
    assert matched(pool, [1, 2, 3, 4, 5]) == blocks[:2]
    assert matched(pool, [1, 2, 9, 9, 5, 6]) == blocks[:1]
    assert matched(pool, [3, 4, 5, 6]) == [], "the same tokens in another place are another prefix"
    assert matched(pool, [1]) == matched(pool, []) == []


def test_a_prefix_is_found_only_under_its_version():
    pool = BlockPool(4, SIZE)
    publish_all(pool, pool.take(1), [1, 2], version=3)
    assert matched(pool, [1, 2], version=4) == []
    assert len(matched(pool, [1, 2], version=3)) == 1


def test_the_first_to_publish_a_prefix_keeps_its_name():
    pool = BlockPool(4, SIZE)
    ours, theirs = pool.take(2), pool.take(2)
    publish_all(pool, ours, [1, 2, 3, 4])
    publish_all(pool, theirs, [1, 2, 3, 4])
    assert matched(pool, [1, 2, 3, 4]) == ours
    pool.give_back(theirs)
    assert pool.num_used == 2 and matched(pool, [1, 2, 3, 4]) == ours


def test_a_shared_block_is_free_when_its_last_user_is_gone():
    pool = BlockPool(2, SIZE)
    blocks = pool.take(1)
    publish_all(pool, blocks, [1, 2])
    pool.share(blocks)
    pool.give_back(blocks)
    assert pool.num_used == 1
    pool.give_back(blocks)
    assert pool.num_used == 0 and matched(pool, [1, 2]) == blocks, "idle, but still to be found"


def test_the_least_recently_used_prefix_goes_first_and_its_end_before_its_beginning():
    pool = BlockPool(4, SIZE)
    old, new = pool.take(2), pool.take(2)
    publish_all(pool, old, [1, 2, 3, 4])
    publish_all(pool, new, [5, 6, 7, 8])
    pool.give_back(old)
    pool.give_back(new)
    assert pool.take(1) == [old[1]]
    assert matched(pool, [1, 2, 3, 4]) == old[:1] and matched(pool, [5, 6, 7, 8]) == new
    pool.share(matched(pool, [1, 2]))  # used again, so now it is the younger one
    pool.give_back(old[:1])
    assert pool.take(2) == [new[1], new[0]]
    assert matched(pool, [1, 2]) == old[:1] and matched(pool, [5, 6]) == []


def test_an_evicted_beginning_does_not_come_back_with_a_wrong_end():
    pool = BlockPool(3, SIZE)
    first, second = pool.take(2)
    publish_all(pool, [first, second], [1, 2, 3, 4])
    pool.give_back([first])  # the second one is still in use
    (third,) = pool.take(1)
    assert pool.take(1) == [first]
    publish_all(pool, [third], [1, 2])
    assert matched(pool, [1, 2, 3, 4]) == [third]


def test_forgetting_keeps_blocks_with_their_users():
    pool = BlockPool(3, SIZE)
    busy, idle = pool.take(1), pool.take(1)
    publish_all(pool, busy, [1, 2])
    publish_all(pool, idle, [3, 4])
    pool.give_back(idle)
    pool.forget_all()
    assert matched(pool, [1, 2]) == matched(pool, [3, 4]) == []
    assert pool.num_used == 1 and pool.num_available == 2
    pool.give_back(busy)
    assert sorted(pool.take(3) or []) == [0, 1, 2]


# --- against a naive model ---


@dataclass(eq=False)
class Node:
    """A published prefix: a tree, as one would draw it."""

    text: tuple[int, ...] = ()
    version: int = 0
    block: int = -1
    parent: "Node | None" = None
    children: dict[tuple[int, ...], "Node"] = field(default_factory=dict)


@dataclass(eq=False)
class User:
    """A sequence as the scheduler would treat it."""

    tokens: list[int]
    blocks: list[int]
    node: Node
    chain: int
    num_published: int


class NaivePool:
    """Users per block, a tree of prefixes, and a list of idle blocks in order of use."""

    def __init__(self, num_blocks: int) -> None:
        self.users = dict.fromkeys(range(num_blocks), 0)
        self.roots: dict[int, Node] = {}
        self.node_of: dict[int, Node] = {}
        self.idle: list[int] = []

    def match(self, version: int, tokens: list[int]) -> tuple[list[int], Node]:
        node, blocks = self.roots.setdefault(version, Node(version=version)), []
        for start in range(0, len(tokens) - SIZE + 1, SIZE):
            following = node.children.get(tuple(tokens[start : start + SIZE]))
            if following is None:
                break
            node = following
            blocks.append(node.block)
        return blocks, node

    def num_free(self) -> int:
        return sum(count == 0 for count in self.users.values()) - len(self.idle)

    def took(self, blocks: list[int]) -> None:
        num_free = self.num_free()
        for n, block in enumerate(blocks):
            if n < num_free:
                assert self.users[block] == 0 and block not in self.idle, "free blocks are taken first"
            else:
                assert block == self.idle.pop(0), "then the least recently used"
                self.unpublish(block)
            self.users[block] += 1

    def share(self, blocks: list[int]) -> None:
        for block in blocks:
            if self.users[block] == 0:
                self.idle.remove(block)
            self.users[block] += 1

    def give_back(self, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block] == 0 and block in self.node_of:
                self.idle.append(block)

    def publish(self, block: int, parent: Node, text: tuple[int, ...]) -> Node:
        if text not in parent.children:
            node = Node(text=text, version=parent.version, block=block, parent=parent)
            parent.children[text] = self.node_of[block] = node
        return parent.children[text]

    def unpublish(self, block: int) -> None:
        node = self.node_of.pop(block)
        assert node.parent is not None
        del node.parent.children[node.text]

    def forget_all(self) -> None:
        self.roots, self.node_of, self.idle = {}, {}, []


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.lists(st.integers(0, 1), min_size=1, max_size=9)),
        st.tuples(st.sampled_from(["fill", "close", "fill", "close", "grow"]), st.integers(0, 20)),
        st.tuples(st.just("new version"), st.just(0)),
    ),
    max_size=60,
)


@given(operations=OPERATIONS, num_blocks=st.integers(1, 9))
@settings(max_examples=150)
def test_the_pool_behaves_like_the_naive_one(operations, num_blocks):
    pool, naive = BlockPool(num_blocks, SIZE), NaivePool(num_blocks)
    users: list[User] = []
    content: dict[int, tuple[int, tuple[int, ...]]] = {}
    version = 0
    for name, argument in operations:
        if name == "open":
            blocks, chain = pool.match(version, tokens_as_bytes(argument), TOKEN_BYTES)
            expected, node = naive.match(version, argument)
            assert blocks == expected
            for n, block in enumerate(blocks):
                assert content[block] == (version, tuple(argument[: (n + 1) * SIZE])), "a match is a true prefix"
            pool.share(blocks)
            naive.share(blocks)
            rest = pool.take(pool.blocks_for(len(argument)) - len(blocks))
            if rest is None:
                pool.give_back(blocks)
                naive.give_back(blocks)
                continue
            naive.took(rest)
            users.append(User(argument, [*blocks, *rest], node, chain, len(blocks)))
        elif name == "new version":
            # As the scheduler does it: all sequences begin again.
            for user in users:
                pool.give_back(user.blocks)
                naive.give_back(user.blocks)
            users, version = [], version + 1
            pool.forget_all()
            naive.forget_all()
        elif users:
            user = users[argument % len(users)]
            if name == "close":
                users.remove(user)
                pool.give_back(user.blocks)
                naive.give_back(user.blocks)
            elif name == "grow":
                taken = pool.take(1)
                if taken is not None:
                    naive.took(taken)
                    user.blocks.extend(taken)
                    user.tokens = [*user.tokens, *itertools.repeat(argument % 2, SIZE)]
            elif (user.num_published + 1) * SIZE <= len(user.tokens):
                n = user.num_published
                text = tuple(user.tokens[n * SIZE : (n + 1) * SIZE])
                content[user.blocks[n]] = (version, tuple(user.tokens[: (n + 1) * SIZE]))
                user.chain = pool.publish(user.blocks[n], user.chain, tokens_as_bytes(list(text)))
                user.node = naive.publish(user.blocks[n], user.node, text)
                user.num_published += 1
        used = {block for user in users for block in user.blocks}
        assert pool.num_used == len(used), "no block is both free and used"
        assert pool.num_available == num_blocks - len(used)
    for user in users:
        pool.give_back(user.blocks)
    assert pool.num_used == 0 and sorted(pool.take(num_blocks) or []) == list(range(num_blocks))


def test_tokens_become_bytes_of_known_width():
    assert tokens_as_bytes([1, 2, 70_000]) == np.array([1, 2, 70_000], dtype=np.int32).tobytes()
    assert len(tokens_as_bytes([1, 2, 3])) == 3 * TOKEN_BYTES


# --- how rows read their blocks ---


def test_rows_with_the_same_first_blocks_form_a_group() -> None:
    rows = [[7, 8, 9, i] for i in range(100, 105)] + [[1, 2], [3], [7, 5, 6]]
    assert shared_prefixes(rows) == [([0, 1, 2, 3, 4], 3)]


def test_groups_below_a_common_system_prompt_share_their_longer_prompts() -> None:
    rows = [[0, *range(10 * group, 10 * group + 6), 1000 + i] for i in range(4) for group in (1, 2, 3)]
    assert sorted(shared_prefixes(rows)) == [([0, 3, 6, 9], 7), ([1, 4, 7, 10], 7), ([2, 5, 8, 11], 7)]


def test_many_rows_with_a_long_common_prefix_are_cut_into_groups() -> None:
    rows = [[*range(50), 60 + i // 2, 1000 + i] for i in range(40)]
    groups = shared_prefixes(rows)
    assert [len(rows) for rows, _ in groups] == [GROUP_ROWS, GROUP_ROWS, 8]
    assert {num_blocks for _, num_blocks in groups} == {50}


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=60))
def test_a_group_shares_what_it_says_and_rows_are_in_one_group_at_most(paths: list[list[int]]) -> None:
    # A block stands for everything before it, so it is named after its path.
    names: dict[tuple[int, ...], int] = {}
    rows = [
        [names.setdefault(tuple(p[: i + 1]), len(names)) for i in range(len(p))] + [10_000 + n]
        for n, p in enumerate(paths)
    ]
    members = [row for group, _ in shared_prefixes(rows) for row in group]
    assert len(members) == len(set(members))
    for group, num_blocks in shared_prefixes(rows):
        assert MIN_GROUP <= len(group) <= GROUP_ROWS and num_blocks > 0
        assert len({tuple(rows[row][:num_blocks]) for row in group}) == 1
        assert all(len(rows[row]) > num_blocks for row in group), "every row keeps another block"


def test_few_rows_are_cut_and_long_ones_more() -> None:
    assert [num_splits(rows, 132, 100) for rows in (2, 40, 100, 200, 300)] == [8, 8, 4, 2, 1]
    assert [num_splits(rows, 132, 1000) for rows in (2, 200, 600, 1200, 2000)] == [8, 8, 4, 2, 1]
