"""The gradient of a batch does not depend on how it is computed: budget, packing, padding, chunks."""

import pytest
import torch

from ludic.models import head as head_module
from ludic.training.losses import (
    CISPOLoss,
    ClippedSurrogateLoss,
    CompositeLoss,
    EntropyBonus,
    GMPOLoss,
    LossTerm,
    ReinforceBaselineLoss,
    TokenClippedSurrogateLoss,
    TokenKLLoss,
)
from ludic.training.policy import TrainedPolicy
from ludic.training.update import FrozenReference, accumulate_gradients
from ludic.types import SAWItem
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.samples import random_items

LENGTHS = [5, 9, 9, 17, 30, 2, 12, 7]
LOSSES = {
    "grpo": TokenClippedSurrogateLoss(),
    "token_mean": TokenClippedSurrogateLoss(reduction="token_mean"),
    "constant": TokenClippedSurrogateLoss(reduction="constant", constant_length=64),
    "gspo": ClippedSurrogateLoss(clip_eps_low=0.2, clip_eps_high=0.3, length_normalize=True),
    "gmpo": GMPOLoss(),
    "baseline": ReinforceBaselineLoss(normalize=True, length_normalize=True),
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
    reference = FrozenReference(TrainedPolicy(trainable(family, seed=1).requires_grad_(False)))
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
@pytest.mark.parametrize("budget", [30, *(pytest.param(other, marks=pytest.mark.slow) for other in (40, 64))])
def test_the_gradient_and_the_statistics_do_not_depend_on_the_budget(name, budget):
    items = random_items(LENGTHS)
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


def test_the_order_of_samples_does_not_matter():
    items = random_items(LENGTHS)
    assert_same(gradient(LOSSES["grpo"], items[::-1]), gradient(LOSSES["grpo"], items))


def test_the_chunks_of_the_head_do_not_show(monkeypatch):
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
