"""Samples as a tree of tokens: every sample is found in it, and attention and gradients equal those of separate samples."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.models import packed_attention
from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.prefix_tree import Branch, TokenTree, prefix_groups, prefix_order, shared_lengths

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FLOAT64_ROUNDING = 1e-12
FLOAT32_ROUNDING = 1e-5
"""The soft-capped path takes its softmax in fp32."""

few_ids = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda ids: np.array(ids, dtype=np.int32))
samples_strategy = st.lists(few_ids, min_size=1, max_size=8)


def brute_force_prefixes(samples):
    """All different beginnings of the samples: the tokens of a tree that shares everything."""
    return {tuple(sample[: n + 1].tolist()) for sample in samples for n in range(len(sample))}


@given(samples_strategy, st.integers(1, 5))
def test_every_sample_is_a_path(samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    for sample, path in zip(samples, tree.paths, strict=True):
        assert tree.ids_T[path].tolist() == sample.tolist()
        assert tree.positions_T[path].tolist() == list(range(len(sample)))
    assert {int(t) for path in tree.paths for t in path} == set(range(tree.num_tokens))


@given(st.lists(samples_strategy, min_size=1, max_size=3), st.integers(1, 5))
def test_joined_trees_share_nothing_and_keep_their_chains(groups, min_shared):
    trees = [TokenTree.of(samples, min_shared) for samples in groups]
    tree = TokenTree.joined(trees)
    samples = [sample for group in groups for sample in group]
    assert tree.num_tokens == sum(each.num_tokens for each in trees)
    for sample, path in zip(samples, tree.paths, strict=True):
        assert tree.ids_T[path].tolist() == sample.tolist()
        assert tree.positions_T[path].tolist() == list(range(len(sample)))
    parents = [np.append(-1, path[:-1]) for path in tree.paths]
    for chain, (start, stop) in enumerate(zip(tree.starts_C, tree.stops_C, strict=True)):
        above = {int(p[path == start][0]) for p, path in zip(parents, tree.paths, strict=True) if start in path}
        assert above == {int(tree.above_C[chain])}
        assert tree.positions_T[start:stop].tolist() == list(
            range(tree.positions_T[start], tree.positions_T[start] + stop - start)
        )


@given(samples_strategy)
def test_each_shared_token_is_there_once(samples):
    assert TokenTree.of(samples, min_shared=1).num_tokens == len(brute_force_prefixes(samples))


@given(samples_strategy, st.integers(1, 5))
def test_chains_cover_the_tree_behind_their_ancestors(samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    covered = []
    for before, start, stop in zip(tree.before_C, tree.starts_C, tree.stops_C, strict=True):
        path = [*before, *range(start, stop)]
        assert tree.positions_T[path].tolist() == list(range(len(path)))
        assert any(p[: len(path)].tolist() == path for p in tree.paths), "no sample begins with this path"
        covered += range(start, stop)
    assert covered == list(range(tree.num_tokens))


@given(samples_strategy, st.integers(1, 5))
def test_chains_and_branches_show_a_token_each_ancestor_once(samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    seen = np.zeros((tree.num_tokens, tree.num_tokens), dtype=int)
    for start, stop in zip(tree.starts_C, tree.stops_C, strict=True):
        seen[start:stop, start:stop] += np.tri(stop - start, dtype=int)
    for level in tree.levels:
        in_level = np.zeros(tree.num_tokens, dtype=int)
        for branch in level:
            seen[branch.start : branch.stop, branch.chain_start : branch.chain_stop] += 1
            in_level[branch.start : branch.stop] += 1
        assert in_level.max() == 1
    ancestors = np.zeros_like(seen)
    for path in tree.paths:
        for n, token in enumerate(path):
            ancestors[token, path[: n + 1]] = 1
    assert (seen == ancestors).all()
    ends = [max(np.flatnonzero(column)) + 1 for column in ancestors.T]  # of the subtree below each token
    tokens = np.arange(tree.num_tokens)
    assert (ancestors == ((tokens <= tokens[:, None]) & (tokens[:, None] < ends))).all(), "the interval rule"


@given(samples_strategy, st.integers(1, 5))
def test_levels_are_few(samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    assert len(tree.levels) <= np.log2(len(samples)), "a branch has at most half of the samples that pass its token"


def test_short_common_beginnings_are_not_shared():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), np.array([1, 9, 9, 9])]
    assert prefix_order(rows) == [0, 1, 2]
    assert shared_lengths(rows, min_shared=3) == [0, 3, 0] and shared_lengths(rows, min_shared=1) == [0, 3, 1]
    assert TokenTree.of(rows, min_shared=3).num_tokens == 9
    assert shared_lengths([]) == []


def test_a_short_question_behind_common_examples_is_shared_by_its_group_unless_the_replies_are_long():
    examples, questions = np.arange(27), np.arange(100, 124).reshape(2, 12)  # shorter than MIN_SHARED
    replies = np.arange(200, 216)

    def rows(reply_length):
        return [
            np.concatenate([examples, question, np.full(reply_length, reply)])
            for question in questions
            for reply in replies
        ]

    assert TokenTree.of(rows(4)).num_tokens == 27 + 2 * (12 + 16 * 4)
    assert TokenTree.of(rows(60)).num_tokens == 27 + 2 * 16 * (12 + 60)


def test_a_part_of_the_rows_shares_what_all_of_them_share():
    question = np.arange(100, 108)
    long, short = ([np.concatenate([np.arange(27), question, np.full(size, n)]) for n in range(a, a + 16)]
                   for size, a in ((38, 200), (8, 300)))  # fmt: skip
    for rows in (long, short, [*long, *short]):
        counted = sum(size for _, size in prefix_groups(rows, max_size=10_000))
        parts = [TokenTree.of([rows[i] for i in members]) for members, _ in prefix_groups(rows, max_size=400)]
        assert TokenTree.of(rows).num_tokens == counted
        assert all(tree.num_tokens <= 400 for tree in parts)


@given(samples_strategy, st.integers(1, 5))
def test_two_samples_that_share_in_a_batch_share_as_much_by_themselves(samples, min_shared):
    """So the comparison of two samples, which decides whether sharing is right for a model, does share."""
    rows = [samples[i] for i in prefix_order(samples)]
    for (one, other), shared in zip(pairwise(rows), shared_lengths(rows, min_shared)[1:], strict=True):
        assert shared == 0 or shared >= min_shared
        assert TokenTree.of([one, other], min_shared).num_tokens <= len(one) + len(other) - shared


def test_a_group_is_one_sample_and_a_branch_of_the_other_replies():
    prompt = np.arange(100, 120)
    tree = TokenTree.of([np.append(prompt, [n, n, n]) for n in (7, 5, 6)])
    assert tree.num_tokens == 20 + 9
    assert tree.starts_C.tolist() == [0, 23, 26] and tree.above_C.tolist() == [-1, 19, 19]
    assert tree.levels == [[Branch(23, 29, 0, 20)]]
    assert tree.paths[0][-3:].tolist() == [26, 27, 28], "the reply 7 7 7 sorts last"


def test_the_child_of_most_samples_continues_the_chain_and_then_the_longest():
    history, thinking, more = (np.arange(n, n + 20) for n in (0, 100, 200))
    tree = TokenTree.of(
        [np.append(history, thinking), np.concatenate([history, more, thinking]), np.append(history, more)]
    )
    assert tree.starts_C.tolist() == [0, 60] and tree.levels == [[Branch(60, 80, 0, 20)]]
    assert TokenTree.of([np.append(history, [n] * n) for n in (3, 9, 5)]).stops_C.tolist() == [29, 34, 37]


@pytest.mark.parametrize(
    "rules",
    [AttentionRules(0.3), AttentionRules(0.3, 4), AttentionRules(0.3, None, 2.0), AttentionRules(0.3, 4, 2.0)],
    ids=["causal", "window", "softcap", "window and softcap"],
)
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "gathered"])
@settings(max_examples=20)
@given(samples=samples_strategy, min_shared=st.integers(1, 4), seed=st.integers(0, 99))
def test_attention_and_gradients_equal_those_of_separate_samples(rules, merges, samples, min_shared, seed):
    tree = TokenTree.of(samples, min_shared)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(tree.num_tokens, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    flat = torch.from_numpy(np.concatenate(tree.paths))
    shared = TreeSequences(tree, CPU, merges=merges).attend(0, *inputs, rules)[flat]
    apart = PackedSequences([len(s) for s in samples], CPU).attend(0, *(x[flat] for x in inputs), rules)
    cotangent = torch.randn(apart.shape, dtype=apart.dtype, generator=generator)
    atol = FLOAT64_ROUNDING if rules.softcap is None else FLOAT32_ROUNDING
    torch.testing.assert_close(shared, apart, rtol=0, atol=atol)
    for ours, theirs in zip(
        torch.autograd.grad(shared, inputs, cotangent), torch.autograd.grad(apart, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * atol)


# --- the calls of a GPU, by a reference of its kernels ---


class VarlenReference:
    """`torch.ops.aten` with flash attention over sequences end to end, in plain operations."""

    @staticmethod
    def _scores(query, key, scale, window_left, is_causal):
        keys = torch.arange(len(key))
        queries = keys[len(key) - len(query) :, None] if is_causal else len(key)
        seen = (keys <= queries) & ((window_left < 0) | (keys >= queries - window_left))
        scores = torch.einsum("qhd,khd->hqk", query, key) * scale
        return scores.masked_fill(~seen, -torch.inf)

    def _flash_attention_forward(self, query, key, value, cu_q, cu_k, max_q, max_k, dropout, is_causal, debug, *,
                                 scale, window_size_left, window_size_right):  # fmt: skip
        assert (
            (cu_q[-1], cu_k[-1]) == (len(query), len(key)) and max_q >= cu_q.diff().max() and max_k >= cu_k.diff().max()
        )
        outs, lses = [], []
        for q, k, v in zip(
            *(x.split(cu.diff().tolist()) for x, cu in ((query, cu_q), (key, cu_k), (value, cu_k))), strict=True
        ):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            scores = self._scores(q, k, scale, window_size_left, is_causal)
            outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
            lses.append(scores.logsumexp(-1))
        return torch.cat(outs), torch.cat(lses, 1), None, None, None

    def _flash_attention_backward(self, grad, query, key, value, out, lse_HQ, cu_q, cu_k, max_q, max_k, dropout, is_causal,
                                  state, unused, *, scale, window_size_left, window_size_right):  # fmt: skip
        assert lse_HQ.is_contiguous() and lse_HQ.shape == (query.shape[1], len(query))
        share = query.shape[1] // key.shape[1]
        found = []
        inputs = ((grad, cu_q), (query, cu_q), (out, cu_q), (lse_HQ.t(), cu_q), (key, cu_k), (value, cu_k))
        for g, q, o, lse, *seen in zip(*(x.split(cu.diff().tolist()) for x, cu in inputs), strict=True):
            k, v = (x.repeat_interleave(share, 1) for x in seen)
            weights = (self._scores(q, k, scale, window_size_left, is_causal) - lse.t()[..., None]).exp()
            grad_weights = torch.einsum("qhd,khd->hqk", g, v) - (g * o).sum(-1).t()[..., None]
            grad_scores = weights * grad_weights * scale
            grad_k, grad_v = (torch.einsum("hqk,qhd->khd", w, x) for w, x in ((grad_scores, q), (weights, g)))
            by_head = (x.unflatten(1, (-1, share)).sum(2) for x in (grad_k, grad_v))
            found.append((torch.einsum("hqk,khd->qhd", grad_scores, k), *by_head))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("merges", "window"), [(True, None), (False, None), (False, 4)], ids=["merged", "gathered", "window"]
)
@settings(max_examples=40)
@given(samples=samples_strategy, min_shared=st.integers(1, 4))
def test_the_calls_of_a_gpu_give_attention_and_gradients_of_separate_samples(merges, window, samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(tree.num_tokens, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    flat = torch.from_numpy(np.concatenate(tree.paths))
    apart = PackedSequences([len(s) for s in samples], CPU).attend(
        0, *(x[flat] for x in inputs), AttentionRules(0.3, window)
    )
    cotangent = torch.randn(apart.shape, dtype=apart.dtype, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_attention, "aten", VarlenReference())
        shared = TreeSequences(tree, CPU, merges=merges).attend_varlen(*inputs, 0.3, window)[flat]
        found = torch.autograd.grad(shared, inputs, cotangent)
    torch.testing.assert_close(shared, apart, rtol=0, atol=FLOAT64_ROUNDING)
    for ours, theirs in zip(found, torch.autograd.grad(apart, inputs, cotangent), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * FLOAT64_ROUNDING)
