"""ECHO worked by hand: which tokens are observations, the value and gradient of their cross-entropy, alone and beside GRPO."""

import numpy as np
import pytest
import torch

from ludic.training.algorithms import make_echo, make_grpo
from ludic.training.learner.gradients import accumulate_gradients, batch_facts
from ludic.training.learner.packing import collate_saw_items
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import ActionTokens, BatchFacts, LossTerm, ObservationLoss, ObservedTokens, RoutedLoss
from ludic.types import ActorTokenLogps, SampleAttachments, SAWItem
from tests.unit.inference.local.tiny_models import new_model

pytestmark = pytest.mark.slow

near = pytest.approx


def sample(ids, mask, weight=1.0, temperature=None, **origin):
    attached = SampleAttachments(actor_logps=ActorTokenLogps([-1.0] * sum(mask)), temperature=temperature)
    made = SAWItem(ids, None, mask, weight, {}, attached)
    return made.with_origin(**origin) if origin else made


def test_observations_are_the_state_tokens_behind_the_first_action():
    #               prompt   call     answer   call  what follows
    found = sample([5, 6, 7, 1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 0, 1, 0, 0]).observation_mask
    assert found.tolist() == [False, False, False, False, True, True, False, True, True]
    assert not sample([5, 6, 1], [0, 0, 1]).observation_mask.any()  # one turn: nothing was answered
    padded = SAWItem([5, 1, 2, 0, 0], [1, 1, 1, 0, 0], [0, 1, 0, 0, 0], 1.0)
    assert padded.observation_mask.tolist() == [False, False, True, False, False]


def observed(logps, item_index, num_items, num_observed):
    leaf = torch.tensor(logps, dtype=torch.float64, requires_grad=True)
    return ActionTokens(
        logps=torch.zeros(num_items, dtype=torch.float64, requires_grad=True),
        weights=torch.ones(num_items, dtype=torch.float64),
        item_index=torch.arange(num_items),
        num_items=num_items,
        facts=BatchFacts(num_items=3, num_tokens=3, num_observed=num_observed),
        observed=ObservedTokens(logps=leaf, item_index=torch.tensor(item_index, dtype=torch.long)),
    )


def test_value_and_gradient_of_a_batch_and_of_its_parts():
    # ℓ = −1, −2, −0.5, −4 over 4 observation tokens of the batch, λ = 0.2: 0.2 · 7.5 / 4, and −0.2 / 4 at each.
    loss = ObservationLoss(coeff=0.2)
    whole = observed([-1.0, -2.0, -0.5, -4.0], [0, 0, 2, 2], 3, 4)
    value, stats = loss(whole)
    value.backward()
    assert value.item() == near(0.375) and whole.observed.logps.grad.tolist() == near([-0.05] * 4)
    assert float(stats["observation_logp_mean"][0]) / stats["observation_logp_mean"][1] == near(-7.5 / 4)
    parts = [observed([-1.0, -2.0], [0, 0], 2, 4), observed([-0.5, -4.0], [0, 0], 1, 4)]
    assert sum(loss(part)[0].item() for part in parts) == near(0.375)
    assert loss(observed([], [], 3, 0))[0].item() == 0.0


def test_an_objective_counts_its_samples_observations_only():
    facts = BatchFacts(
        num_items=3, num_tokens=3, by_objective={"a": BatchFacts(num_items=2, num_tokens=2, num_observed=3)}
    )
    tokens = observed([-1.0, -2.0, -0.5, -4.0], [0, 1, 2, 2], 3, 4)
    part = tokens.select([0, 2], facts.by_objective["a"])
    assert part.observed.item_index.tolist() == [0, 1, 1] and part.observed.logps.tolist() == [-1.0, -0.5, -4.0]
    routed = RoutedLoss([LossTerm(name="a", loss=ObservationLoss())])
    assert routed.needs.observations
    assert ObservationLoss()(part)[0].item() == near(5.5 / 3)


def items():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 120, 4).tolist()
    masks = [[0, 0, 0, 0, 1, 1, 0, 0, 0, 1], [0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1], [0, 1, 0, 0, 1]]
    weights = [1.5, -0.5, -1.0, 0.0]
    return [
        sample([*prompt[: min(4, len(mask) - 1)], *rng.integers(0, 120, len(mask) - min(4, len(mask) - 1)).tolist()], mask, weight, 0.7)
        for mask, weight in zip(masks, weights, strict=True)
    ]  # fmt: skip


def by_hand(model, samples, coeff):
    """−Σ A ρ (no ratio is clipped) over 4 samples, and −λ Σ ℓ over all observation tokens, one sample after the other."""
    total, num_observed = 0.0, sum(int(item.observation_mask.sum()) for item in samples)
    for item in samples:
        ids = torch.tensor(item.input_ids, dtype=torch.long)
        logits = model(input_ids=ids[None]).logits[0].float()
        for at in range(1, len(ids)):
            if item.action_mask[at]:
                logp = torch.log_softmax(logits[at - 1] / 0.7, dim=-1)[ids[at]]
                total = total - item.weight * torch.exp(logp - logp.detach()) / len(samples)
            elif item.observation_mask[at]:
                logp = torch.log_softmax(logits[at - 1], dim=-1)[ids[at]]
                total = total - coeff * logp / num_observed
    return total


def on_policy(model, samples):
    """The samples with the model's own log-probs, so that all ratios are 1."""
    found = []
    for item in samples:
        ids = torch.tensor(item.input_ids, dtype=torch.long)
        with torch.no_grad():
            logps = torch.log_softmax(model(input_ids=ids[None]).logits[0].float() / 0.7, dim=-1)
        own = [float(logps[at - 1, ids[at]]) for at in np.flatnonzero(item.action_mask)]
        attached = SampleAttachments(actor_logps=ActorTokenLogps(own), temperature=0.7)
        found.append(SAWItem(item.input_ids, None, item.action_mask, item.weight, {}, attached))
    return found


@pytest.mark.parametrize("form", ["packed", "padded", "shared", "split", "logits"])
def test_the_trainers_gradient_is_that_of_the_formula(form):
    model = new_model("llama", seed=0, initializer_range=0.1).requires_grad_(True)
    samples = on_policy(model, items())
    expected = by_hand(model, samples, coeff=0.3)
    expected.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    loss = make_echo(group_size=4, observation_coeff=0.3).loss
    if form == "logits":
        batch = collate_saw_items(samples, pad_token_id=0)
        value, _ = loss.compute(
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits, batch
        )
        value.backward()
        value = value.item()
    else:
        policy = TrainedPolicy(model, packed=form != "padded", share_prefixes=form == "shared")
        sums = accumulate_gradients(policy, loss, samples, micro_token_budget=14 if form == "split" else 200)
        means = sums.means()
        assert (means["num_micro_batches"] > 1) is (form == "split")
        value = means["loss"]
    assert value == near(expected.item(), abs=1e-5)
    for name, p in model.named_parameters():
        limit = 1e-5 * max(1.0, float(wanted[name].abs().max()))
        assert torch.allclose(p.grad, wanted[name], atol=limit), name


def test_without_observations_it_is_grpo():
    model = new_model("llama", seed=0).requires_grad_(True)
    single = [sample([3, 4, 5, 6], [0, 0, 1, 1], weight) for weight in (1.0, -1.0)]
    assert batch_facts(single).num_observed == 0
    found = []
    for make in (make_echo, make_grpo):
        model.zero_grad()
        accumulate_gradients(TrainedPolicy(model), make(group_size=2).loss, single, micro_token_budget=64)
        found.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, grad in found[0].items():
        assert torch.equal(grad, found[1][name]), name
