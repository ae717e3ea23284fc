"""The engine's greedy texts are those of transformers' generate, token for token, whatever happens on the way."""

import asyncio
import importlib.util
from statistics import fmean

import numpy as np
import pytest
import torch

from ludic.inference.local.cpu import cpu_forward
from ludic.inference.local.runner import RunnerSettings
from ludic.models.passes.routing import route_attention
from tests.extended import cases
from tests.tiny_families import family_model
from tests.unit.inference.local.tiny_models import (
    FAMILIES,
    ask,
    ask_all,
    copy_of,
    family_greedy,
    greedy,
    make_engine,
    new_model,
    plain_logprobs,
    reference_model,
    request,
    shared_model,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

NUM_NEW = 8
SETTINGS = RunnerSettings(num_blocks=512, block_size=4, max_sequences=64, max_length=256, pack_weights=True)
PROMPTS = [some_prompt(length) for length in (1, 9, 16, 25, 40)]

families = pytest.mark.parametrize("family", FAMILIES)
some_families = pytest.mark.parametrize(
    "family", cases(FAMILIES, default=["llama", "gemma2-softcap", "gemma3-sliding"])
)


def expected(family: str) -> list[list[int]]:
    return [family_greedy(family, prompt, NUM_NEW) for prompt in PROMPTS]


def requests():
    return [request(prompt, max_tokens=NUM_NEW) for prompt in PROMPTS]


@families
def test_the_reference_texts_are_worth_comparing(family):
    texts = expected(family)
    assert fmean(len(set(text)) for text in texts) > 5 and len({tuple(text) for text in texts}) == len(texts)


@families
async def test_greedy_alone_equals_generate(family):
    async with make_engine(shared_model(family)) as engine:
        answers = [tokens(await ask(engine, prompt, max_tokens=NUM_NEW)) for prompt in PROMPTS[1::2]]
    assert answers == expected(family)[1::2]


@some_families
async def test_greedy_in_a_mixed_batch_equals_generate(family):
    noise = [request(some_prompt(n, seed=1), temperature=1.0, seed=n, max_tokens=1 + n % 9) for n in range(1, 16)]
    async with make_engine(shared_model(family)) as engine:
        answers = await ask_all(engine, [r for pair in zip(requests(), noise[:5], strict=True) for r in pair] + noise)
    assert [tokens(answer) for answer in answers[:10:2]] == expected(family)


@some_families
async def test_greedy_with_prefix_hits_equals_generate(family):
    async with make_engine(shared_model(family)) as engine:
        first = await ask_all(engine, requests())
        assert engine.stats["prefix_tokens_reused"] == 0
        again = await ask_all(engine, requests())
        # All full blocks before the last token: 0, 8, 12, 24 and 36 tokens.
        assert engine.stats["prefix_tokens_reused"] == 80
        # The next turn of the same conversations: what was sampled is known as well, 4, 12, 20, 28 and 44 tokens.
        turns = [[*prompt, *text[:6]] for prompt, text in zip(PROMPTS, expected(family), strict=True)]
        further = await ask_all(engine, [request(turn, max_tokens=2) for turn in turns])
        assert engine.stats["prefix_tokens_reused"] == 80 + 108
        assert [tokens(answer) for answer in further] == [text[6:] for text in expected(family)]
    assert [tokens(answer) for answer in first] == [tokens(answer) for answer in again] == expected(family)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
async def test_a_request_has_the_same_log_probs_alone_and_in_company_where_products_keep_rows(dtype):
    model = new_model("llama", hidden_size=256, intermediate_size=1024, head_dim=64).to(dtype)
    view = copy_of(model)
    route_attention(view)
    if not cpu_forward(view, SETTINGS).keeps_rows:
        pytest.skip("the matrix products of this model do not keep rows apart on this processor")
    wanted = [request(prompt, temperature=1.0, seed=n, max_tokens=NUM_NEW) for n, prompt in enumerate(PROMPTS)]
    noise = [request(some_prompt(n, seed=1), temperature=1.0, seed=n, max_tokens=1 + n % 9) for n in range(1, 30)]
    alone = []
    for one in wanted:
        async with make_engine(model, pack_weights=True) as engine:
            alone += await ask_all(engine, [one])
    async with make_engine(model, pack_weights=True) as engine:
        together = await ask_all(engine, [*wanted, *noise])
    for own, other in zip(alone, together, strict=False):
        assert tokens(own) == tokens(other) and np.array_equal(own.completion_logprobs, other.completion_logprobs)


def test_the_engine_says_once_that_a_mixture_of_experts_does_not_keep_rows(caplog, monkeypatch):
    monkeypatch.setattr("ludic.models.attention._said", set())
    for _ in range(2):
        cpu_forward(copy_of(family_model("qwen3_moe", attention="eager")), SETTINGS)
    assert caplog.text.count("the same result in batches of other sizes") == 1


async def test_requests_that_end_in_one_step_wake_the_event_loop_once(monkeypatch):
    async with make_engine() as engine:
        loop = asyncio.get_running_loop()
        wakes = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *call: (wakes.append(call), wake(*call))[1])
        engine.pause()
        asked = asyncio.gather(*(ask(engine, PROMPTS[0], max_tokens=1) for _ in range(6)))
        await asyncio.sleep(0)
        engine.resume()
        assert len(await asked) == 6
        assert len(wakes) < 4  # the first computes the prompt, the others share it


async def test_the_members_of_a_group_compute_their_prompt_once():
    async with make_engine() as engine:
        answers = await ask_all(engine, [request(PROMPTS[4], max_tokens=NUM_NEW) for _ in range(5)])
        assert engine.stats["prefix_tokens_reused"] == 4 * 40
    assert [tokens(answer) for answer in answers] == [expected("llama")[4]] * 5


@pytest.mark.parametrize("length", [38, 40, 41])
async def test_the_members_of_a_group_sample_for_themselves(length):
    """From common logits for the first token, and each from its own copy of the last block for the others."""
    members = [request(some_prompt(length), temperature=1.0, seed=seed) for seed in range(5)]
    async with make_engine() as engine:
        alone = []
        for member in members:
            alone.append((await ask_all(engine, [member]))[0])
            engine.new_version()
        together = await ask_all(engine, members)
        following = await ask_all(engine, [request([*some_prompt(length), *tokens(a)[:9]]) for a in together])
    assert [tokens(answer) for answer in together] == [tokens(answer) for answer in alone]
    assert len({tuple(tokens(answer)) for answer in alone}) == 5
    for own, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(own.completion_logprobs, other.completion_logprobs, atol=1e-5)
    texts = [greedy(reference_model(), [*some_prompt(length), *tokens(answer)[:9]], 16) for answer in together]
    assert [tokens(answer) for answer in following] == texts


@some_families
async def test_greedy_across_preemption_equals_generate(family):
    async with make_engine(shared_model(family), kv_tokens=60) as engine:
        answers = await ask_all(engine, requests())
        assert engine.stats["preemptions"] > 0
        assert engine.stats["kv_blocks_used"] == 0
    assert [tokens(answer) for answer in answers] == expected(family)


@some_families
async def test_greedy_with_chunked_prefill_equals_generate(family):
    async with make_engine(shared_model(family), max_prefill_tokens=11) as engine:
        answers = await ask_all(engine, requests())
    assert [tokens(answer) for answer in answers] == expected(family)


async def test_greedy_with_prompts_computed_token_by_token_equals_generate():
    async with make_engine(max_prefill_tokens=1) as engine:
        answers = await ask_all(engine, requests())
    assert [tokens(answer) for answer in answers] == expected("llama")


async def test_greedy_with_everything_at_once_equals_generate():
    async with make_engine(kv_tokens=64, max_prefill_tokens=5, max_sequences=5) as engine:
        answers = await ask_all(engine, [*requests(), *requests(), *requests()])
        assert engine.stats["preemptions"] > 0 and engine.stats["prefix_tokens_reused"] > 0
    assert [tokens(answer) for answer in answers] == expected("llama") * 3


@pytest.mark.parametrize("block_size", [1, 3, 16])
async def test_results_do_not_depend_on_the_block_size(block_size):
    async with make_engine(block_size=block_size, kv_tokens=70) as engine:
        for _ in range(2):
            answers = await ask_all(engine, requests())
            assert [tokens(answer) for answer in answers] == expected("llama")


async def test_a_batch_larger_than_the_padding_equals_generate():
    prompts = [some_prompt(1 + n % 7, seed=n) for n in range(20)]
    async with make_engine() as engine:
        answers = await ask_all(engine, [request(prompt, max_tokens=4 + n % 3) for n, prompt in enumerate(prompts)])
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        assert tokens(answer) == family_greedy("llama", prompt, 4 + n % 3)


@families
async def test_sampled_logprobs_equal_a_plain_forward_pass(family):
    temperatures = [1.0, 0.6, 1.0, 2.0, 0.6]
    settings = list(zip(PROMPTS, temperatures, strict=True))
    async with make_engine(shared_model(family), max_prefill_tokens=16) as engine:
        answers = await ask_all(
            engine, [request(p, temperature=t, seed=n, max_tokens=NUM_NEW) for n, (p, t) in enumerate(settings)]
        )
    for (prompt, temperature), answer in zip(settings, answers, strict=True):
        plain = plain_logprobs(reference_model(family), prompt, tokens(answer), temperature)
        np.testing.assert_allclose(answer.completion_logprobs, plain, atol=1e-4)


async def test_greedy_logprobs_are_those_of_the_model_itself():
    async with make_engine() as engine:
        alone = await ask(engine, PROMPTS[3])
        mixed = (await ask_all(engine, [request(PROMPTS[3]), request(PROMPTS[4], temperature=0.5, seed=1)]))[0]
    plain = plain_logprobs(reference_model(), PROMPTS[3], tokens(alone))
    np.testing.assert_allclose(alone.completion_logprobs, plain, atol=1e-4)
    np.testing.assert_allclose(mixed.completion_logprobs, plain, atol=1e-4)


@families
async def test_scores_equal_a_plain_forward_pass(family):
    async with make_engine(shared_model(family)) as engine:
        for prompt, completion in ((PROMPTS[0], PROMPTS[4]), (PROMPTS[3], PROMPTS[1])):
            for temperature in (1.0, 0.7):
                scores = await engine.score_tokens(prompt, completion, temperature=temperature)
                plain = plain_logprobs(reference_model(family), prompt, completion, temperature)
                np.testing.assert_allclose(scores, plain, atol=1e-4)


async def test_scoring_and_sampling_agree_and_do_not_disturb_each_other():
    async with make_engine() as engine:
        answer = await ask(engine, PROMPTS[3], temperature=1.0, seed=5)
        scores = await engine.score_tokens(PROMPTS[3], answer.completion_token_ids)
        again = await ask(engine, PROMPTS[3], temperature=1.0, seed=5)
        assert len(await engine.score_tokens(PROMPTS[3], [])) == 0
        assert len(await engine.score_tokens([5], [])) == 0
    np.testing.assert_allclose(scores, answer.completion_logprobs, atol=1e-4)
    assert tokens(again) == tokens(answer)


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma2-softcap"])
async def test_a_model_in_the_engine_still_works_for_other_callers(family):
    model = new_model(family)
    ids = torch.tensor([PROMPTS[4], PROMPTS[4][::-1]])
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    before = copy_of(model)(input_ids=ids, attention_mask=mask).logits
    async with make_engine(model) as engine:
        await ask(engine, PROMPTS[2])
        torch.testing.assert_close(model(input_ids=ids, attention_mask=mask).logits[1], before[1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(
            model(input_ids=ids, attention_mask=mask).logits[0, 6:], before[0, 6:], atol=1e-4, rtol=1e-4
        )
        assert greedy(model, PROMPTS[4], NUM_NEW) == family_greedy(family, PROMPTS[4], NUM_NEW)


async def test_a_model_can_be_trained_after_the_engine_used_it():
    model = new_model("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    async with make_engine(model) as engine:
        await ask(engine, PROMPTS[2], temperature=1.0)
        ids = torch.tensor([PROMPTS[3]])
        model(input_ids=ids, labels=ids).loss.backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        assert tokens(await ask(engine, PROMPTS[2], max_tokens=NUM_NEW)) == expected("llama")[2]


@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
async def test_a_peft_model_is_served_with_its_adapter():
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    wrapped = get_peft_model(
        new_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    wrapped.eval()
    merged = copy_of(wrapped).merge_and_unload()
    async with make_engine(wrapped) as engine:
        answers = [tokens(await ask(engine, prompt, max_tokens=NUM_NEW)) for prompt in PROMPTS]
    assert answers == [greedy(merged, prompt, NUM_NEW) for prompt in PROMPTS]
    assert answers != expected("llama")
