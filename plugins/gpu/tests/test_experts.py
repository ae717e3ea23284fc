"""Recorded and replayed experts of a mixture: exact, of every family, and of one module tree only."""

import copy

import pytest
import torch

from ludic.models.weights import shared_view
from ludic.types import ConfigError
from ludic_gpu.experts import UNKNOWN, Routers, load_counts, load_stats, recording, replaying
from tests.tiny_families import VOCAB, family_model

MIXTURES = ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "qwen3_next"]
IDS = torch.arange(3, 33).view(2, 15) % VOCAB


@pytest.mark.parametrize("family", MIXTURES)
def test_replaying_the_recorded_experts_changes_no_bit_of_values_and_gradients(family):
    model = family_model(family).requires_grad_(True)
    with recording(model) as own:
        logits = model(IDS, use_cache=False).logits
    logits.square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    experts = own.experts_TLK()
    assert experts.shape[0] == IDS.numel() and experts.dtype is torch.int16
    with replaying(model, experts) as again:
        replayed = model(IDS, use_cache=False).logits
        replayed.square().sum().backward()
    assert torch.equal(replayed, logits) and torch.equal(again.experts_TLK(), experts)
    assert all(
        torch.equal(p, q)
        for p, q in zip((p.grad for p in model.parameters() if p.grad is not None), expected, strict=True)
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_a_token_goes_to_the_experts_that_are_given(family):
    """The weights of other experts than the router's own are those that the router would give them if it had chosen them."""
    model = family_model(family)
    with recording(model) as own, torch.no_grad():
        plain = model(IDS, use_cache=False).logits
    experts = own.experts_TLK()
    routers = Routers(model)
    other = (experts + 1) % routers.num_experts
    with replaying(model, other) as used, torch.no_grad():
        forced = model(IDS, use_cache=False).logits
    assert torch.equal(used.experts_TLK(), other)
    assert not torch.allclose(forced, plain)
    unknown = torch.full_like(experts, UNKNOWN)
    with replaying(model, unknown), torch.no_grad():
        assert torch.equal(model(IDS, use_cache=False).logits, plain)


def test_weights_of_given_experts_follow_from_the_routers_own_logits():
    model = family_model("mixtral", num_hidden_layers=1)
    given = torch.tensor([[0, 3]]).repeat(IDS.numel(), 1, 1).view(-1, 1, 2)
    seen = {}
    model.model.layers[0].mlp.experts.register_forward_pre_hook(lambda module, args: seen.update(weights=args[2]))
    with replaying(model, given) as routed, torch.no_grad():
        model(IDS, use_cache=False)
    probability = torch.softmax(routed.logits_TE[0], dim=-1)[:, [0, 3]]
    assert torch.allclose(seen["weights"], probability / probability.sum(-1, keepdim=True))


def test_checkpointed_layers_replay_in_the_backward_pass_too():
    model = family_model("qwen3_moe").train()
    given = torch.randint(0, 4, (IDS.numel(), 2, 1)).repeat(1, 1, 2)
    given[..., 1] = (given[..., 0] + 1) % 4
    grads = []
    for is_checkpointed in (False, True):
        if is_checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with replaying(model, given):
            model(IDS, use_cache=False).logits.square().sum().backward()
        grads.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_hooks_stay_with_their_tree_and_contexts_nest():
    model = family_model("qwen3_moe")
    routers = Routers(model)
    view = shared_view(model)
    given = torch.zeros(IDS.numel(), 2, 2, dtype=torch.int16)
    given[..., 1] = 1
    with torch.no_grad():
        plain = model(IDS, use_cache=False).logits
        with routers.watched(given) as outer:
            assert torch.equal(view(IDS, use_cache=False).logits, plain), "the engine's tree is not replayed"
            with routers.unwatched():
                assert torch.equal(model(IDS, use_cache=False).logits, plain)
            assert not outer.chosen_TK
            assert not torch.equal(model(IDS, use_cache=False).logits, plain)
        assert torch.equal(model(IDS, use_cache=False).logits, plain)
    routers.remove()
    assert not any(module._forward_hooks for module in model.modules())
    copy.deepcopy(model)


def test_errors_say_what_does_not_fit():
    model = family_model("qwen3_moe")
    with pytest.raises(ConfigError, match="no mixture of experts"):
        Routers(family_model("llama"))
    assert Routers.of(family_model("llama")) is None
    with pytest.raises(ConfigError, match="recorded by another model"), replaying(model, torch.zeros(30, 3, 2)):
        pass
    few = torch.zeros(4, 2, 2, dtype=torch.int16)
    with pytest.raises(ConfigError, match="given for 4 tokens, but the pass has 30"), replaying(model, few):
        model(IDS)


def test_load_is_counted_by_hand():
    """Two layers of four experts, three tokens of which the second is padding and the third counts twice."""
    model = family_model("qwen3_moe")
    with recording(model) as routed:
        routed.chosen_TK = {0: torch.tensor([[0, 1], [2, 3], [0, 2]]), 1: torch.tensor([[0, 1], [0, 1], [2, 3]])}
    counts = load_counts(routed, torch.tensor([1, 0, 2]), 4)
    assert counts.tolist() == [[3, 1, 2, 0], [1, 1, 2, 2]]
    stats = {name: float(value) for name, value in load_stats(counts).items()}
    assert stats["experts/busiest"] == pytest.approx((4 * 3 / 6 + 4 * 2 / 6) / 2)
    assert stats["experts/unused"] == 1 / 8
    even = {name: float(value) for name, value in load_stats(torch.ones(2, 4)).items()}
    assert even == {"experts/busiest": 1.0, "experts/unused": 0.0, "experts/entropy": pytest.approx(1.0)}
