"""The implementations of a forward pass on a CPU agree, and a row does not depend on the other rows of the batch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ludic.inference.local.kv import PrefillState, Span
from ludic.models.forward import (
    FusedLlama,
    Layout,
    ModuleForward,
    PackedLinear,
    _keeps_rows,
    is_packable,
    make_forward,
    packed_bytes,
)
from ludic.models.passes.routing import route_attention
from ludic.models.weights import WeightsWatch, shared_view
from tests.tiny_families import family_model
from tests.unit.inference.local.tiny_models import FAMILIES, new_model

FUSED = {"llama", "llama-mha-tied", "qwen2", "qwen3", "mistral-sliding"}


@pytest.mark.parametrize("shape", [(32, 48), (512, 520)], ids=["small", "large"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_layer_equals_its_concatenated_linear_layers(shape, has_bias):
    torch.manual_seed(0)
    linears = [nn.Linear(*shape, bias=has_bias), nn.Linear(shape[0], 3, bias=has_bias)]
    packed = PackedLinear(*linears)
    x = torch.randn(5, shape[0])
    with torch.inference_mode():
        expected = torch.cat([linear(x) for linear in linears], dim=-1)
        assert torch.allclose(packed(x), expected, atol=1e-5)
        assert torch.allclose(packed(x[None]), expected[None], atol=1e-5)


SHAPES = [(32, 48), (100, 77), (512, 520), (1536, 576)]
OTHER_COUNTS = [*range(2, 70), 90, 129, 200]
"""More than the probe tries."""


def assert_rows_are_kept(layer, x, counts):
    everything = layer(x)
    for count in counts:
        assert torch.equal(layer(x[:count].contiguous()), everything[:count]), count


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_of_a_packed_layer_does_not_depend_on_the_others_where_the_probe_says_so(shape):
    torch.manual_seed(0)
    packed = PackedLinear(nn.Linear(*shape, bias=False))
    if not packed.keeps_rows:
        pytest.skip("no layout keeps rows apart in products of this shape on this processor")
    with torch.inference_mode():
        assert_rows_are_kept(packed, torch.randn(260, shape[0]), OTHER_COUNTS)


def test_a_layer_takes_the_first_layout_that_keeps_rows_and_says_when_none_does(monkeypatch):
    product = Layout.product

    def depends_on_the_batch(layout, x, arranged, bias):
        return product(layout, x, arranged, bias) + (len(x) if layout in unstable else 0)

    monkeypatch.setattr(Layout, "product", depends_on_the_batch)
    linear, x = nn.Linear(33, 47), torch.randn(5, 33)
    _keeps_rows.cache_clear()
    unstable = {Layout.TRANSPOSED}
    packed = PackedLinear(linear)
    is_kept = packed.keeps_rows
    assert not is_kept or torch.allclose(packed(x), linear(x), atol=1e-5), "the stable layout"
    _keeps_rows.cache_clear()
    unstable = set(Layout)
    assert not PackedLinear(linear).keeps_rows
    model = new_model("llama")
    assert not make_forward(routed_view(model), pack=True).keeps_rows
    assert not make_forward(routed_view(model), pack=False).keeps_rows
    _keeps_rows.cache_clear()


def test_a_mixture_of_experts_makes_no_promise_about_rows():
    assert not make_forward(routed_view(family_model("qwen3_moe", attention="eager")), pack=True).keeps_rows


def skip_without_bf16():
    if not is_packable(nn.Linear(1, 1).bfloat16()):
        pytest.skip("oneDNN does not compute in bf16 on this processor")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_packed_layer_in_bf16(shape, has_bias):
    skip_without_bf16()
    torch.manual_seed(0)
    linears = [nn.Linear(*shape, bias=has_bias).bfloat16(), nn.Linear(shape[0], 3, bias=has_bias).bfloat16()]
    packed, x = PackedLinear(*linears), torch.randn(70, shape[0]).bfloat16()
    with torch.inference_mode():
        exact = torch.cat(
            [F.linear(x.double(), m.weight.double(), m.bias.double() if has_bias else None) for m in linears], dim=-1
        )
        everything = packed(x)
        assert (everything.double() - exact).abs().max() < 2**-8 * exact.abs().max(), "rounded once"
        if packed.keeps_rows:
            assert_rows_are_kept(packed, x, range(2, 70))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3-sliding"])
def test_a_forward_pass_in_bf16_is_as_exact_packed_as_plain(family):
    skip_without_bf16()
    model = new_model(family, initializer_range=0.1).bfloat16()
    tokens = [5, 9, 30, 2, 77, 61, 8]
    exact, plain, packed = (
        logits(make_forward(routed_view(m), pack=pack), tokens)
        for m, pack in ((copy.deepcopy(model).double(), False), (model, False), (model, True))
    )
    assert not isinstance(make_forward(routed_view(model), pack=True), FusedLlama), "its norms sum in the model's dtype"
    assert (packed - exact).abs().mean() < 1.5 * (plain - exact).abs().mean()


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", [(32, 48), (64, 320), (576, 1536)], ids=str)
def test_a_row_of_a_plain_layer_does_not_depend_on_the_others_where_the_probe_says_so(shape, num_threads):
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        torch.manual_seed(0)
        layer = nn.Linear(*shape)
        forward = ModuleForward(layer, [])
        if not forward.keeps_rows:
            pytest.skip("plain products of this shape do not keep rows apart on this processor")
        with torch.inference_mode():
            assert_rows_are_kept(layer, torch.randn(260, shape[0]), [n for n in OTHER_COUNTS if n >= forward.min_rows])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_sees_new_weights_only_after_refresh(dtype):
    linear = nn.Linear(8, 4).to(dtype)
    if not is_packable(linear):
        pytest.skip("oneDNN does not compute in bf16 on this processor")
    packed = PackedLinear(linear)
    x = torch.randn(3, 8).to(dtype)
    with torch.no_grad():
        before = packed(x)
        linear.weight.mul_(2)
        assert torch.equal(packed(x), before)
        packed.refresh()
        assert torch.allclose(packed(x), linear(x), atol=1e-6, rtol=torch.finfo(dtype).eps)


def routed_view(model):
    view = shared_view(model)
    route_attention(view)
    return view


@torch.inference_mode()
def logits(way, tokens):
    """Two sequences end to end."""
    half = len(tokens) // 2
    spans = [Span(0, 0, half, torch.empty(0)), Span(half, 0, len(tokens) - half, torch.empty(0))]
    positions = torch.cat([torch.arange(half), torch.arange(len(tokens) - half)])
    return way.logits(torch.tensor(tokens), positions, PrefillState(None, spans, None), torch.arange(len(tokens)))


WIDE = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
BIASES = {"mlp_bias": True, "attention_bias": True}


@pytest.mark.parametrize(
    ("family", "changes", "atol", "rtol"),
    [*((family, {}, 2e-4, 1e-4) for family in FAMILIES), ("llama", WIDE, 1e-3, 1e-3), ("llama", BIASES, 2e-4, 1e-4)],
)
def test_fast_and_plain_forward_agree(family, changes, atol, rtol):
    model = new_model(family, **changes)
    plain, fast = make_forward(routed_view(model), pack=False), make_forward(routed_view(model), pack=True)
    assert isinstance(plain, ModuleForward)
    assert isinstance(fast, FusedLlama if family in FUSED else ModuleForward)
    assert fast.min_rows == 2 and plain.min_rows == max(16, 4 * torch.get_num_threads())
    tokens = torch.randint(0, 128, (24,)).tolist()
    assert torch.allclose(logits(fast, tokens), logits(plain, tokens), atol=atol, rtol=rtol)


def test_a_model_with_other_arithmetic_uses_its_own_modules(caplog):
    view = routed_view(new_model())
    view.model.layers[1].mlp.act_fn = nn.GELU()
    assert isinstance(make_forward(view, pack=True), ModuleForward)
    assert "differs from its family's arithmetic" in caplog.text


def test_forward_hooks_are_called():
    model = new_model()
    calls = []
    model.model.layers[0].register_forward_hook(lambda *args: calls.append(1))
    way = make_forward(routed_view(model), pack=True)
    assert isinstance(way, ModuleForward)
    calls.clear()
    logits(way, list(range(20)))
    assert calls == [1]


def test_shared_view_shares_tensors_but_not_modules():
    model = new_model()
    model.train()
    view = shared_view(model)
    assert all(a is b for a, b in zip(model.parameters(), view.parameters(), strict=True))
    assert model.training and not view.training
    route_attention(view)
    assert model.config._attn_implementation == "eager" and view.config._attn_implementation == "ludic"
    assert packed_bytes(view) == sum(m.weight.numel() * 4 for m in model.modules() if type(m) is nn.Linear)


def test_weights_watch_detects_changed_and_replaced_weights():
    model = new_model()
    watch = WeightsWatch(model)
    assert not watch.has_changed() and not watch.is_replaced(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.5)
    assert watch.has_changed() and not watch.is_replaced(model)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
    assert watch.is_replaced(model)
