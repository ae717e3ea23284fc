"""The load-balancing loss of a mixture: its formula written out, and transformers' own function as a second witness."""

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from ludic_gpu.experts import RouterPass, balance_loss, load_counts

NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS, NUM_TOKENS = 4, 2, 2, 7


def routed_pass(logits_LTE: torch.Tensor) -> RouterPass:
    routed = RouterPass()
    for layer, logits_TE in enumerate(logits_LTE):
        routed.logits_TE[layer], routed.chosen_TK[layer] = logits_TE, logits_TE.topk(NUM_CHOSEN, dim=-1).indices
    return routed


def new_logits() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(NUM_LAYERS, NUM_TOKENS, NUM_EXPERTS).requires_grad_(True)


def written_out(logits_LTE: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """Mean over layers of E · Σ_e f_e · P_e, token by token."""
    total = torch.zeros(())
    for logits_TE in logits_LTE:
        share, probability = [0.0] * NUM_EXPERTS, [torch.zeros(())] * NUM_EXPERTS
        for count, logits_E in zip(tokens, logits_TE, strict=True):
            for expert in sorted(range(NUM_EXPERTS), key=lambda e: -logits_E[e].item())[:NUM_CHOSEN]:
                share[expert] += count / (NUM_CHOSEN * sum(tokens))
            exponents = [torch.exp(logit) for logit in logits_E]
            for expert in range(NUM_EXPERTS):
                probability[expert] = probability[expert] + count * exponents[expert] / sum(exponents) / sum(tokens)
        total = total + NUM_EXPERTS * sum(f * p for f, p in zip(share, probability, strict=True))
    return total / NUM_LAYERS


@pytest.mark.parametrize(
    "tokens", [[1] * NUM_TOKENS, [1, 0, 3, 1, 0, 2, 1]], ids=["every token once", "padding and shared"]
)
def test_value_and_gradient_are_those_of_the_formula(tokens):
    ours, theirs = new_logits(), new_logits()
    routed, tokens_T = routed_pass(ours), torch.tensor(tokens)
    value = balance_loss(routed, tokens_T, load_counts(routed, tokens_T, NUM_EXPERTS))
    value.backward()
    expected = written_out(theirs, tokens)
    expected.backward()
    assert torch.allclose(value, expected, atol=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7) and float(ours.grad.abs().max()) > 1e-3


def test_transformers_computes_the_same_for_one_layer_but_for_the_factor_of_chosen_experts():
    ours, theirs = new_logits(), new_logits()
    routed, tokens_T = routed_pass(ours), torch.ones(NUM_TOKENS)
    value = balance_loss(routed, tokens_T, load_counts(routed, tokens_T, NUM_EXPERTS))
    by_layer = [load_balancing_loss_func((logits,), NUM_EXPERTS, NUM_CHOSEN) for logits in theirs]
    expected = sum(by_layer) / NUM_LAYERS / NUM_CHOSEN
    value.backward()
    expected.backward()
    assert torch.allclose(value, expected, atol=1e-6)
    assert torch.allclose(ours.grad, theirs.grad, atol=1e-7)


def test_an_even_load_gives_one_and_a_single_expert_the_most():
    even = torch.zeros(1, 8, NUM_EXPERTS)
    routed = routed_pass(even)
    counts = torch.full((1, NUM_EXPERTS), 4.0)
    assert float(balance_loss(routed, torch.ones(8), counts)) == pytest.approx(1.0)
    collapsed = torch.full((1, 8, NUM_EXPERTS), -30.0)
    collapsed[..., 0] = 30.0
    routed = routed_pass(collapsed)
    counts = torch.tensor([[8.0, 8.0, 0.0, 0.0]])
    assert float(balance_loss(routed, torch.ones(8), counts)) == pytest.approx(NUM_EXPERTS / NUM_CHOSEN)
