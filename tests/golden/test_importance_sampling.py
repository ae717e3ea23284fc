"""What corrections estimate, exactly: every sequence of two tokens out of three words, weighed by how likely a sampler draws it.

The policy that is trained and the one that sampled are tables of logits (the second token's depend on the first), so expected
gradients are sums over nine sequences, and the true policy gradient is the derivative of an expectation.
"""

import itertools

import pytest
import torch

from ludic.training.losses import (
    ActionTokens,
    BatchFacts,
    CorrectedLoss,
    KLLoss,
    MaskedCausalLMCrossEntropyLoss,
    SequenceRejection,
    SequenceTruncation,
    TokenKLLoss,
    TokenRejection,
    TokenTruncation,
)

WORDS = 3
SEQUENCES = list(itertools.product(range(WORDS), repeat=2))
NO_CAP = 1e6


def table(seed):
    """Logits of the first token, then of the second after each first."""
    return torch.randn(1 + WORDS, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def logps_of(logits):
    """[9, 2] log-probs of both tokens of every sequence."""
    rows = logits.log_softmax(-1)
    return torch.stack([torch.stack([rows[0, a], rows[1 + a, b]]) for a, b in SEQUENCES])


REWARDS = torch.randn(len(SEQUENCES), dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def true_gradient(logits):
    logits = logits.clone().requires_grad_()
    (logps_of(logits).sum(1).exp() * REWARDS).sum().backward()
    return logits.grad


def expected_gradient(logits, sampler, corrections):
    """Of −loss, over sequences that the sampler draws."""
    logits = logits.clone().requires_grad_()
    loss_fn = CorrectedLoss(MaskedCausalLMCrossEntropyLoss(length_normalize=False), corrections)
    new, old = logps_of(logits), logps_of(sampler)
    facts = BatchFacts(num_items=1, num_tokens=2)
    for number, chance in enumerate(old.sum(1).exp().tolist()):
        tokens = ActionTokens(
            logps=new[number],
            weights=REWARDS[number].expand(2),
            item_index=torch.zeros(2, dtype=torch.int64),
            num_items=1,
            facts=facts,
            old_logps=old[number],
        )
        (-chance * loss_fn(tokens)[0]).backward(retain_graph=True)
    return logits.grad


@pytest.mark.parametrize(
    "correction", [SequenceTruncation(NO_CAP), SequenceRejection(NO_CAP)], ids=lambda c: type(c).__name__
)
def test_sequence_ratios_give_the_policy_gradient_from_any_samples(correction):
    policy, sampler = table(0), table(1)
    torch.testing.assert_close(expected_gradient(policy, sampler, [correction]), true_gradient(policy))


@pytest.mark.parametrize(
    "correction",
    [None, TokenTruncation(NO_CAP), TokenRejection(NO_CAP)],
    ids=lambda correction: type(correction).__name__,
)
def test_token_ratios_and_no_ratios_are_unbiased_only_on_policy(correction):
    policy, sampler = table(0), table(1)
    corrections = [correction] if correction is not None else []
    torch.testing.assert_close(expected_gradient(policy, policy, corrections), true_gradient(policy))
    off = (expected_gradient(policy, sampler, corrections) - true_gradient(policy)).norm() / true_gradient(
        policy
    ).norm()
    assert off > 0.1


def test_the_bias_of_token_ratios_is_the_missing_ratio_of_earlier_tokens():
    """For a last token only what came before matters; for the first, what comes after."""
    policy, sampler = table(0), table(1)
    found = expected_gradient(policy, sampler, [TokenTruncation(NO_CAP)])
    rows, old_first, new_first = policy.log_softmax(-1).exp(), *(t[0].softmax(-1) for t in (sampler, policy))
    rewards = REWARDS.view(WORDS, WORDS)
    for first in range(WORDS):
        # After each first token: μ(first) · Σ_b π(b) R (1[b] − π), where the policy gradient has π(first).
        chances = rows[1 + first]
        slope = torch.diag(chances) - chances[:, None] * chances[None]
        torch.testing.assert_close(found[1 + first], old_first[first] * slope @ rewards[first])
        torch.testing.assert_close(true_gradient(policy)[1 + first], new_first[first] * slope @ rewards[first])


def kl_of(logits, reference):
    """Of whole sequences."""
    new, ref = logps_of(logits).sum(1), logps_of(reference).sum(1)
    return (new.exp() * (new - ref)).sum()


def expected_kl_gradient(loss_fn, logits, sampler, reference):
    logits = logits.clone().requires_grad_()
    new, old, ref = logps_of(logits), logps_of(sampler), logps_of(reference)
    for number, chance in enumerate(old.sum(1).exp().tolist()):
        tokens = ActionTokens(
            logps=new[number],
            weights=torch.zeros(2, dtype=torch.float64),
            item_index=torch.zeros(2, dtype=torch.int64),
            num_items=1,
            facts=BatchFacts(num_items=1, num_tokens=2),
            old_logps=old[number],
            ref_logps=ref[number],
        )
        (chance * loss_fn(tokens)[0]).backward(retain_graph=True)
    return logits.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighted_kl_of_whole_samples_has_the_gradient_of_the_kl_from_any_samples(estimator):
    policy, sampler, reference = table(0), table(1), table(2)
    logits = policy.clone().requires_grad_()
    kl_of(logits, reference).backward()
    loss = KLLoss(to="reference", estimator=estimator, importance_weighted=True)
    torch.testing.assert_close(expected_kl_gradient(loss, policy, sampler, reference), logits.grad)
    plain = KLLoss(to="reference", estimator=estimator)
    off = (expected_kl_gradient(plain, policy, sampler, reference) - logits.grad).norm() / logits.grad.norm()
    assert off > 0.1


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_weighted_kl_of_tokens_has_the_gradient_of_each_tokens_kl_at_the_sampled_contexts(estimator):
    policy, sampler, reference = table(0), table(1), table(2)
    logits = policy.clone().requires_grad_()
    rows, ref, firsts = logits.log_softmax(-1), reference.log_softmax(-1), sampler[0].softmax(-1)
    kl_R = (rows.exp() * (rows - ref)).sum(-1)
    (kl_R[0] + (firsts * kl_R[1:]).sum()).backward()
    loss = TokenKLLoss(to="reference", estimator=estimator, reduction="sample_sum", importance_weighted=True)
    torch.testing.assert_close(expected_kl_gradient(loss, policy, sampler, reference), logits.grad)


@pytest.mark.parametrize("cap", [0.8, 1.5])
def test_a_cap_bounds_what_one_sample_can_do_and_a_rejection_drops_it(cap):
    policy, sampler = table(0), table(1)
    old, new = logps_of(sampler), logps_of(policy)
    ratio = (new - old).sum(1).exp()
    assert ratio.min() < cap < ratio.max()
    for make, factor in (
        (SequenceTruncation, ratio.clamp(max=cap)),
        (SequenceRejection, torch.where(ratio <= cap, ratio, 0.0)),
    ):
        logits = policy.clone().requires_grad_()
        (old.sum(1).exp() * factor * REWARDS * logps_of(logits).sum(1)).sum().backward()
        torch.testing.assert_close(expected_gradient(policy, sampler, [make(cap)]), logits.grad)
