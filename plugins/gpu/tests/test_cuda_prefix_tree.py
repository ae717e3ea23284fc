"""Attention over a tree of samples on a GPU, merged and gathered: values and gradients of separate samples, up to rounding."""

import numpy as np
import pytest
import torch

from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.prefix_tree import TokenTree
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.samples import random_items, with_prefix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BF16_ROUNDING = 2**-8
"""Half a unit in the last place of 1.0. Errors below are relative to the largest magnitude."""


def behind(prompt, lengths, rng):
    return [np.concatenate([prompt, rng.integers(0, 9, n)]) for n in lengths]


def group_of_16(rng):
    return behind(rng.integers(0, 9, 300), rng.integers(1, 200, 16), rng)


def several_groups(rng):
    return [sample for size in (200, 16, 130) for sample in behind(rng.integers(0, 9, size), [70, 3, 40, 1], rng)]


def one_reply_of_one_token(rng):
    return behind(rng.integers(0, 9, 40), [2, 1], rng)


def ten_turns(rng):
    """The thinking of earlier turns is cut from the history: one long chain and nine branches."""
    history, samples = rng.integers(0, 9, 60), []
    for _ in range(10):
        samples += behind(history, [47], rng)
        history = np.concatenate([history, rng.integers(0, 9, 33)])
    return samples


def deep_tree(rng):
    """Every sample forks twice, five times: branches in five levels."""
    samples = [rng.integers(0, 9, 50)]
    for _ in range(5):
        samples = [longer for sample in samples for longer in behind(sample, rng.integers(20, 60, 2), rng)]
    return samples


TREES = [group_of_16, several_groups, one_reply_of_one_token, ten_turns, deep_tree]


def relative_error(found, expected):
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def attended(state, inputs, where, cotangent, rules):
    """Output at the samples' tokens, and gradients of queries, keys and values."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = state(inputs, rules)[where]
    return [out, *torch.autograd.grad(out, inputs, cotangent.to(out.dtype))]


@pytest.mark.parametrize("window", [None, 64], ids=["full", "window"])
@pytest.mark.parametrize("merges", [True, False], ids=["merged", "gathered"])
@pytest.mark.parametrize("heads", [(8, 8), (12, 2)], ids=["each its keys", "grouped"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("make", TREES)
def test_half_precision_is_as_exact_as_separate_samples(make, head_size, heads, merges, window):
    samples = make(np.random.default_rng(0))
    tree, rules = TokenTree.of(samples), AttentionRules(head_size**-0.5, window)
    generator = torch.Generator("cuda").manual_seed(0)
    inputs = [
        torch.randn(tree.num_tokens, n, head_size, device="cuda", generator=generator).bfloat16()
        for n in (heads[0], heads[1], heads[1])
    ]
    flat = torch.from_numpy(np.concatenate(tree.paths)).cuda()
    everything = torch.arange(len(flat), device="cuda")
    cotangent = torch.randn(len(flat), heads[0], head_size, device="cuda", generator=generator)
    separate = PackedSequences([len(sample) for sample in samples], torch.device("cuda"))
    shared = TreeSequences(tree, torch.device("cuda"), merges=merges)

    def apart(given, rules):
        return separate.attend(0, *(x[flat] for x in given), rules)

    exact = attended(apart, [x.float() for x in inputs], everything, cotangent.bfloat16().float(), rules)
    rounded = attended(apart, inputs, everything, cotangent, rules)
    found = attended(lambda given, rules: shared.attend(0, *given, rules), inputs, flat, cotangent, rules)
    for name, ours, theirs, right in zip(("out", "query", "key", "value"), found, rounded, exact, strict=True):
        assert ours.dtype is torch.bfloat16
        # Separate samples in half precision round as often; a merged result is rounded once more for each level.
        limit = 2 * relative_error(theirs, right) + (1 + len(tree.levels)) * BF16_ROUNDING
        assert relative_error(ours, right) < limit, (name, relative_error(ours, right), relative_error(theirs, right))


def sharing_items():
    items = random_items([90, 60, 75, 33, 40, 120, 20, 61])
    prompts = [np.arange(3, 103, dtype=np.int32), np.arange(30, 70, dtype=np.int32)]
    return [with_prefix(item, prompts[number % 2]) for number, item in enumerate(items)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral-sliding", "gemma2-softcap"])
@pytest.mark.parametrize(("dtype", "cosine"), [(torch.float32, 0.9999), (torch.bfloat16, 0.98)], ids=["fp32", "bf16"])
def test_gradients_of_a_model_are_those_without_sharing_on_a_cpu(family, dtype, cosine):
    def gradients(device, dtype, share_prefixes):
        model = new_model(family, initializer_range=0.1, hidden_size=64, head_dim=16).to(device, dtype)
        policy = TrainedPolicy(model.requires_grad_(True), share_prefixes=share_prefixes, mixed_precision_dtype=None)
        policy.share_prefixes = share_prefixes  # models as small as this are not shared on a GPU by default
        stats = accumulate_gradients(policy, TokenClippedSurrogateLoss(), sharing_items(), micro_token_budget=2048)
        return stats.means(), {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}

    stats, found = gradients("cuda", dtype, share_prefixes=True)
    expected = gradients("cpu", torch.float32, share_prefixes=False)[1]
    assert stats["perf/prefix_sharing"] > 1.3 and found.keys() == expected.keys()
    for name, grad in expected.items():
        similarity = torch.nn.functional.cosine_similarity(found[name].flatten(), grad.flatten(), dim=0)
        assert similarity > cosine, (name, float(similarity))
