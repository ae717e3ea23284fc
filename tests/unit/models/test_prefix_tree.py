"""Samples as a tree of tokens: every sample is found in it, and attention and gradients equal those of separate samples."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import PackedSequences
from ludic.models.prefix_tree import TokenTree, TreeSequences, prefix_order, shared_lengths

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


@given(samples_strategy)
def test_each_shared_token_is_there_once(samples):
    assert TokenTree.of(samples, min_shared=1).num_tokens == len(brute_force_prefixes(samples))


@given(samples_strategy, st.integers(1, 5))
def test_a_segment_path_ends_with_the_segment_and_holds_its_ancestors(samples, min_shared):
    tree = TokenTree.of(samples, min_shared)
    covered = []
    for path, start, stop in zip(tree.segment_paths, tree.starts_S, tree.stops_S, strict=True):
        assert path[-1] == stop - 1 and tree.positions_T[path].tolist() == list(range(len(path)))
        assert any(p[: len(path)].tolist() == path.tolist() for p in tree.paths), "no sample begins with this path"
        covered += range(start, stop)
    assert covered == list(range(tree.num_tokens))


def test_short_common_beginnings_are_not_shared():
    rows = [np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5]), np.array([1, 9, 9, 9])]
    assert prefix_order(rows) == [0, 1, 2]
    assert shared_lengths(rows, min_shared=3) == [0, 3, 0] and shared_lengths(rows, min_shared=1) == [0, 3, 1]
    assert TokenTree.of(rows, min_shared=3).num_tokens == 9
    assert shared_lengths([]) == []


def test_a_group_is_its_prompt_and_one_segment_per_reply():
    prompt = np.arange(100, 120)
    tree = TokenTree.of([np.append(prompt, [n, n, n]) for n in (7, 5, 6)])
    assert tree.num_tokens == 20 + 9
    assert tree.starts_S.tolist() == [0, 20, 23, 26] and tree.parents_S.tolist() == [-1, 0, 0, 0]
    assert tree.paths[0][-3:].tolist() == [26, 27, 28], "the reply 7 7 7 sorts last"


@pytest.mark.parametrize(
    "rules",
    [AttentionRules(0.3), AttentionRules(0.3, 4), AttentionRules(0.3, None, 2.0), AttentionRules(0.3, 4, 2.0)],
    ids=["causal", "window", "softcap", "window and softcap"],
)
@settings(deadline=None)
@given(samples=samples_strategy, min_shared=st.integers(1, 4), seed=st.integers(0, 99))
def test_attention_and_gradients_equal_those_of_separate_samples(rules, samples, min_shared, seed):
    tree = TokenTree.of(samples, min_shared)
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        torch.randn(tree.num_tokens, heads, 8, dtype=torch.float64, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    flat = torch.from_numpy(np.concatenate(tree.paths))
    shared = TreeSequences(tree, CPU).attend(0, *inputs, rules)[flat]
    apart = PackedSequences([len(s) for s in samples], CPU).attend(0, *(x[flat] for x in inputs), rules)
    cotangent = torch.randn(apart.shape, dtype=apart.dtype, generator=generator)
    atol = FLOAT64_ROUNDING if rules.softcap is None else FLOAT32_ROUNDING
    torch.testing.assert_close(shared, apart, rtol=0, atol=atol)
    for ours, theirs in zip(
        torch.autograd.grad(shared, inputs, cotangent), torch.autograd.grad(apart, inputs, cotangent), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=100 * atol)
