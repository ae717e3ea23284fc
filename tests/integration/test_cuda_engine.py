"""The CUDA path of the embedded engine; runs where there is a GPU (`pytest -m gpu`)."""

import asyncio
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest  # noqa: E402 - after the skip


def tiny(dtype: Any = None, **settings: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = {
        "vocab_size": 500, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 2048,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**{**config, **settings})).to(dtype or torch.float32).cuda().eval()


def prompts(count: int, low: int = 3, high: int = 300) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 500, size=int(n)).tolist() for n in rng.integers(low, high, size=count)]


def generate(model: Any, prompt: list[int], num_new: int) -> list[int]:
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]).cuda(), max_new_tokens=num_new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def complete(engine: Any, all_prompts: list[list[int]], **sampling: Any) -> list[Any]:
    async def run() -> list[Any]:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling})
        requests = [
            TokenCompletionRequest(model="", prompt_token_ids=p, sampling=params, return_=ReturnSpec.for_rl(), seed=i)
            for i, p in enumerate(all_prompts)
        ]
        return [r for r, _ in await asyncio.gather(*(engine.complete_tokens(request) for request in requests))]

    return asyncio.run(run())


@pytest.mark.parametrize("settings", [{}, {"num_key_value_heads": 4}, {"num_attention_heads": 8, "head_dim": 80}])
@pytest.mark.parametrize("kv_tokens", [100_000, 1500])
def test_greedy_equals_generate_with_and_without_preemption(settings, kv_tokens):
    from ludic.inference.local import LocalEngine

    model = tiny(**settings)
    texts = prompts(20)
    expected = [generate(model, p, 24) for p in texts]
    # Compiled code rounds differently (fused, in another order), so token for token is asked of the plain layers only.
    engine = LocalEngine(model, kv_tokens=kv_tokens, max_prefill_tokens=256, max_sequences=16, compile_layers=False)
    for _ in range(2):  # the second time with prefix hits
        assert [r.completion_token_ids.tolist() for r in complete(engine, texts)] == expected
    assert engine.stats["prefix_tokens_reused"] > 0 and (kv_tokens > 2000 or engine.stats["preemptions"] > 0)
    engine.close()


def test_logprobs_equal_a_plain_forward_pass():
    from ludic.inference.local import LocalEngine

    model = tiny()
    texts = prompts(8)
    engine = LocalEngine(model, kv_tokens=20_000)
    for temperature in (1.0, 0.7):
        for prompt, response in zip(texts, complete(engine, texts, temperature=temperature), strict=True):
            tokens = torch.tensor([[*prompt, *response.completion_token_ids.tolist()]]).cuda()
            with torch.no_grad():
                logits = model(tokens).logits[0, len(prompt) - 1 : -1].float() / temperature
            expected = logits.log_softmax(-1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].cpu().numpy()
            np.testing.assert_allclose(response.completion_logprobs, expected, atol=1e-4)
    engine.close()


def test_sampling_frequencies_match_the_softmax():
    from ludic.inference.local import LocalEngine

    model = tiny(vocab_size=40)
    engine = LocalEngine(model, kv_tokens=200_000, max_sequences=512)
    prompt = [3, 4, 5]
    with torch.no_grad():
        probabilities = (model(torch.tensor([prompt]).cuda()).logits[0, -1].float() / 0.8).softmax(-1).cpu().numpy()
    drawn = complete(engine, [prompt] * 20_000, temperature=0.8, max_tokens=1)
    counts = np.bincount([int(r.completion_token_ids[0]) for r in drawn], minlength=40)
    expected = probabilities * 20_000
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 39 + 4 * (2 * 39) ** 0.5  # four standard deviations of a chi-square with 39 degrees
    engine.close()


def test_no_token_comes_from_stale_keys_after_an_update():
    from ludic.inference.local import LocalEngine

    model = tiny()
    texts = prompts(6)
    engine = LocalEngine(model, kv_tokens=20_000, compile_layers=False)
    complete(engine, texts)
    with engine.updating(), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    assert [r.completion_token_ids.tolist() for r in complete(engine, texts)] == [generate(model, p, 24) for p in texts]
    engine.close()


def test_compiled_layers_leave_the_module_alone():
    from ludic.inference.local import LocalEngine

    model = tiny()
    engine = LocalEngine(model, kv_tokens=20_000)
    complete(engine, prompts(4))
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    engine.close()


def test_a_seeded_request_draws_the_same_beside_one_with_filters():
    from ludic.inference.local import LocalEngine

    engine = LocalEngine(tiny(), kv_tokens=20_000, compile_layers=False)
    prompt = [7, 8, 9]

    async def run(*others: SamplingParams) -> list[int]:
        plain = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
        requests = [
            TokenCompletionRequest(model="", prompt_token_ids=prompt, sampling=params, seed=5)
            for params in (plain, *others)
        ]
        answers = await asyncio.gather(*(engine.complete_tokens(request) for request in requests))
        return answers[0][0].completion_token_ids.tolist()

    filtered = SamplingParams(temperature=1.0, top_k=3, max_tokens=20, ignore_eos=True)
    assert asyncio.run(run()) == asyncio.run(run(filtered, filtered))
    engine.close()
