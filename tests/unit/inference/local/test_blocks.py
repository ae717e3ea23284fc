"""The block pool against a model of it that is too simple to be wrong."""

import itertools
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.inference.local.blocks import GROUP_ROWS, MIN_GROUP, BlockPool, num_splits, shared_prefixes
from ludic.inference.local.sequence import TOKEN_BYTES, tokens_as_bytes

SIZE = 2


def publish_all(pool: BlockPool, blocks: list[int], tokens: list[int], version: int = 0) -> None:
    chain = pool.root(version)
    for n, block in enumerate(blocks):
        start = n * pool.block_size
        chain = pool.publish(block, chain, tokens_as_bytes(tokens[start : start + pool.block_size]))


def matched(pool: BlockPool, tokens: list[int], version: int = 0) -> list[int]:
    return pool.match(version, tokens_as_bytes(tokens), TOKEN_BYTES)[0]


def test_an_evicted_beginning_does_not_come_back_with_a_wrong_end():
    pool = BlockPool(3, SIZE)
    first, second = pool.take(2)
    publish_all(pool, [first, second], [1, 2, 3, 4])
    pool.give_back([first])  # the second one is still in use
    (third,) = pool.take(1)
    assert pool.take(1) == [first]
    publish_all(pool, [third], [1, 2])
    assert matched(pool, [1, 2, 3, 4]) == [third]


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
