"""Distillation over the whole vocabulary through the trainer, with real models and any packing."""

import numpy as np
import pytest
import torch

from ludic.models import teacher_kl as kl_module
from ludic.models.loading import LoadedModel
from ludic.training import TrainerConfig, make_grpo, make_opd
from ludic.training.algorithms import Objective, mix_objectives
from ludic.training.learner.frozen import make_teacher
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import (
    BatchNormalized,
    CISPOLoss,
    CompositeLoss,
    CorrectedLoss,
    DistillationLoss,
    LossTerm,
    RoutedLoss,
    TokenMask,
)
from ludic.types import ConfigError
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.bandit import bandit_trainer, tiny_llama
from tests.unit.training.samples import random_items
from tests.unit.training.test_teaching import Vocabulary

pytestmark = pytest.mark.slow

LENGTHS = [5, 9, 17, 30, 2, 12]
LOSSES = {
    "reverse": DistillationLoss(),
    "forward, top 7": DistillationLoss(direction="forward", top_k=7, reduction="token_mean"),
}


def student():
    return new_model("llama", initializer_range=0.1).requires_grad_(True)


def teacher():
    """Of another family and size."""
    return new_model("qwen3", seed=1, hidden_size=16, initializer_range=0.2)


def gradient(loss, items, *, packed=True, budget=4096):
    model = student()
    sums = accumulate_gradients(
        TrainedPolicy(model, packed=packed),
        loss,
        items,
        micro_token_budget=budget,
        teacher=TrainedPolicy(teacher(), packed=packed),
    )
    return {name: p.grad for name, p in model.named_parameters()}, sums.means()


def plain_gradient(loss, items):
    """Sample by sample, all logits at once."""
    model, frozen = student(), teacher()
    num_tokens = sum(item.num_action_tokens for item in items)
    total, kls = torch.zeros(()), []
    for item in items:
        ids, where = torch.tensor(item.input_ids[None].astype(np.int64)), np.flatnonzero(item.action_mask) - 1
        temperature = item.attachments.temperature
        p, q = (torch.log_softmax(m(ids).logits[0, where] / temperature, -1) for m in (model, frozen))
        if loss.kl.top_k is None:
            kl = (p.exp() * (p - q)).sum(-1)
        else:
            best = q.topk(loss.kl.top_k).indices
            p, q = (
                torch.cat([x.gather(-1, best), (1 - x.exp().gather(-1, best).sum(-1, keepdim=True)).log()], -1)
                for x in (p, q)
            )
            kl = (q.exp() * (q - p)).sum(-1)
        total = total + (kl.mean() / len(items) if loss.kl.top_k is None else kl.sum() / num_tokens)
        kls.append(kl.detach())
    total.backward()
    return {name: p.grad for name, p in model.named_parameters()}, float(torch.cat(kls).mean()), total.item()


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-5 * max(1.0, float(grad.abs().max()))), name


@pytest.mark.parametrize("name", LOSSES)
def test_the_trainers_gradient_is_that_of_plain_autograd_on_whole_logits(name):
    items = random_items(LENGTHS, temperature=0.7)
    found, stats = gradient(LOSSES[name], items)
    expected, mean_kl, total = plain_gradient(LOSSES[name], items)
    assert any(float(grad.abs().max()) > 1e-3 for grad in expected.values())
    assert_same(found, expected)
    assert stats["teacher_kl" if name == "reverse" else "teacher_kl_forward"] == pytest.approx(mean_kl, rel=1e-4)
    assert stats["loss"] == pytest.approx(total, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("how", [{"budget": 30}, {"packed": False}, {"packed": False, "budget": 40}], ids=str)
def test_the_gradient_does_not_depend_on_cutting_packing_or_chunks(monkeypatch, name, how):
    items = random_items(LENGTHS, temperature=0.7)
    expected, stats = gradient(LOSSES[name], items)
    monkeypatch.setattr(kl_module, "_CHUNK_ELEMENTS", 5 * 128)
    found, other_stats = gradient(LOSSES[name], items, **how)
    assert_same(found, expected)
    for key in ("loss", *(key for key in stats if key.startswith("teacher_kl"))):
        assert other_stats[key] == pytest.approx(stats[key], abs=1e-4), key


# --- losses around it ---


def test_wrappers_need_the_teacher_of_the_inner_loss():
    inner = DistillationLoss(top_k=8)
    terms = [LossTerm(name="rl", loss=CISPOLoss()), LossTerm(name="teacher", loss=inner)]
    wrapped = [CompositeLoss(terms), RoutedLoss(terms), CorrectedLoss(inner, [TokenMask()]), BatchNormalized(inner)]
    assert [loss.needs.teacher_kl for loss in wrapped] == [inner.kl] * 4
    assert CompositeLoss(terms[:1]).needs.teacher_kl is None


def test_two_different_kls_in_one_loss_are_refused():
    terms = [LossTerm(name=name, loss=DistillationLoss(direction=name)) for name in ("reverse", "forward")]
    for kind in (CompositeLoss, RoutedLoss):
        with pytest.raises(ConfigError, match="different KLs to the teacher"):
            kind(terms)


def test_a_batch_may_mix_rewards_and_a_teacher():
    mixed = mix_objectives(
        {"rl": Objective(algorithm=make_grpo()), "teacher": Objective(algorithm=make_opd(kl="reverse"))}
    )
    items = [*random_items([5, 9], objective="rl"), *random_items([12, 7], seed=1, objective="teacher")]
    found, stats = gradient(mixed.loss, items)
    assert stats["teacher/teacher_kl"] > 0 and "rl/ratio_mean" in stats
    expected, _ = gradient(DistillationLoss(), items[2:])
    rl_only, _ = gradient(CompositeLoss([LossTerm(name="rl", loss=make_grpo().loss)]), items[:2])
    assert_same(found, {name: expected[name] + rl_only[name] for name in expected})


# --- the trainer ---


def test_a_model_is_not_its_own_frozen_teacher():
    model = tiny_llama()
    with pytest.raises(ConfigError, match="is the model that is trained"):
        make_teacher(
            loaded(model),
            make_opd(kl="reverse"),
            TrainedPolicy(model),
            TrainerConfig(),
            tokenizer=Vocabulary(),
            is_spread=False,
        )
    assert all(parameter.requires_grad for parameter in model.parameters())


def loaded(model, **changes):
    vocabulary = Vocabulary()
    if changes:
        vocabulary.get_vocab = lambda: {f"<{number}>": number for number in range(264)} | changes
    return LoadedModel(model, vocabulary, "the teacher")


@pytest.mark.parametrize(
    ("algorithm", "given", "says"),
    [
        (make_opd(kl="reverse"), {"tokenizer": Vocabulary()}, r"give Trainer\(teacher="),
        (make_opd(), {"teacher": loaded(tiny_llama(1))}, "would not be used"),
        (make_opd(kl="reverse"), {"teacher": loaded(tiny_llama(1))}, "Give the student's"),
        (
            make_opd(kl="reverse"),
            {"teacher": LoadedModel(tiny_llama(1), None, "x"), "tokenizer": Vocabulary()},
            "Give the teacher's",
        ),
        (
            make_opd(kl="forward"),
            {"teacher": loaded(tiny_llama(1), **{"<1>": 2, "<2>": 1}), "tokenizer": Vocabulary()},
            "the teacher has another tokenizer",
        ),
        (
            make_opd(kl="forward"),
            {"teacher": loaded(tiny_llama(1, vocab_size=272)), "tokenizer": Vocabulary()},
            "272 tokens and the student 264",
        ),
    ],
    ids=["no teacher", "no use", "no tokenizer", "no tokenizer of it", "other tokenizer", "other size"],
)
def test_an_unfit_teacher_is_refused_before_the_first_step(algorithm, given, says):
    with pytest.raises(ConfigError, match=says):
        bandit_trainer(algorithm, group_size=1, num_prompts=2, **given)


def test_sharded_weights_are_refused():
    policy = TrainedPolicy(tiny_llama())
    with pytest.raises(ConfigError, match="spread over ranks"):
        make_teacher(
            loaded(tiny_llama(1)),
            make_opd(kl="reverse"),
            policy,
            TrainerConfig(),
            tokenizer=Vocabulary(),
            is_spread=True,
        )
