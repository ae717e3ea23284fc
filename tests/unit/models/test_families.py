"""Every family of docs/models.md: the engine, packed and padded training, LoRA and prefix trees against transformers' own forward.

scripts/model_table.py writes into the table which way each family goes; these tests hold for whichever way that is.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from ludic.models.head import plain_model
from ludic.models.loading import LoadedModel
from ludic.models.lora import dense_parameters
from ludic.run.config.model import ModelSettings
from ludic.run.model import load_policy
from ludic.training.learner.policy import TrainedPolicy
from ludic.types import SAWItem
from tests.extended import cases
from tests.tiny_families import FAMILIES, family_model
from tests.unit.inference.local.tiny_models import ask_all, make_engine, request, some_prompt, tokens
from tests.unit.training.samples import random_items, with_prefix

pytestmark = pytest.mark.slow

ONE_OF_EACH_KIND = ["llama", "qwen3", "gemma3", "gemma4", "qwen3_moe", "qwen3_next", "jamba", "gpt2"]
"""Dense, with windows, with experts, recurrent, with learned positions; the engine is compared for all families."""


@cache
def samples() -> list[SAWItem]:
    """Of four lengths, the last two behind the same 18 tokens; longer than every window and chunk of the tiny configs."""
    first, second, *group = random_items([13, 5, 6, 9])
    prefix = np.arange(3, 21, dtype=np.int32)
    return [first, second, *(with_prefix(item, prefix) for item in group)]


def plain_logps(model: Any) -> torch.Tensor:
    """Log-probs of all action tokens, one sample at a time through the model's own forward pass."""
    found = []
    for item in samples():
        ids = torch.from_numpy(item.input_ids.astype(np.int64))
        logps_TV = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        chosen_T = logps_TV[:-1].gather(-1, ids[1:, None])[:, 0]
        found.append(chosen_T[torch.from_numpy(np.asarray(item.action_mask, dtype=bool))[1:]])
    return torch.cat(found)


def gradients(model: Any, logps_A: torch.Tensor) -> dict[str, torch.Tensor]:
    weights_A = torch.linspace(-1, 1, len(logps_A)) + 0.1
    (logps_A * weights_A).sum().backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def assert_alike(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        limit = 1e-3 * float(grad.abs().max()) + 1e-5
        assert torch.allclose(found[name], grad, rtol=0, atol=limit), name


@pytest.mark.parametrize("name", FAMILIES)
async def test_the_engine_writes_the_likeliest_tokens_with_the_log_probs_of_a_plain_forward(name):
    model, reference = family_model(name), family_model(name)
    prompts = [some_prompt(9), some_prompt(9), some_prompt(4)]
    async with make_engine(model, max_model_len=64) as engine:
        answers = await ask_all(engine, [request(prompt, max_tokens=8) for prompt in prompts])
        scored = await engine.score_tokens(list(prompts[0]), tokens(answers[0]))
    for prompt, answer in zip(prompts, answers, strict=True):
        written = torch.tensor(tokens(answer))
        ids = torch.cat([torch.tensor(prompt), written])
        with torch.no_grad():
            logps_NV = reference(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert logps_NV.argmax(-1).tolist() == written.tolist()
        expected = logps_NV.gather(-1, written[:, None])[:, 0].numpy()
        np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
    np.testing.assert_allclose(scored, answers[0].completion_logprobs, atol=1e-4)


@pytest.mark.parametrize("name", cases(FAMILIES, default=ONE_OF_EACH_KIND))
def test_padded_packed_and_shared_samples_have_the_values_and_gradients_of_single_ones(name):
    model = family_model(name)
    expected_A = plain_logps(model)
    expected = gradients(model, expected_A)
    ways = [
        TrainedPolicy(model, packed=False),
        TrainedPolicy(model),
        TrainedPolicy(model, share_prefixes=True),
    ]
    for policy in ways:
        batch = policy.batch(samples())
        found_A = policy.logps(batch)[0]
        torch.testing.assert_close(found_A, expected_A, rtol=0, atol=1e-4)
        assert_alike(gradients(model, found_A), expected)
        if policy.share_prefixes:
            assert batch.tree is not None


@pytest.mark.parametrize("name", cases(FAMILIES, default=ONE_OF_EACH_KIND))
def test_an_adapter_is_trained_and_merged(name):
    torch.manual_seed(0)
    plain = family_model(name)
    settings = ModelSettings(lora_rank=2)
    model = load_policy(settings, given=LoadedModel(plain, None, name)).model
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                parameter.normal_(std=0.3)
    expected_A = plain_logps(plain_model(model))
    expected = gradients(model, expected_A)
    assert expected and all("lora_" in parameter for parameter in expected)
    policy = TrainedPolicy(model)
    found_A = policy.logps(policy.batch(samples()))[0]
    torch.testing.assert_close(found_A, expected_A, rtol=0, atol=1e-4)
    assert_alike(gradients(model, found_A), expected)
    merged = family_model(name, seed=1)
    loaded = merged.load_state_dict(dict(dense_parameters(model)), strict=False)
    assert not loaded.unexpected_keys
    with torch.no_grad():
        torch.testing.assert_close(plain_logps(merged), expected_A.detach(), rtol=0, atol=1e-4)
