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

from ludic.inference.local import LocalEngine, LogitsNotFinite  # noqa: E402 - after the skip
from ludic.inference.local.sampling import derive_bits, race  # noqa: E402
from ludic.types import (  # noqa: E402 - after the skip
    NotFinite,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from tests.unit.inference.local.tiny_models import extreme_settings  # noqa: E402


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


def test_no_token_comes_from_stale_keys_after_an_update():
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
    model = tiny()
    engine = LocalEngine(model, kv_tokens=20_000)
    complete(engine, prompts(4))
    assert all(layer._compiled_call_impl is None for layer in model.model.layers)
    engine.close()


def test_a_seeded_request_draws_the_same_beside_one_with_filters():
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


def test_noise_and_draws_are_those_of_the_cpu():
    from ludic_gpu.cuda.kernels import sample_rows

    generator = torch.Generator().manual_seed(0)
    for vocab in (40, 128, 1000, 49_152, 50_257):
        logits = torch.randn(64, vocab, generator=generator) * 3
        seeds = torch.randint(2**62, (64,), generator=generator)
        seeds[0] = 2**63 - 1
        lengths = torch.arange(64) * 7 + 1
        temperatures = torch.tensor([1.0, 0.0, 0.7, 1.5]).repeat(16)
        keys = derive_bits(seeds[:, None], lengths[:, None])
        bits = derive_bits(keys, torch.arange(-400, vocab))
        on_gpu = derive_bits(keys.cuda(), torch.arange(-400, vocab).cuda())
        assert torch.equal(on_gpu.cpu(), bits)
        scaled = logits / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
        weights = (scaled - scaled.max(dim=-1, keepdim=True).values).exp()
        drawn = race(weights, torch.stack([seeds, lengths], dim=1))[0][:, 0]
        expected = torch.where(temperatures == 0, logits.argmax(dim=-1), drawn)
        found, logprobs = sample_rows(logits.cuda(), seeds.cuda(), lengths.cuda(), temperatures.cuda())
        assert found.cpu().tolist() == expected.tolist()
        # fp32 sums of exponentials of 50,000 numbers, in another order than the CPU's.
        expected_logprobs = scaled.double().log_softmax(dim=-1).gather(1, expected[:, None])[:, 0]
        np.testing.assert_allclose(logprobs.cpu().numpy(), expected_logprobs.numpy(), atol=2e-5)


def test_rows_that_are_not_finite_give_nan_and_leave_others_alone():
    from ludic_gpu.cuda.kernels import sample_rows

    logits = torch.randn(6, 9000, generator=torch.Generator().manual_seed(0))
    rest = torch.arange(6), torch.full((6,), 3), torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 0.0])
    before = sample_rows(logits.cuda(), *(x.cuda() for x in rest))
    logits[0], logits[1, 8500], logits[2], logits[3, 5] = float("nan"), float("nan"), float("-inf"), float("inf")
    tokens, logprobs = (x.cpu() for x in sample_rows(logits.cuda(), *(x.cuda() for x in rest)))
    assert logprobs.isnan().tolist() == [True] * 4 + [False] * 2
    assert int(tokens.min()) >= 0 and int(tokens.max()) < 9000
    assert (tokens[4:].tolist(), logprobs[4:].tolist()) == (before[0][4:].tolist(), before[1][4:].tolist())
    logits[4, :5000] = float("-inf")  # ruled out by the model itself, a whole loop of the kernel
    tokens, logprobs = (x.cpu() for x in sample_rows(logits.cuda(), *(x.cuda() for x in rest)))
    assert tokens[4] >= 5000 and torch.isfinite(logprobs[4])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_fail_their_request_alone(temperature):
    model = tiny()
    texts = [[t for t in p if t != 499] for p in prompts(6)]
    with torch.no_grad():
        model.lm_head.weight[499] = 0.0
    # The weights stay finite, or the engine would refuse them.
    model.get_input_embeddings().register_forward_hook(
        lambda module, ids, rows: rows.masked_fill((ids[0] == 499)[..., None], float("nan"))
    )
    engine = LocalEngine(model, kv_tokens=20_000, compile_layers=False)
    expected = [r.completion_token_ids.tolist() for r in complete(engine, texts)]

    async def run() -> list[Any]:
        good = [
            TokenCompletionRequest(
                model="", prompt_token_ids=p, sampling=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            )
            for p in texts
        ]
        sampling = SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
        bad = TokenCompletionRequest(model="", prompt_token_ids=[7, 8, 499], sampling=sampling, seed=1)
        return await asyncio.gather(*map(engine.complete_tokens, [*good, bad]), return_exceptions=True)

    *answers, failure = asyncio.run(run())
    assert isinstance(failure, LogitsNotFinite)
    assert [answer.completion_token_ids.tolist() for answer, _ in answers] == expected
    assert engine.failure is None
    engine.close()


@pytest.mark.parametrize("compile_layers", [False, True])
def test_seeded_requests_of_unequal_lengths_draw_the_same_alone_and_together(compile_layers):
    texts = prompts(16)
    engine = LocalEngine(tiny(vocab_size=32_000), kv_tokens=40_000, compile_layers=compile_layers)
    together = [r.completion_token_ids.tolist() for r in complete(engine, texts, temperature=1.5)]

    async def alone(number: int) -> list[int]:
        request = TokenCompletionRequest(
            model="",
            prompt_token_ids=texts[number],
            sampling=SamplingParams(temperature=1.5, max_tokens=24, ignore_eos=True),
            seed=number,
        )
        return (await engine.complete_tokens(request))[0].completion_token_ids.tolist()

    # Logits move by about 1e-5 with the batch size: 384 draws change with a probability of less than one in a hundred.
    assert [asyncio.run(alone(number)) for number in range(16)] == together
    engine.close()


def test_a_filter_that_keeps_every_token_draws_the_same_on_the_host_as_the_device():
    texts = prompts(8)
    engine = LocalEngine(tiny(), kv_tokens=20_000, compile_layers=False)
    on_device = complete(engine, texts, temperature=1.2)
    on_host = complete(engine, texts, temperature=1.2, min_p=1e-30)
    for one, other in zip(on_device, on_host, strict=True):
        assert one.completion_token_ids.tolist() == other.completion_token_ids.tolist()
    engine.close()


# --- requests that once killed a server -----------------------------------------------------------------------------


def ask_together(engine: Any, requests: list[TokenCompletionRequest]) -> list[Any]:
    """Responses, or what each request failed with; all of them are there before the first step."""

    async def run() -> list[Any]:
        engine.pause()
        asked = [asyncio.ensure_future(engine.complete_tokens(request)) for request in requests]
        await asyncio.sleep(0)
        engine.resume()
        found = await asyncio.gather(*asked, return_exceptions=True)
        return [one if isinstance(one, BaseException) else one[0] for one in found]

    return asyncio.run(run())


def plain(prompt: list[int], seed: int, **sampling: Any) -> TokenCompletionRequest:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 40, "ignore_eos": True, **sampling})
    return TokenCompletionRequest(
        model="", prompt_token_ids=prompt, sampling=params, return_=ReturnSpec.for_rl(), seed=seed
    )


def is_alive(engine: Any) -> bool:
    """The worker lives, and no assertion of the device waits for the next call."""
    torch.cuda.synchronize()
    return engine.failure is None and len(complete(engine, [[3, 4, 5]])[0].completion_token_ids) == 24


VOCAB = 500


@pytest.mark.parametrize("compile_layers", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_settings_at_their_limits_draw_tokens(dtype, compile_layers):
    engine = LocalEngine(tiny(getattr(torch, dtype)), kv_tokens=40_000, compile_layers=compile_layers)

    settings = extreme_settings(VOCAB, length=40)
    everything = list(range(VOCAB))  # a prompt that every penalty applies to
    for greedy in ({}, {"temperature": 0.0}):
        asked = [plain(everything, seed, **{**setting, **greedy}) for seed, setting in enumerate(settings)]
        for response in ask_together(engine, asked):
            assert not isinstance(response, BaseException), response
            ids = response.completion_token_ids
            assert len(ids) and ids.min() >= 0 and ids.max() < VOCAB and np.isfinite(response.completion_logprobs).all()
        for setting in settings:  # alone as well: rounds without the host are taken where every row is plain
            (response,) = ask_together(engine, [plain(everything, 1, **{**setting, **greedy})])
            assert np.isfinite(response.completion_logprobs).all()
    assert is_alive(engine)
    engine.close()


@pytest.mark.parametrize("victim", [{"temperature": 0.0}, {}, {"top_p": 0.9, "min_p": 0.01}], ids=str)
@pytest.mark.parametrize("at", ["prompt", "decoding"])
def test_a_request_that_fails_leaves_its_neighbours_as_one_that_ends_there(at, victim):
    """One engine, the same batches twice; a number on the device says after which token the logits are NaN."""
    model = tiny()
    broken_token = torch.full((), -1, device="cuda")
    model.get_input_embeddings().register_forward_hook(
        lambda module, ids, rows: rows.masked_fill((ids[0] == broken_token)[..., None], float("nan"))
    )
    engine = LocalEngine(model, kv_tokens=20_000, compile_layers=False)
    # No text of the others may hold the token that breaks: it is drawn by the victim alone.
    others = [plain([t for t in p if t < 400], seed) for seed, p in enumerate(prompts(6, low=30))]
    (first,) = ask_together(engine, [plain([7, 8, 9], 5, **{**victim, "max_tokens": 1})])
    token = int(first.completion_token_ids[0])
    prompt = [7, 8, 9, token] if at == "prompt" else [7, 8, 9]
    asked = [plain(prompt, 5, **{**victim, "max_tokens": 1 if at == "prompt" else 2}), *others]
    engine.new_version()  # nothing is cached: both times all is computed
    ended, *expected = ask_together(engine, asked)
    affected = [i for i, r in enumerate(expected) if token in [*others[i].prompt_token_ids, *r.completion_token_ids]]
    if affected:  # leave those out, and do it again
        others = [other for i, other in enumerate(others) if i not in affected]
        asked = [asked[0], *others]
        engine.new_version()
        ended, *expected = ask_together(engine, asked)
    assert len(others) >= 2 and not any(token in r.completion_token_ids for r in expected)
    broken_token.fill_(token)
    engine.new_version()
    failed, *found = ask_together(engine, asked)
    assert isinstance(failed, LogitsNotFinite) and not isinstance(ended, BaseException)
    for one, other in zip(expected, found, strict=True):
        assert one.completion_token_ids.tolist() == other.completion_token_ids.tolist()
        np.testing.assert_array_equal(one.completion_logprobs, other.completion_logprobs)
    assert is_alive(engine)
    engine.close()


@pytest.mark.parametrize("compile_layers", [False, True])
def test_weights_that_are_not_finite_fail_requests_and_the_engine_serves_the_next_ones(compile_layers):
    model = tiny()
    engine = LocalEngine(model, kv_tokens=20_000, compile_layers=compile_layers)
    texts = prompts(6)
    expected = [r.completion_token_ids.tolist() for r in complete(engine, texts)]
    for value in (float("nan"), float("inf")):
        kept = model.model.layers[1].mlp.up_proj.weight.detach().clone()
        with engine.updating(), torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = value
        failed = ask_together(
            engine, [plain(p, 1, top_p=p_min) for p, p_min in zip(texts, [1.0, 0.5] * 3, strict=True)]
        )
        assert all(isinstance(one, NotFinite) for one in failed)
        assert engine.failure is None
        with engine.updating(), torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight.copy_(kept)
        assert [r.completion_token_ids.tolist() for r in complete(engine, texts)] == expected
    assert is_alive(engine)
    engine.close()


def test_rows_without_a_candidate_draw_a_token_of_the_vocabulary():
    from ludic_gpu.cuda.kernels import sample_rows

    for vocab in (5, 127, 128, 129, 4097):
        for value in (float("nan"), float("-inf"), float("inf")):
            logits = torch.full((4, vocab), value, device="cuda")
            seeds, lengths = torch.arange(4, device="cuda"), torch.full((4,), 3, device="cuda")
            temperatures = torch.tensor([0.0, 1.0, 1e-3, 1e6], device="cuda")
            tokens, logprobs = sample_rows(logits, seeds, lengths, temperatures)
            assert bool(logprobs.isnan().all()) and int(tokens.min()) >= 0 and int(tokens.max()) < vocab
    torch.cuda.synchronize()
