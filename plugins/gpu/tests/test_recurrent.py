"""Packed training of hybrids: every sample's log-probs and gradients are those of the sample alone, whatever stands beside it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model

from ludic.models.execution import recompute_activations
from ludic.training.learner.policy import TrainedPolicy
from ludic_gpu.recurrent import similar_lengths
from tests.tiny_families import family_model
from tests.unit.training.samples import assert_same_up_to_rounding, random_items, with_prefix

pytestmark = pytest.mark.slow

HYBRIDS = ["qwen3_next", "qwen3_5", "granite_moe_hybrid", "falcon_h1", "bamba", "jamba", "lfm2"]
MIXTURES = {"qwen3_next", "granite_moe_hybrid", "jamba"}
EQUAL = 1e-5
"""Of log-probs and gradients in fp32, relative to the largest of them."""


def random_lengths(seed):
    """Samples from two tokens to more than one chunk of a scan (64 tokens in a gated delta net), some of one length."""
    lengths = np.random.default_rng(seed).integers(2, 24, size=2).tolist()
    return [*lengths, lengths[0], 70]


def trainable(family, *, lora=False):
    model = family_model(family, attention="sdpa").requires_grad_(True)
    if lora:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=r".*\.(in_proj\w*|q_proj|o_proj)"))
        with torch.no_grad():  # peft begins with zeros, under which half of the gradients are zero
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.2)
    return model


def weighted_sum(logps, items):
    """Of all action tokens, with weights that depend on the sample alone, not on its place in the batch."""
    parts = logps.split([item.num_action_tokens for item in items])
    weights = [
        torch.cos(torch.arange(len(part)) + int(item.input_ids[0])) for part, item in zip(parts, items, strict=True)
    ]
    return (logps * torch.cat(weights)).sum()


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_packed_equals_alone(model, items, **how):
    padded, packed = TrainedPolicy(model, packed=False), TrainedPolicy(model, **how)
    assert packed.packed
    singles = []
    for item in items:
        logps, _ = padded.logps(padded.batch([item]))
        weighted_sum(logps, [item]).backward()
        singles.append(logps.detach())
    alone, expected = torch.cat(singles), gradients(model)
    together, _ = packed.logps(packed.batch(items))
    weighted_sum(together, items).backward()
    found = gradients(model)
    assert torch.allclose(together.detach(), alone, rtol=0, atol=EQUAL * float(alone.abs().max()))
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        scale = max(float(grad.abs().max()), 1e-2 * largest)
        assert float((found[name] - grad).abs().max()) <= EQUAL * scale, name


@pytest.mark.parametrize(("seed", "family"), [*enumerate(HYBRIDS), *((seed, "lfm2") for seed in range(20, 23))])
def test_packed_samples_of_any_lengths_equal_single_ones_in_value_and_gradient(seed, family):
    items = random_items(random_lengths(seed), seed=seed, temperature=0.7)
    assert_packed_equals_alone(trainable(family), items)


@pytest.mark.parametrize("family", ["qwen3_next", "jamba"])
def test_packed_samples_equal_single_ones_with_adapters_and_recomputed_activations(family):
    model = trainable(family, lora=True).train()  # checkpoints are for training mode; there is no dropout
    recompute_activations(model)
    assert_packed_equals_alone(model, random_items(random_lengths(3), seed=3, temperature=1.3))


def test_samples_that_share_a_prefix_equal_single_ones():
    items = random_items([5, 9, 7], seed=1)
    prompt = np.arange(3, 23, dtype=np.int32)
    items = [with_prefix(item, prompt) for item in items[:2]] + items[2:]
    model = trainable("qwen3_5")
    assert TrainedPolicy(model, share_prefixes=True).batch(items).tree is not None
    assert_packed_equals_alone(model, items, share_prefixes=True)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_sample_says_nothing_about_its_neighbours(family):
    policy = TrainedPolicy(trainable(family))
    items = random_items([11, 17, 9, 13], seed=2)
    changed = replace(items[1], input_ids=(items[1].input_ids + 1) % 128)
    with torch.no_grad():
        before, after = (
            policy.logps(policy.batch([items[0], second, *items[2:]]))[0].split([i.num_action_tokens for i in items])
            for second in (items[1], changed)
        )
    assert not torch.equal(before[1], after[1])
    others = {str(number): (before[number], after[number]) for number in (0, 2, 3)}
    found, expected = ({name: pair[which] for name, pair in others.items()} for which in (1, 0))
    if family in MIXTURES:  # an expert computes other numbers of rows when the neighbour's tokens change
        assert_same_up_to_rounding(found, expected)
    else:
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@given(st.lists(st.integers(1, 6000), min_size=1, max_size=40))
def test_rows_computed_together_have_little_padding_and_bounded_memory(lengths):
    groups = similar_lengths(lengths)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        own = [lengths[i] for i in group]
        padded = own[0] * len(own)
        assert own == sorted(own, reverse=True)
        assert len(own) == 1 or padded <= min(1.5 * sum(own), 4096)
