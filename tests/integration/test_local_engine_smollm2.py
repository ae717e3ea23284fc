"""A real small model in the embedded engine: `LocalEngine("smollm2-135m")` is all it takes."""

import asyncio
from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
import torch

from ludic import registry
from ludic.agents import Agent
from ludic.context import FullDialog
from ludic.inference import HFChatTemplate
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import xml_tag_parser
from ludic.types import InferenceSpec, ReturnSpec, Rollout, SamplingParams, TokenCompletionRequest
from tests.fakes import RecordingClient

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


@pytest.mark.extended(
    covered_by="tests/unit/inference/local/test_sampling.py::test_a_seeded_request_gets_the_same_tokens_alone_and_in_any_batch"
)
async def test_seeded_requests_of_unequal_lengths_draw_the_same_alone_and_together(engine, prompts):
    story = prompts[2].tolist()
    requests = [request(story[: 3 + 2 * n], seed=n, temperature=1.5, ignore_eos=True, max_tokens=4) for n in range(6)]
    await asyncio.to_thread(engine.release_cache)
    alone = [(await engine.complete_tokens(r))[0] for r in requests]
    await asyncio.to_thread(engine.release_cache)
    together = await asyncio.gather(*(engine.complete_tokens(r) for r in requests))
    for one, (other, _) in zip(alone, together, strict=True):
        assert one.completion_token_ids.tolist() == other.completion_token_ids.tolist()
        np.testing.assert_allclose(one.completion_logprobs, other.completion_logprobs, atol=1e-3)


@pytest.mark.extended(
    covered_by="tests/unit/inference/test_token_exactness.py::test_every_prompt_extends_what_was_sent_and_sampled"
)
async def test_an_agent_plays_tic_tac_toe_on_the_engine_token_exactly(engine):
    client = RecordingClient(engine)
    agent = Agent(
        client=client,
        model="smollm2",
        ctx=FullDialog(),
        parser=xml_tag_parser("move"),
        chat_template=HFChatTemplate(engine.tokenizer),
    )
    reused = engine.stats["prefix_tokens_reused"]
    (rollout,) = await SingleAgentProtocol(agent).run(
        env=registry.envs.make("tic_tac_toe"),
        max_steps=3,
        env_seed=1,
        sampling_seed=2,
        inference=InferenceSpec(sampling=SamplingParams(temperature=0.7, max_tokens=8), return_=ReturnSpec.for_rl()),
    )
    traces = [step.trace for step in rollout.agent_steps]
    assert rollout.failure is None and traces
    assert [(t.prompt_token_ids.tolist(), t.completion_token_ids.tolist()) for t in traces] == client.calls
    assert all(t.policy_version == engine.version and t.temperature == 0.7 for t in traces)
    for earlier, later in pairwise(traces):  # an append-only conversation
        known = [*earlier.prompt_token_ids, *earlier.completion_token_ids]
        assert later.prompt_token_ids[: len(known)].tolist() == known
    if len(traces) > 1:
        assert engine.stats["prefix_tokens_reused"] - reused >= len(traces[0].prompt_token_ids) // 16 * 16
    assert Rollout.from_json(rollout.to_json()) == rollout
