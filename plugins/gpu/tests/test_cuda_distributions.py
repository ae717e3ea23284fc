"""On a GPU, too, sampler, scorer and trainer mean the same distribution; KL over the vocabulary is that of the CPU."""

import asyncio

import numpy as np
import pytest
import torch

from ludic.inference.local import LocalEngine
from ludic.models.teacher_kl import KLDirection, VocabularyKL
from ludic.training.learner.gradients import accumulate_gradients
from ludic.training.learner.policy import TrainedPolicy
from ludic.training.losses import CompositeLoss, EntropyBonus, LossTerm, ReinforceLoss
from ludic.types import (
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from tests.unit.inference.local.tiny_models import new_model
from tests.unit.training.samples import item_of, random_items

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PROMPTS = [[5, 9, 14], [3, 3, 8, 20, 41], [60], list(range(2, 40))]


def model_on(device, dtype=torch.float32, seed=0):
    model = new_model("llama", seed=seed, initializer_range=0.1, hidden_size=64, head_dim=16)
    return model.to(device, dtype).requires_grad_(True)


def sampled(model, **sampling):
    async def ask(engine):
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
        requests = [
            TokenCompletionRequest(model="m", prompt_token_ids=p, sampling=params, return_=ReturnSpec.for_rl(), seed=i)
            for i, p in enumerate(PROMPTS)
        ]
        return [response for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests))]

    engine = LocalEngine(model, kv_tokens=4096)
    try:
        return asyncio.run(ask(engine))
    finally:
        engine.close()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("truncation", [{}, {"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.2}], ids=str)
def test_the_trainer_gives_tokens_the_probabilities_that_they_were_drawn_with(temperature, truncation):
    model = model_on("cuda")
    items = [item_of(response, temperature) for response in sampled(model, temperature=temperature, **truncation)]
    assert all((item.attachments.candidates is not None) == bool(truncation) for item in items)
    policy = TrainedPolicy(model, mixed_precision_dtype=None)
    with torch.no_grad():
        found = policy.logps(policy.batch(items))[0].cpu().numpy()
    expected = np.concatenate([item.actor_logps for item in items])
    assert np.abs(found - expected).max() < 2e-5


def gradients(device, items, dtype=torch.float32):
    model = model_on(device, dtype)
    loss = CompositeLoss(
        [LossTerm(name="policy", loss=ReinforceLoss()), LossTerm(name="entropy", loss=EntropyBonus(coeff=0.1))]
    )
    accumulate_gradients(TrainedPolicy(model, mixed_precision_dtype=None), loss, items, micro_token_budget=64)
    return {name: p.grad.float().cpu() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "cosine"), [(torch.float32, 0.9999), (torch.bfloat16, 0.97)], ids=["fp32", "bf16"])
def test_the_gradient_of_truncated_samples_is_that_of_the_cpu(dtype, cosine):
    responses = sampled(model_on("cpu"), temperature=0.9, top_p=0.8)
    items = [item_of(response, 0.9, weight=(-1.0) ** number) for number, response in enumerate(responses)]
    found, expected = gradients("cuda", items, dtype), gradients("cpu", items)
    for name, grad in expected.items():
        similarity = torch.nn.functional.cosine_similarity(found[name].flatten(), grad.flatten(), dim=0)
        assert similarity > cosine, (name, float(similarity))


def test_scores_are_those_of_the_model():
    model = model_on("cuda")
    rng = np.random.default_rng(0)
    texts = [(p, rng.integers(2, 60, size=7).tolist()) for p in PROMPTS]
    engine = LocalEngine(model, kv_tokens=4096)

    async def ask():
        return await asyncio.gather(*(engine.score_tokens(p, c, temperature=0.8) for p, c in texts))

    scores = asyncio.run(ask())
    engine.close()
    for (prompt, completion), found in zip(texts, scores, strict=True):
        ids = torch.tensor([[*prompt, *completion]]).cuda()
        with torch.no_grad():
            logps = (model(ids).logits[0, len(prompt) - 1 : -1].float() / 0.8).log_softmax(-1)
        expected = logps.gather(1, ids[0, len(prompt) :, None])[:, 0].cpu().numpy()
        assert np.abs(np.asarray(found) - expected).max() < 2e-4


@pytest.mark.parametrize("autocast", [None, "bf16"])
@pytest.mark.parametrize("top_k", [None, 4])
@pytest.mark.parametrize("direction", ["reverse", "forward"])
def test_the_kl_to_a_teacher_and_its_gradient_are_those_of_the_cpu(direction, top_k, autocast):
    items, how = random_items([9, 17, 5, 12], vocab=60), VocabularyKL(KLDirection(direction), top_k=top_k)

    def on(device, autocast):
        student, teacher = model_on(device), model_on(device, seed=1).requires_grad_(False)
        policy = TrainedPolicy(student, mixed_precision_dtype=autocast)
        batch = policy.batch(items)
        kl = policy.kl_to(
            TrainedPolicy(teacher, mixed_precision_dtype=autocast), policy.action_hidden(batch), batch, how
        )
        kl.sum().backward()
        return kl.detach().float().cpu(), {n: p.grad.float().cpu() for n, p in student.named_parameters()}

    found, found_grads = on("cuda", autocast)
    expected, grads = on("cpu", None)
    assert torch.allclose(
        found, expected, rtol=1e-3 if autocast is None else 0.15, atol=1e-3 if autocast is None else 0.1
    )
    for name, grad in grads.items():
        similarity = torch.nn.functional.cosine_similarity(found_grads[name].flatten(), grad.flatten(), dim=0)
        assert similarity > (0.9999 if autocast is None else 0.97), (name, float(similarity))
