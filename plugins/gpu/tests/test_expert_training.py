"""A mixture in training: load and load-balancing loss do not depend on how a batch is computed; experts are replayed."""

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch

from ludic.distributed.ranks import Ranks
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients, with_proximal_logps
from ludic.training.learner.mini_batches import items_of_state, items_state
from ludic.training.learner.packing import pack, token_keys, truncated
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import TokenClippedSurrogateLoss, TokenKLLoss
from ludic.types import ConfigError, SAWItem
from ludic_gpu.experts import recording
from tests.tiny_families import family_model
from tests.unit.training.samples import random_items, with_prefix

pytestmark = pytest.mark.slow

LENGTHS = [5, 9, 9, 17, 30, 2, 12, 7]
FORMS = {
    "one micro-batch": {"budget": 4096},
    "several": {"budget": 40},
    "padded": {"budget": 64, "packed": False},
    "shared prefixes": {"budget": 4096, "share_prefixes": True},
    "shared prefixes, several": {"budget": 64, "share_prefixes": True},
}
LOSS = TokenClippedSurrogateLoss()


def trainable(family="qwen3_moe"):
    return family_model(family, initializer_range=0.1).requires_grad_(True)


def samples() -> list[SAWItem]:
    """Four of them begin with the same 20 tokens."""
    prefix = np.arange(40, 60, dtype=np.int32)
    return [with_prefix(item, prefix) if number < 4 else item for number, item in enumerate(random_items(LENGTHS))]


def with_experts(items, num_layers=2, num_chosen=2, num_experts=4):
    """Experts by token id, so that equal prefixes have equal experts; the last token's are not known."""
    table = np.random.default_rng(5).permuted(np.tile(np.arange(num_experts), (128, num_layers, 1)), axis=-1)
    given = []
    for item in items:
        experts = table[item.input_ids][:, :, :num_chosen].copy()
        experts[-1] = -1
        given.append(replace(item, attachments=replace(item.attachments, experts=experts)))
    return given


def gradient(
    items, *, budget, packed=True, share_prefixes=False, balance=0.0, replay=False, family="qwen3_moe", **more
):
    model = trainable(family)
    policy = TrainedPolicy(model, packed=packed, share_prefixes=share_prefixes, replay_experts=replay)
    assert policy.packed == packed
    sums = accumulate_gradients(policy, LOSS, items, micro_token_budget=budget, balance_experts=balance, **more)
    return {name: p.grad for name, p in model.named_parameters()}, sums.means()


@functools.cache
def expected_of(is_replayed, balance):
    return gradient(
        with_experts(samples()) if is_replayed else samples(), budget=4096, balance=balance, replay=is_replayed
    )


def assert_close(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-4 * float(grad.abs().max()) + 1e-7), name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_replayed", [False, True], ids=["own experts", "replayed"])
def test_load_loss_and_gradient_do_not_depend_on_how_a_batch_is_computed(form, is_replayed):
    items = with_experts(samples()) if is_replayed else samples()
    expected, stats = expected_of(is_replayed, 0.5)
    without, _ = expected_of(is_replayed, 0.0)
    router = "model.layers.0.mlp.gate.weight"
    assert not torch.allclose(expected[router], without[router], rtol=0.01), "the loss moves the routers"
    found, again = gradient(items, **FORMS[form], balance=0.5, replay=is_replayed)
    assert_close(found, expected)
    names = ("experts/busiest", "experts/unused", "experts/entropy", "experts/balance_loss")
    assert {n: again[n] for n in names} == pytest.approx({n: stats[n] for n in names}, rel=1e-5)
    assert again["loss"] == pytest.approx(stats["loss"], rel=1e-4), "the reported loss is the policy's alone"


def test_replay_takes_the_experts_of_the_samples_and_keeps_what_is_not_known():
    items = with_experts(samples())
    policy = TrainedPolicy(trainable(), replay_experts=True, share_prefixes=True)
    batch = policy.batch(items)
    assert batch.tree is not None
    with policy.routed(batch) as routed:
        policy.logps(batch)
    used = routed.experts_TLK().numpy()
    for item, path in zip(items, batch.paths, strict=True):
        assert np.array_equal(used[path[:-1]], item.attachments.experts[:-1])
        assert (used[path[-1]] >= 0).all()


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_replaying_what_the_trainer_chooses_itself_changes_no_log_prob(packed):
    items = samples()
    own = []
    model = trainable()
    for item in items:
        with recording(model) as routed, torch.no_grad():
            model(torch.tensor(item.input_ids)[None].long(), use_cache=False)
        experts = routed.experts_TLK().numpy()
        own.append(replace(item, attachments=replace(item.attachments, experts=experts)))
    policy = TrainedPolicy(model, packed=packed, replay_experts=True)
    batch = policy.batch(own)
    with torch.no_grad():
        plain = policy.logps(batch)[0]
        with policy.routed(batch):
            replayed = policy.logps(batch)[0]
    assert torch.equal(plain, replayed)


def test_samples_share_a_prefix_only_as_far_as_their_experts_agree():
    first, second, *_ = with_experts(samples())
    other = second.attachments.experts.copy()
    other[17] = (other[17] + 1) % 4
    changed = replace(second, attachments=replace(second.attachments, experts=other))
    keys = token_keys([first, changed])
    assert np.array_equal(keys[0][:17], keys[1][:17]) and keys[0][17] != keys[1][17]
    batch = pack([first, changed], "cpu", share_prefixes=True)
    assert batch.tree is not None and len(batch.ids_T) == len(first.input_ids) + len(second.input_ids) - 17
    for item, path in zip([first, changed], batch.paths, strict=True):
        assert np.array_equal(batch.ids_T.numpy()[path], item.input_ids)
        assert np.array_equal(batch.column_T("experts").numpy()[path], item.attachments.experts)


def test_a_frozen_reference_on_the_same_modules_chooses_its_own_experts():
    policy = TrainedPolicy(trainable(), replay_experts=True)
    items = with_experts(samples())
    batch = policy.batch(items)
    reference = Reference(policy)
    with torch.no_grad():
        alone = policy.logps(batch)[0]
    with policy.routed(batch) as routed:
        replayed = policy.logps(batch)[0]
        chosen = routed.experts_TLK()
        assert torch.equal(reference.logps(batch), alone) and not torch.allclose(replayed, alone)
        assert torch.equal(routed.experts_TLK(), chosen)
    found = with_proximal_logps(policy, items, micro_token_budget=4096, pad_token_id=0, ranks=Ranks())
    assert np.allclose(np.concatenate([i.attachments.proximal_logps for i in found]), replayed.detach(), atol=1e-5)


def test_a_batch_without_experts_cannot_be_replayed():
    with pytest.raises(ConfigError, match="no sample says which experts"):
        gradient(samples(), budget=4096, replay=True)
    with pytest.raises(ConfigError, match="no mixture of experts"):
        TrainedPolicy(family_model("llama"), replay_experts=True)


def test_experts_survive_truncation_and_a_checkpoint():
    item = with_experts(samples())[0]
    cut = truncated(item, 12)
    assert np.array_equal(cut.attachments.experts, item.attachments.experts[:12])
    (again,) = items_of_state(items_state([item]))
    assert np.array_equal(again.attachments.experts, item.attachments.experts)
    (without,) = items_of_state(items_state([replace(item, attachments=replace(item.attachments, experts=None))]))
    assert without.attachments.experts is None


def test_the_kl_to_a_reference_of_another_model_trains_with_replay():
    """The reference is watched separately: its routers belong to the reference."""
    reference = Reference(TrainedPolicy(family_model("qwen3_moe", seed=3).requires_grad_(False)))
    items = with_experts(samples())
    model = trainable()
    policy = TrainedPolicy(model, replay_experts=True)
    loss = TokenKLLoss(to="reference")
    accumulate_gradients(policy, loss, items, micro_token_budget=64, reference=reference, balance_experts=0.1)
    assert all(p.grad is not None for p in model.parameters())
