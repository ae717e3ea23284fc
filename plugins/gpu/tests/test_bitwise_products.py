"""Parts of bitwise mode: a row's bits do not depend on its company, gradients are the usual ones, what cannot hold is refused."""

import copy

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from ludic.models.attention import AttentionRules
from ludic.models.packed_attention import PackedSequences
from ludic.training.learner.policy import TrainedPolicy
from ludic_gpu.bitwise.attention import BLOCK, BlockAttention, Span, tile_rows
from ludic_gpu.bitwise.decoder import BitwiseDecoder
from ludic_gpu.bitwise.products import NotBitwise, checked_sizes, linear, operand_of, product
from ludic_gpu.bitwise.rows import log_probs, rms_norm, silu, tree_sum
from tests.unit.inference.local.tiny_models import FAMILIES, new_model
from tests.unit.training.samples import random_items, with_prefix

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
COVERED = ("llama", "llama-mha-tied", "qwen2", "qwen3", "mistral-sliding")


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 100), (64, 7), (48, 48)])
def test_product_gives_a_row_the_same_bits_in_any_batch(rng, shape, dtype):
    x, weight = (torch.randn(*s, generator=rng).to(dtype) for s in ((300, shape[0]), (shape[1], shape[0])))
    operand = operand_of(weight)
    whole = product(x, operand)
    for first, end in ((0, 1), (5, 6), (299, 300), (3, 20), (100, 300), (1, 290)):
        assert torch.equal(product(x[first:end], operand), whole[first:end])
    torch.testing.assert_close(
        whole.float(), x.float() @ weight.float().t(), rtol=1e-2, atol=1e-4 if dtype is torch.float32 else 0.1
    )


@pytest.mark.parametrize("length", [1, 2, 3, 31, 64, 101])
def test_row_functions_give_a_row_the_same_bits_in_any_batch_and_the_usual_values(rng, length):
    x, weight = torch.randn(50, length, generator=rng) * 3, torch.randn(length, generator=rng)
    targets = torch.randint(length, (50,), generator=rng)
    functions = {
        "sum": (lambda rows, _: tree_sum(rows), x.sum(-1, keepdim=True)),
        "norm": (
            lambda rows, _: rms_norm(rows, weight, 1e-6),
            torch.nn.functional.rms_norm(x, (length,), weight, 1e-6),
        ),
        "silu": (lambda rows, _: silu(rows), torch.nn.functional.silu(x)),
        "log-prob": (lambda rows, own: log_probs(rows, own)[1], x.log_softmax(-1).gather(-1, targets[:, None])[:, 0]),
    }
    for name, (function, usual) in functions.items():
        whole = function(x, targets)
        torch.testing.assert_close(whole, usual, rtol=1e-5, atol=1e-5, msg=name)
        for here in (slice(0, 1), slice(49, 50), slice(7, 30)):
            assert torch.equal(function(x[here].clone(), targets[here]), whole[here]), name


def test_gradients_of_rows_and_products_are_the_usual_ones(rng):
    x, weight, bias, norm = (torch.randn(*s, generator=rng).double() for s in ((9, 8), (6, 8), (6,), (8,)))

    def gradients(forward):
        inputs = [t.float().requires_grad_() for t in (x, weight, bias, norm)]
        forward(*inputs).square().sum().backward()
        return [t.grad for t in inputs]

    ours = gradients(lambda x, w, b, n: silu(linear(rms_norm(x, n, 1e-6), w, b)))
    F = torch.nn.functional
    usual = gradients(lambda x, w, b, n: F.silu(F.linear(F.rms_norm(x, (8,), n, 1e-6), w, b)))
    torch.testing.assert_close(ours, usual, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [None, 5, BLOCK + 3])
def test_attention_of_a_query_depends_on_its_position_alone(rng, window):
    """A sequence as a whole, in parts, one token at a time, and beside another one."""
    length, heads, kv_heads, size = 2 * BLOCK + 9, 6, 2, 16
    query, key, value = (torch.randn(length, h, size, generator=rng) for h in (heads, kv_heads, kv_heads))
    stored = [
        torch.cat([torch.randn(20, kv_heads, size, generator=rng), x, torch.zeros(1, kv_heads, size)])
        for x in (key, value)
    ]
    rules = AttentionRules(size**-0.5, window)
    where = np.arange(20, 20 + length)
    other = Span(0, 3, np.arange(20))
    beside = torch.cat([torch.randn(17, heads, size, generator=rng), query])
    zero = len(stored[0]) - 1
    whole = BlockAttention([Span(0, 0, where)], CPU, zero=zero).attend(query, *stored, rules)
    usual = PackedSequences([length], CPU).attend(0, query, key, value, rules)
    torch.testing.assert_close(whole, usual, rtol=1e-5, atol=1e-5)
    assert torch.equal(
        BlockAttention([other, Span(17, 0, where)], CPU, zero=zero).attend(beside, *stored, rules)[17:], whole
    )
    for start, stop in ((0, 1), (1, 2), (length - 1, length), (BLOCK - 1, BLOCK + 1), (40, 130)):
        part = BlockAttention([Span(0, start, where[:stop])], CPU, zero=zero).attend(query[start:stop], *stored, rules)
        assert torch.equal(part, whole[start:stop]), (start, stop)


def test_large_tiles_are_used_where_they_give_the_same_bits():
    assert tile_rows(16, CPU)[0] == 8


def test_check_keeps_sizes_that_agree_and_refuses_a_product_that_depends_on_the_place():
    x = torch.randn(64, 8)
    row_wise = lambda rows: rows * 2  # noqa: E731
    assert checked_sizes(row_wise, (x,), (16, 64), "it") == (16, 64)
    in_small_calls_only = lambda rows: rows * 2 if len(rows) == 16 else rows * 2 + 1e-3  # noqa: E731
    assert checked_sizes(in_small_calls_only, (x,), (16, 64), "it") == (16,)
    by_place = lambda rows: rows + torch.arange(len(rows))[:, None]  # noqa: E731
    by_company = lambda rows: rows - rows.mean(0)  # noqa: E731
    for call in (by_place, by_company):
        with pytest.raises(NotBitwise, match="a product of it gives a row other bits .* Run without bitwise"):
            checked_sizes(call, (x,), (16, 64), "a product of it")


@pytest.mark.parametrize("family", COVERED)
@pytest.mark.parametrize("shares", [False, True])
def test_values_and_gradients_are_the_usual_ones_up_to_rounding(family, shares):
    items = random_items([5, 70, 33, 12], temperature=0.7)
    prefix = np.arange(40, dtype=np.int32)
    items = [*items[:1], *(with_prefix(item, prefix) for item in items[1:])]
    model = new_model(family).requires_grad_()

    def run(**settings):
        policy = TrainedPolicy(model, share_prefixes=shares, **settings)
        batch = policy.batch(items)
        assert (batch.tree is not None) == shares
        logps, entropy = policy.logps(batch, entropy="train")
        weights = torch.linspace(-1, 1, len(logps))
        grads = torch.autograd.grad((logps * weights + 0.1 * entropy).sum(), list(model.parameters()))
        return logps.detach(), entropy.detach(), grads

    ours, usual = run(bitwise=True), run()
    for one, other in zip(ours[:2], usual[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours[2], usual[2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))


def test_log_probs_do_not_depend_on_packing_prefix_sharing_or_checkpointing():
    prefix = np.arange(30, dtype=np.int32)
    items = [with_prefix(item, prefix) for item in random_items([20, 60, 3, 44, 9])]
    model = new_model("qwen3")
    apart, together = (TrainedPolicy(model, bitwise=True, share_prefixes=shares) for shares in (False, True))
    expected = {id(item): apart.logps(apart.batch([item]))[0] for item in items}

    def check(policy, order):
        own = [items[i] for i in order]
        found, _ = policy.logps(policy.batch(own))
        assert torch.equal(found.detach(), torch.cat([expected[id(item)] for item in own]))

    for policy in (apart, together):
        for order in ([0, 1, 2, 3, 4], [3, 0], [4, 2, 1]):
            check(policy, order)
    model.requires_grad_().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    check(apart, [1, 4])


def adapted(**settings):
    model = get_peft_model(
        copy.deepcopy(new_model("llama")), LoraConfig(target_modules=["q_proj", "up_proj"], **settings)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def merged():
    model = adapted()
    model.merge_adapter()
    return model


def test_an_adapter_is_computed_and_learns_as_usual():
    model, items = adapted(), random_items([9, 21])
    found = {}
    for bitwise in (False, True):
        policy = TrainedPolicy(model, bitwise=bitwise)
        logps, _ = policy.logps(policy.batch(items))
        trained = [p for p in model.parameters() if p.requires_grad]
        found[bitwise] = [logps.detach(), *torch.autograd.grad(logps.sum(), trained)]
        with model.disable_adapter():
            assert not torch.allclose(policy.logps(policy.batch(items))[0], logps, atol=1e-3)
    torch.testing.assert_close(found[True], found[False], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: new_model("gemma2-softcap"), "this is Gemma2ForCausalLM"),
        (lambda: adapted(lora_dropout=0.1), "set lora_dropout=0"),
        (lambda: adapted(use_dora=True), "DoRA"),
        (merged, "unmerge it"),
        (lambda: new_model(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}), "'dynamic'"),
    ],
)
def test_models_for_which_it_cannot_hold_are_refused_by_name(make, reason):
    with pytest.raises(NotBitwise, match=reason):
        BitwiseDecoder(make())


def test_every_family_of_the_fused_pass_is_covered():
    assert {FAMILIES[name][0] for name in COVERED} == {"Llama", "Qwen2", "Qwen3", "Mistral"}
