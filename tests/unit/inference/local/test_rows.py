"""Decoding sequences that share the first part of their prompt get what they would get without the others."""

import asyncio
import platform

import numpy as np
import pytest

from ludic.inference.local.cpu import MIN_SHARED, num_shared
from ludic.inference.local.sequence import LogitsNotFinite
from tests.extended import cases
from tests.unit.inference.local.test_bad_input import model_broken_at
from tests.unit.inference.local.tiny_models import (
    FAMILIES,
    ask,
    ask_all,
    family_greedy,
    greedy,
    make_engine,
    new_model,
    request,
    shared_model,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

LONG, LONGER = some_prompt(MIN_SHARED + 7), some_prompt(MIN_SHARED + 64)


@pytest.mark.parametrize(("num_prompt", "expected"), [(127, 0), (128, 128), (159, 128), (160, 160), (400, 384)])
def test_a_prompt_is_divided_by_its_length_alone(num_prompt, expected):
    assert num_shared(num_prompt) == expected


@pytest.mark.parametrize("family", cases(FAMILIES, default=["llama", "gemma2-softcap", "gemma3-sliding"]))
async def test_greedy_texts_of_groups_and_others_equal_generate(family):
    prompts = [LONG, LONGER, some_prompt(5), LONG, some_prompt(40), LONG, LONGER, (*LONG, 3, 4)]
    lengths = [16, 3, 16, 9, 4, 14, 8, 12]
    async with make_engine(shared_model(family)) as engine:
        answers = await ask_all(engine, [request(p, max_tokens=n) for p, n in zip(prompts, lengths, strict=True)])
        following = [(*prompt, *tokens(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
        again = await ask_all(engine, [request(prompt, max_tokens=4) for prompt in following])
    for prompt, length, first, second in zip(prompts, lengths, answers, again, strict=True):
        expected = family_greedy(family, prompt, 20)
        assert tokens(first) == expected[:length] and tokens(second) == expected[length : length + 4]


@pytest.mark.parametrize("num_kv_heads", cases([1, 2, 4], default=[2]))
async def test_a_member_of_a_group_gets_the_log_probs_that_it_gets_alone(num_kv_heads):
    """On aarch64 bit for bit; other math libraries may round by the number of members."""
    model = new_model(hidden_size=256, intermediate_size=512, head_dim=64, num_key_value_heads=num_kv_heads)
    counts = {LONG: 9, LONGER: 2, some_prompt(MIN_SHARED): 1, some_prompt(9): 1}
    prompts = [prompt for prompt, count in counts.items() for _ in range(count)]
    requests = [request(p, temperature=1.5, seed=n, max_tokens=3 + n % 5) for n, p in enumerate(prompts)]
    async with make_engine(model) as engine:
        alone = [(await ask_all(engine, [r]))[0] for r in requests]
        engine.release_cache()
        together = await ask_all(engine, requests)
        some = await ask_all(engine, requests[::3])
    async with make_engine(model, max_prefill_tokens=65, kv_tokens=400, max_sequences=7) as engine:
        in_pieces = await ask_all(engine, requests)
    tolerance = 0 if platform.machine() == "aarch64" else 1e-4
    for answers, expected in ((together, alone), (some, alone[::3]), (in_pieces, alone)):
        for one, other in zip(answers, expected, strict=True):
            assert tokens(one) == tokens(other)
            np.testing.assert_allclose(one.completion_logprobs, other.completion_logprobs, rtol=0, atol=tolerance)


async def test_new_weights_reach_shared_prefixes():
    model, other = new_model(), new_model(seed=1)
    async with make_engine(model) as engine:
        await ask_all(engine, [request(LONG) for _ in range(3)])
        engine.sync_weights(dict(other.named_parameters()))
        answers = await ask_all(engine, [request(LONG, max_tokens=8) for _ in range(3)])
    assert [tokens(answer) for answer in answers] == 3 * [greedy(other, LONG, 8)]


async def test_a_group_whose_logits_are_not_finite_fails_and_leaves_the_others_alone():
    """It fails while decoding, when its prefix and its rows are those of others a step later."""
    small = {n: tuple(token % 20 for token in some_prompt(n)) for n in (6, *range(MIN_SHARED, MIN_SHARED + 99))}
    prompts = [small[n] for n in (MIN_SHARED + 7, 6, MIN_SHARED + 7, MIN_SHARED)]
    expected = [family_greedy("llama", prompt, 12) for prompt in prompts]
    used = {*range(20), *(token for text in expected for token in text)}
    firsts = {prompt: family_greedy("llama", prompt, 1)[0] for prompt in small.values() if len(prompt) > 160}
    longer, token = next((prompt, token) for prompt, token in firsts.items() if token not in used)
    async with make_engine(model_broken_at(token)) as engine:
        engine.pause()
        broken = [asyncio.create_task(ask(engine, longer)) for _ in range(2)]
        whole = [asyncio.create_task(ask(engine, prompt, max_tokens=12)) for prompt in prompts]
        await asyncio.sleep(0)
        engine.resume()
        for task in broken:
            with pytest.raises(LogitsNotFinite):
                await task
        assert [tokens(await task) for task in whole] == expected
        assert [tokens(answer) for answer in await ask_all(engine, [request(prompts[0], max_tokens=12)])] == expected[
            :1
        ]
