"""The gradient of a batch does not depend on how it is computed: budget, packing, padding, chunks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from ludic.models import attention
from ludic.models import head as head_module
from ludic.models.head import whole_logits
from ludic.training import ConstantCredit, RLAlgorithm
from ludic.training.learner.frozen import Reference
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.packing import collate_saw_items
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import (
    BatchNormalized,
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    CorrectedLoss,
    DivergenceMask,
    EntropyBonus,
    GMPOLoss,
    KLLoss,
    Loss,
    LossTerm,
    Needs,
    NegativeSequenceMask,
    Reduction,
    ReinforceBaselineLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
    as_loss,
)
from ludic.types import ConfigError, SAWItem
from tests.extended import cases
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.samples import in_three_episodes, random_items

pytestmark = pytest.mark.slow

LENGTHS = [5, 9, 9, 17, 30, 2, 12, 7]
LOSSES = {
    "grpo": TokenClippedSurrogateLoss(),
    "token_mean": TokenClippedSurrogateLoss(reduction="token_mean"),
    "episode_mean": TokenClippedSurrogateLoss(reduction="episode_mean"),
    "constant": TokenClippedSurrogateLoss(reduction=Reduction("constant", 64)),
    "gspo": ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.3, length_normalize=True),
    "gmpo": GMPOLoss(),
    "gmpo_episode_mean": GMPOLoss(reduction="episode_mean"),
    "baseline": ReinforceBaselineLoss(normalize=True, length_normalize=True),
    "decoupled": TokenClippedSurrogateLoss(behavior_cap=1.5, reduction="token_mean"),
    "masked": CorrectedLoss(
        TokenClippedSurrogateLoss(clip_eps_high=1e6), [NegativeSequenceMask(0.02), DivergenceMask(0.01)]
    ),
    "weighted_kl": CompositeLoss(
        [
            LossTerm(name="policy", loss=CISPOLoss()),
            LossTerm(name="kl", loss=TokenKLLoss(to="reference", importance_weighted=True)),
            LossTerm(name="sample_kl", loss=KLLoss(to="reference", importance_weighted=True, weight_cap=2.0)),
        ]
    ),
    "with_entropy_and_kl": CompositeLoss(
        [
            LossTerm(name="policy", loss=CISPOLoss()),
            LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1)),
            LossTerm(name="kl", loss=TokenKLLoss(coeff=0.3, to="reference")),
        ]
    ),
}


def trainable(family: str = "llama", seed: int = 0):
    model = new_model(family, seed=seed, initializer_range=0.1)
    return model.requires_grad_(True)


def gradient(loss, items, *, family="llama", packed=True, budget=4096):
    model = trainable(family)
    reference = Reference(TrainedPolicy(trainable(family, seed=1).requires_grad_(False)))
    sums = accumulate_gradients(
        TrainedPolicy(model, packed=packed),
        loss,
        items,
        micro_token_budget=budget,
        reference=reference,
        watch_entropy=True,
    )
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sums.means()


def assert_same(found, expected):
    grads, stats = found
    expected_grads, expected_stats = expected
    assert grads.keys() == expected_grads.keys()
    for name, grad in expected_grads.items():
        assert torch.allclose(grads[name], grad, atol=1e-5 * max(1.0, float(grad.abs().max()))), name
    for name, value in expected_stats.items():
        if name != "num_micro_batches":
            assert stats[name] == pytest.approx(value, abs=2e-4), name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("budget", cases([30, 40, 64], default=[30]))
def test_gradient_and_statistics_do_not_depend_on_the_budget(name, budget):
    items = in_three_episodes(random_items(LENGTHS))
    whole, cut = gradient(LOSSES[name], items), gradient(LOSSES[name], items, budget=budget)
    assert cut[1]["num_micro_batches"] > 1 == whole[1]["num_micro_batches"]
    assert any(float(grad.abs().max()) > 1e-3 for grad in whole[0].values())
    assert_same(cut, whole)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3-sliding"])
@pytest.mark.parametrize("budget", [40, 4096])
def test_packed_and_padded_agree(family, budget):
    items = random_items(LENGTHS)
    loss = LOSSES["grpo"]
    assert_same(gradient(loss, items, family=family, packed=False, budget=budget), gradient(loss, items, family=family))


# --- models other than decoders that pack, and losses without our base class ---


def gradients_of(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradient_of_whole_logits(model, loss, items, packed=True):
    """The trainer's gradient against the loss on the model's own logits, in one padded batch."""
    tensors = collate_saw_items(items, pad_token_id=0)
    RLAlgorithm(name="plain", credit_assigner=ConstantCredit(), loss=loss).compute_loss(model, tensors)[0].backward()
    expected = gradients_of(model)
    model.zero_grad()
    policy = TrainedPolicy(model, packed=packed)
    accumulate_gradients(policy, as_loss(loss), items, micro_token_budget=64)
    found = gradients_of(model)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.allclose(found[name], grad, atol=1e-5 * max(1.0, float(grad.abs().max()))), name
    return found


@pytest.mark.parametrize("packed", [True, False])
def test_an_output_bias_is_trained_as_transformers_computes_it(packed):
    model = trainable("phi-output-bias")
    found = assert_gradient_of_whole_logits(model, TokenClippedSurrogateLoss(), random_items(LENGTHS), packed)
    assert float(found["lm_head.bias"].abs().max()) > 1e-3


def test_model_that_cannot_pack_is_padded(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    config = transformers.GPTJConfig(vocab_size=128, n_embd=16, n_layer=1, n_head=2, n_positions=64, rotary_dim=4)
    torch.manual_seed(0)
    model = transformers.GPTJForCausalLM(config).eval()
    found = assert_gradient_of_whole_logits(model, TokenClippedSurrogateLoss(), random_items(LENGTHS))
    assert "padded samples instead of packed ones" in caplog.text and float(found["lm_head.bias"].abs().max()) > 1e-3


class Recurrent(nn.Module):
    """A language model that is no transformers model; what its forward is given and gives back differs."""

    def __init__(self, give=lambda logits: logits):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(128, 8), nn.GRU(8, 8, batch_first=True)
        self.out, self.give = nn.Linear(8, 128), give

    def forward(self, tokens):
        return self.give(self.out(self.cell(self.embedding(tokens))[0]))


GIVEN = {
    "tensor": lambda logits: logits,
    "tuple": lambda logits: (logits, None),
    "dict": lambda logits: {"logits": logits},
    "object": lambda logits: SimpleNamespace(logits=logits),
}


@pytest.mark.parametrize("form", GIVEN)
def test_module_that_returns_logits_is_trained(form):
    torch.manual_seed(0)
    loss = CompositeLoss(
        [LossTerm(name="policy", loss=CISPOLoss()), LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1))]
    )
    # A composite divides by the whole batch, so the one padded batch gives the same gradient as several micro-batches.
    assert_gradient_of_whole_logits(Recurrent(GIVEN[form]), loss, random_items(LENGTHS))


def test_module_without_logits_is_refused():
    policy = TrainedPolicy(Recurrent(lambda logits: logits[:, 0]))
    with pytest.raises(
        ConfigError, match=r"Recurrent was given token ids of \(1, 5\).*returned a tensor of \(1, 128\)"
    ):
        policy.logps(policy.batch(random_items([5])))
    with pytest.raises(ConfigError, match="only returns logits; a critic"):
        _ = policy.head


class OfTheSeeds:
    """A loss as the seeds describe it: one method, no base class."""

    def compute(self, logits, batch):
        logps = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
        per_sample = (logps * batch["action_mask"][:, 1:]).sum(1)
        loss = -(batch["weight"] * per_sample).mean()
        return loss, {"loss": loss.detach(), "sum_of_logps": per_sample.mean().detach()}


@pytest.mark.parametrize("model", [trainable, Recurrent])
def test_loss_with_only_compute_is_trained(model):
    items = random_items(LENGTHS)
    assert_gradient_of_whole_logits(model(), OfTheSeeds(), items)
    made = model()
    stats = accumulate_gradients(TrainedPolicy(made), as_loss(OfTheSeeds()), items, micro_token_budget=64).means()
    whole = OfTheSeeds().compute(*_logits_and_batch(made, items))[1]
    assert stats["loss"] == pytest.approx(float(whole["loss"]), rel=1e-4)
    assert stats["sum_of_logps"] == pytest.approx(float(whole["sum_of_logps"]), rel=1e-4)


def _logits_and_batch(model, items):
    tensors = collate_saw_items(items, pad_token_id=0)
    return whole_logits(model, tensors["input_ids"], tensors["attention_mask"]), tensors


def test_losses_without_a_base_class_can_be_parts_of_others():
    class WithOf:
        def __call__(self, tokens):
            return -tokens.reduce_items(tokens.item_sum(tokens.weights * tokens.logps)), {}

    items = [replace(item, attachments=replace(item.attachments, token_weights=None)) for item in random_items(LENGTHS)]
    both = [CompositeLoss([LossTerm(name="half", loss=own, weight=0.5)]) for own in (OfTheSeeds(), WithOf())]
    assert_same_gradient(*(gradient(loss, items)[0] for loss in both))
    center = [gradient(BatchNormalized(own), items)[0] for own in (OfTheSeeds(), WithOf())]
    assert_same_gradient(*center)
    with pytest.raises(ConfigError, match="neither compute"):
        as_loss(object())


def test_gradient_does_not_depend_on_the_heads_chunks(monkeypatch):
    items = random_items(LENGTHS)
    whole = gradient(LOSSES["with_entropy_and_kl"], items)
    monkeypatch.setattr(head_module, "_CHUNK_ELEMENTS", 7 * 128)
    assert_same(gradient(LOSSES["with_entropy_and_kl"], items), whole)


def test_log_probs_are_taken_at_the_sampling_temperature():
    model = trainable()
    policy = TrainedPolicy(model)
    [item] = random_items([20], temperature=0.5)
    logps, _ = policy.logps(policy.batch([item]))
    ids = torch.tensor(item.input_ids[None].tolist())
    log_probs = torch.log_softmax(model(input_ids=ids).logits[0, :-1] / 0.5, dim=-1)
    expected = log_probs.gather(-1, ids[0, 1:, None])[:, 0][torch.from_numpy(item.action_mask[1:])]
    assert torch.allclose(logps, expected, atol=1e-5)


def test_sampler_and_trainer_agree_on_what_the_engine_sampled():
    import asyncio

    from ludic.inference.local import LocalEngine
    from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest

    model = trainable()

    async def ask(engine, prompt):
        request = TokenCompletionRequest(
            model="",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.8, max_tokens=12, ignore_eos=True),
            return_=ReturnSpec.for_rl(),
            seed=3,
        )
        return (await engine.complete_tokens(request))[0]

    async def sample():
        async with LocalEngine(model, max_model_len=64) as engine:
            return await asyncio.gather(*(ask(engine, [1, 2, n]) for n in range(5)))

    policy = TrainedPolicy(model)
    for response in asyncio.run(sample()):
        ids = [*response.prompt_token_ids, *response.completion_token_ids]
        item = SAWItem(ids, None, [0] * 3 + [1] * 12, 1.0)
        object.__setattr__(item.attachments, "temperature", 0.8)
        logps, _ = policy.logps(policy.batch([item]))
        assert torch.allclose(logps, torch.from_numpy(response.completion_logprobs.copy()), atol=1e-4)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda t: t.logps.sum(), r"returned Tensor; a loss returns a scalar tensor and \{name: \(sum, count\)\}"),
        (lambda t: (t.logps, {}), r"a loss returns a scalar tensor"),
        (lambda t: (t.logps.sum(), {"mine": t.logps.sum()}), r"the statistic 'mine' is no pair \(sum, count\)"),
    ],
    ids=["no statistics", "a value per token", "a bare statistic"],
)
def test_loss_that_returns_something_else_is_named(returned, message):
    class Mine(Loss):
        needs = Needs(old_logps=False)

        def __call__(self, tokens):
            return returned(tokens)

    with pytest.raises(ConfigError, match=f"Mine.*{message}"):
        accumulate_gradients(TrainedPolicy(new_model()), Mine(), random_items([5, 9]), micro_token_budget=64)


def assert_same_gradient(found, expected):
    assert_same((found, {}), (expected, {}))
