"""Shared prefixes computed once: values and gradients equal those of unshared packing, for every loss and kind of model."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ludic.distributed.ranks import Ranks
from ludic.models import packed_attention
from ludic.models.execution import compile_layers, recompute_activations
from ludic.models.packed_attention import PackedSequences, TreeSequences
from ludic.models.teacher_kl import VocabularyKL
from ludic.training import losses as losses_module
from ludic.training.critic.critic import HeadCritic, ModelCritic
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy, check_shared_prefixes
from ludic.training.losses import (
    CISPOLoss,
    CorrectedLoss,
    DistillationLoss,
    EntropyBonus,
    ForeignLoss,
    LossTerm,
    ObservationLoss,
    Regularized,
    ReinforceLoss,
    RoutedLoss,
    SequenceRejection,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    ValueLoss,
)
from ludic.types import CandidateSets, ConfigError
from tests.extended import cases
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training import test_loss_rules
from tests.unit.training.bandit import hand_trainer
from tests.unit.training.samples import random_items, with_prefix

pytestmark = pytest.mark.slow

EQUAL = 1e-6
"""Of log-probs and gradients in fp32, relative to the largest of them, beyond the rounding of unshared packing itself."""
GRPO = TokenClippedSurrogateLoss()
LOSSES = {
    "observations": ObservationLoss(),
    **test_loss_rules.LOSSES,
    "distillation": DistillationLoss(),
    "regularized": Regularized(GRPO, {"entropy": EntropyBonus(coeff=0.1), "kl": TokenKLLoss(coeff=0.1)}),
    "rejected": CorrectedLoss(GRPO, [SequenceRejection(3.0)]),
    "routed": RoutedLoss([LossTerm(name="one", loss=CISPOLoss()), LossTerm(name="other", loss=ReinforceLoss())]),
}

ONE_OF_EACH_KIND = list({type(loss): name for name, loss in LOSSES.items()}.values())


def sharing_items(**given):
    """A prompt of 20 tokens, 17 more behind it for some samples, a sample twice, one that another continues, two that share
    nothing."""
    items = random_items([5, 9, 9, 12, 8, 2, 11, 7, 6, 6], **given)
    prompt, more = np.arange(3, 23, dtype=np.int32), np.arange(50, 67, dtype=np.int32)
    longer = np.concatenate([prompt, more])
    prefixes = [prompt] * 3 + [longer] * 3 + [longer[:0]] * 2 + [prompt] * 2
    items = [with_prefix(item, prefix) for item, prefix in zip(items, prefixes, strict=True)]
    items[-1] = replace(items[-1], input_ids=items[-2].input_ids)
    items.append(with_prefix(items[0], items[1].input_ids))
    rng = np.random.default_rng(1)
    return [
        replace(
            item.with_origin(objective=("one", "other")[number % 2]),
            attachments=replace(
                item.attachments,
                token_values=rng.normal(size=item.num_action_tokens),
                token_returns=rng.normal(size=item.num_action_tokens),
            ),
        )
        for number, item in enumerate(items)
    ]


def candidate_sets(item, rng):
    """What a top-k or top-p sampler may have kept of 128 tokens, each action among them; some tokens are not cut."""
    actions = item.input_ids[item.action_mask]
    kept = [np.union1d(rng.integers(0, 128, 20), action) if rng.random() < 0.8 else [] for action in actions]
    return replace(item, attachments=replace(item.attachments, candidates=CandidateSets.of(kept)))


def trainable(family="llama", **sizes):
    return new_model(family, initializer_range=0.1, **sizes).requires_grad_(True)


def frozen(family="llama"):
    return TrainedPolicy(new_model(family, seed=1, initializer_range=0.1))


def computed(model, loss, items, *, shares, critic=None, reference=None, budget=4096, compiles=False):
    """Log-probs and gradients by name, and statistics."""
    model = copy.deepcopy(model) if compiles else model
    policy = TrainedPolicy(model, share_prefixes=shares)
    if compiles:
        compile_layers(model)  # after the policy has looked at the layers, as the learner does
    made = None if critic is None else critic(policy)
    parameters = dict(model.named_parameters())
    if made is not None:
        torch.manual_seed(0)
        for parameter in made.head.parameters():
            torch.nn.init.normal_(parameter)
        parameters |= {f"critic {number}": p for number, p in enumerate(made.parameters())}
    sums = accumulate_gradients(
        policy,
        loss,
        items,
        micro_token_budget=budget,
        reference=(reference or (lambda policy: Reference(frozen())))(policy) if loss.needs.reference else None,
        teacher=frozen("qwen3") if loss.needs.teacher_kl is not None else None,
        critic=made,
    )
    found = {name: p.grad.double() for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    with torch.no_grad():
        return {"log-probs": policy.logps(policy.batch(items))[0].double()}, found, sums.means()


def largest(tensors):
    return max(float(tensor.abs().max()) for tensor in tensors.values())


def distance(one, other):
    assert one.keys() == other.keys()
    return largest({name: tensor - other[name] for name, tensor in one.items()}) / largest(other)


def assert_sharing_changes_nothing(model, loss, items, exact=None, *, compiles=False, **given):
    exact = copy.deepcopy(model).double() if exact is None else exact
    *precise, _ = computed(exact, loss, items, shares=False, **given)
    *apart, apart_stats = computed(model, loss, items, shares=False, **given)
    *shared, stats = computed(model, loss, items, shares=True, compiles=compiles, **given)
    assert apart_stats.pop("perf/prefix_sharing") == 1 < stats.pop("perf/prefix_sharing")
    assert largest(apart[1]) > 1e-4
    for ours, theirs, right in zip(shared, apart, precise, strict=True):
        assert distance(ours, right) <= EQUAL + 2 * distance(theirs, right), "both round, each in its order"
    for name, value in apart_stats.items():
        if name != "num_micro_batches":
            assert stats[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_every_loss_is_compared():
    public = [getattr(losses_module, name) for name in losses_module.__all__]
    kinds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, losses_module.Loss)}
    elsewhere = {losses_module.PreferencePairLoss, losses_module.KTOLoss}  # tests/golden/test_preferences.py
    assert kinds - {type(loss) for loss in LOSSES.values()} == {losses_module.Loss, ForeignLoss} | elsewhere, (
        "a foreign loss is padded"
    )


@pytest.mark.parametrize("name", cases(LOSSES, default=ONE_OF_EACH_KIND))
def test_values_and_gradients_of_every_loss(name):
    loss = LOSSES[name]
    critic = (lambda policy: HeadCritic(policy, is_detached=False)) if loss.needs.values else None
    assert_sharing_changes_nothing(trainable(), loss, sharing_items(), critic=critic)


@pytest.mark.parametrize("budget", cases([70, 4096], default=[70]))
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "mistral-sliding", "gemma2-softcap", "gemma3-sliding"])
def test_windows_and_soft_caps_at_any_budget(family, budget):
    assert_sharing_changes_nothing(trainable(family), GRPO, sharing_items(), budget=budget)


def test_temperature_and_candidate_sets():
    rng = np.random.default_rng(2)
    items = [candidate_sets(item, rng) for item in sharing_items(temperature=0.7)]
    assert_sharing_changes_nothing(trainable(), LOSSES["composite"], items)


@pytest.mark.parametrize(
    "how", [VocabularyKL("reverse"), VocabularyKL("forward", top_k=7)], ids=["reverse", "forward, top 7"]
)
def test_teachers_of_another_family(how):
    assert_sharing_changes_nothing(
        trainable(), DistillationLoss(direction=how.direction, top_k=how.top_k), sharing_items()
    )


def test_a_critic_with_another_model():
    assert_sharing_changes_nothing(
        trainable(), ValueLoss(), sharing_items(), critic=lambda policy: ModelCritic(TrainedPolicy(trainable("qwen3")))
    )


@pytest.mark.parametrize("recomputes", [False, True], ids=["", "recomputed"])
def test_an_adapter_and_the_reference_under_it(recomputes):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = peft.get_peft_model(trainable(), peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if recomputes:
        recompute_activations(model)
    assert_sharing_changes_nothing(
        model.train(),
        LOSSES["TokenKLLoss-reference-k3"],
        sharing_items(),
        reference=lambda policy: Reference(policy, adapter_off=True),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2-softcap"])
def test_recomputed_activations(family):
    model = trainable(family)
    recompute_activations(model)
    assert_sharing_changes_nothing(model.train(), GRPO, sharing_items())


@pytest.fixture
def quick_compiler(monkeypatch):
    """Graphs and their gradients as for the default back end, without its minute in a C++ compiler. Beyond its limit of
    recompilations torch would run the layers uncompiled, and say nothing."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


@pytest.mark.slow
def test_compiled_and_recomputed_layers(quick_compiler):
    model = trainable(num_hidden_layers=1).train()
    exact = copy.deepcopy(model).double()
    recompute_activations(model)
    assert_sharing_changes_nothing(model, GRPO, sharing_items(), exact, compiles=True)


@pytest.mark.extended(covered_by="test_compiled_and_recomputed_layers")
@pytest.mark.slow
def test_compiled_layers_that_make_their_length_groups_when_they_attend(quick_compiler, monkeypatch):
    """As on a GPU in fp32, where the copy to the device cannot be traced."""
    made = PackedSequences.__init__

    def without_groups(self, lengths, device):
        made(self, lengths, device)
        self._length_groups = None

    def traced_only_outside(array, device):
        assert not torch.compiler.is_compiling()
        return torch.from_numpy(np.ascontiguousarray(array))

    items, model = random_items([5, 9, 12]), trainable(num_hidden_layers=1).train()
    precise = computed(copy.deepcopy(model).double(), GRPO, items, shares=False)
    plain = computed(model, GRPO, items, shares=False)
    monkeypatch.setattr(PackedSequences, "__init__", without_groups)
    monkeypatch.setattr(packed_attention, "to_device", traced_only_outside)
    found = computed(model, GRPO, items, shares=False, compiles=True)
    for part in (0, 1):  # log-probs, gradients
        assert distance(found[part], precise[part]) <= EQUAL + 2 * distance(plain[part], precise[part])


def test_samples_of_another_tokenizer_are_refused():
    policy = TrainedPolicy(trainable(), share_prefixes=True)
    (item,) = random_items([9])
    foreign = replace(item, input_ids=np.append(item.input_ids[:-1], 10_000).astype(item.input_ids.dtype))
    for use in (policy.batch, lambda items: check_shared_prefixes(policy, items, 0.05, Ranks())):
        with pytest.raises(ConfigError, match="id 10000; the model has .* another tokenizer"):
            use([item, foreign])


def test_sharing_is_turned_off_if_log_probs_differ(caplog, monkeypatch):
    policy, items = TrainedPolicy(trainable(), share_prefixes=True), sharing_items()
    assert not check_shared_prefixes(policy, random_items([5, 9, 12]), 0.05, Ranks()), "nothing is shared yet"
    assert check_shared_prefixes(policy, items, 0.05, Ranks())
    assert policy.share_prefixes and not caplog.records
    monkeypatch.setattr(TreeSequences, "attend", lambda self, layer, query, key, value, rules: query)
    check_shared_prefixes(policy, items, 0.05, Ranks())
    assert not policy.share_prefixes and "computed in full" in caplog.text


async def test_a_step_reports_how_much_is_shared_and_its_speed_in_tokens_that_are_computed():
    stats = await hand_trainer(sharing_items()).train_step()
    assert stats["perf/prefix_sharing"] > 1
    assert stats["perf/unique_tokens_per_s"] == pytest.approx(stats["perf/tokens_per_s"] / stats["perf/prefix_sharing"])
