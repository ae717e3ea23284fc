"""Packed attention and chunked log-probabilities: same values and gradients as the plain computation."""

import pytest
import torch
from torch import nn

from ludic.models import head as head_module
from ludic.models.head import Head, chosen_logps, find_head, hidden_states
from ludic.models.packed_attention import PackedSequences
from ludic.models.passes.routing import route_attention
from ludic.models.weights import shared_view
from ludic.types import ConfigError
from tests.unit.inference.local.tiny_models import FAMILIES, new_model

pytestmark = pytest.mark.slow

LENGTHS = [9, 9, 8, 3, 14, 1, 2]


def grads(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_sequences_equal_single_ones_in_value_and_gradient(family):
    model = new_model(family)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    torch.manual_seed(1)
    sequences = [torch.randint(0, 128, (n,)) for n in LENGTHS]
    target = [torch.randn(n, 128) for n in LENGTHS]

    alone = torch.cat([model(input_ids=s[None], use_cache=False).logits[0] for s in sequences])
    (alone * torch.cat(target)).sum().backward()
    expected = grads(model)

    view = shared_view(model)
    route_attention(view)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    state = PackedSequences(LENGTHS, torch.device("cpu"))
    hidden = hidden_states(view, torch.cat(sequences), positions, state)
    packed = find_head(view).logits(hidden)
    (packed * torch.cat(target)).sum().backward()
    found = grads(model)

    assert torch.allclose(packed, alone, atol=2e-4, rtol=1e-4)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-3 * float(grad.abs().max()) + 1e-5), name


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("chunk", [1 << 27, 3 * 50, 1], ids=["one chunk", "three tokens", "one token"])
def test_chosen_logps_equal_a_log_softmax_in_value_and_gradient(softcap, with_bias, with_entropy, chunk, monkeypatch):
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    hidden, layer = torch.randn(7, 16, requires_grad=True), nn.Linear(16, 50, bias=with_bias)
    nn.init.normal_(layer.weight)
    changed = (hidden, *layer.parameters())
    targets, temperature = torch.randint(0, 50, (7,)), torch.rand(7) + 0.5
    upstream, upstream_entropy = torch.randn(7), torch.randn(7)

    logits = layer(hidden)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_probs = torch.log_softmax(logits / temperature[:, None], dim=-1)
    plain = log_probs.gather(-1, targets[:, None])[:, 0]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    value = (plain * upstream).sum() + ((entropy * upstream_entropy).sum() if with_entropy else 0)
    expected = torch.autograd.grad(value, changed)

    ours, ours_entropy = chosen_logps(
        hidden, Head(layer, softcap), targets, 1 / temperature, entropy="train" if with_entropy else None
    )
    value = (ours * upstream).sum()
    if with_entropy:
        assert torch.allclose(ours_entropy, entropy, atol=1e-5)
        value = value + (ours_entropy * upstream_entropy).sum()
    assert torch.allclose(ours, plain, atol=1e-5)
    for found, grad in zip(torch.autograd.grad(value, changed), expected, strict=True):
        assert torch.allclose(found, grad, atol=1e-5)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(5, 4)
    logps, _ = chosen_logps(hidden, Head(weight), torch.tensor([0, 1, 2]))
    logps.sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_a_model_that_scales_its_logits_is_refused():
    model = new_model()
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 2
        return out

    model.forward = scaled
    route_attention(model)
    with pytest.raises(ConfigError, match="transforms its logits"):
        find_head(model)


def test_autocast_computes_in_half_precision_and_keeps_fp32_gradients():
    model = new_model("llama").requires_grad_(True)
    view = shared_view(model)
    route_attention(view)
    sequences = [torch.randint(0, 128, (n,)) for n in LENGTHS]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    arguments = view, torch.cat(sequences), positions, PackedSequences(LENGTHS, torch.device("cpu"))
    targets = torch.cat(sequences)
    plain, _ = chosen_logps(hidden_states(*arguments), find_head(view), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrow, _ = chosen_logps(hidden_states(*arguments), find_head(view), targets)
    assert narrow.dtype is torch.float32
    assert 0 < float((narrow - plain).abs().mean()) < 0.1
    narrow.sum().backward()
    assert model.lm_head.weight.grad.dtype is torch.float32
