"""A real small model in the embedded engine: `LocalEngine("smollm2-135m")` is all it takes."""

import asyncio
from copy import deepcopy

import numpy as np
import pytest
import torch

from ludic.inference import HFChatTemplate
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NUM_NEW = 8
QUESTIONS = [
    "What is the capital of France?",
    "Write one line about the sea.",
    "List three primes, and say in a few words why each of them is one. Then name a number that is not.",
]


@pytest.fixture(scope="session")
def engine(smollm2_engine):
    return smollm2_engine


@pytest.fixture(scope="session")
def prompts(engine):
    template = HFChatTemplate(engine.tokenizer)
    return [template.apply([{"role": "user", "content": text}]).prompt_token_ids for text in QUESTIONS]


@pytest.fixture(scope="session")
def expected(engine, prompts):
    """What transformers' own generate answers, by its own attention."""
    model = deepcopy(engine.model)
    model.set_attn_implementation("sdpa")
    texts = []
    for prompt in prompts:
        ids = torch.tensor(prompt.tolist())[None]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_NEW)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def request(prompt, seed=None, **sampling) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        model="smollm2",
        prompt_token_ids=prompt,
        sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_NEW, **sampling}),
        return_=ReturnSpec.for_rl(),
        seed=seed,
    )


def test_the_file_is_parsed_once(engine, num_readings):
    """It takes seconds, and transformers would do it for the tokenizer, the config and the weights each."""
    assert num_readings == [1]


@pytest.mark.extended(covered_by="test_greedy_together_equals_generate_and_is_scored_alike")
async def test_greedy_alone_equals_generate_and_knows_paris(engine, prompts, expected):
    answers = [(await engine.complete_tokens(request(prompt)))[0] for prompt in prompts]
    assert [answer.completion_token_ids.tolist() for answer in answers] == expected
    assert "Paris" in answers[0].text


async def test_greedy_together_equals_generate_and_is_scored_alike(engine, prompts, expected):
    await asyncio.to_thread(engine.release_cache)  # nothing is left of the other tests
    reused = engine.stats["prefix_tokens_reused"]
    together = await asyncio.gather(*(engine.complete_tokens(request(prompt)) for prompt in [*prompts, *prompts]))
    answers = [response.completion_token_ids.tolist() for response, _ in together]
    assert answers == [*expected, *expected]
    assert engine.stats["prefix_tokens_reused"] > reused, "all prompts begin with the same system message"
    for prompt, (response, _) in zip(prompts, together[:3], strict=True):
        scores = await engine.score_tokens(prompt, response.completion_token_ids)
        np.testing.assert_allclose(response.completion_logprobs, scores, atol=1e-3)
