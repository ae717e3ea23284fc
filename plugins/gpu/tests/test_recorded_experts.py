"""The engine records to which experts a mixture sends each token: those that a plain forward pass chooses."""

import asyncio

import numpy as np
import pytest
import torch

from ludic.inference.local import LocalEngine
from ludic.types import ChatResponse, ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_gpu.experts import recording
from tests.tiny_families import family_model

PROMPTS = [[5, 6, 7], list(range(9, 50)), list(range(9, 50)), list(range(9, 30)), [5, 6, 7, 8]]
"""Two are equal, and one is the beginning of another."""


async def completions(engine: LocalEngine, prompts: list[list[int]], **sampling) -> list[ChatResponse]:
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 12, **sampling})
    requests = [
        TokenCompletionRequest("m", np.array(p, dtype=np.int32), sampling=params, return_=ReturnSpec.for_rl(), seed=i)
        for i, p in enumerate(prompts)
    ]
    return [response for response, _ in await asyncio.gather(*map(engine.complete_tokens, requests))]


def chosen(model, response: ChatResponse) -> np.ndarray:
    ids = np.concatenate([response.prompt_token_ids, response.completion_token_ids])
    with recording(model) as routed, torch.no_grad():
        model(torch.tensor(ids)[None].long(), use_cache=False)
    return routed.experts_TLK().numpy()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "glm4_moe"])
def test_recorded_experts_are_those_of_a_plain_forward_pass(family):
    """Across batches, equal prompts, and turns that continue from the cache."""
    model = family_model(family)
    engine = LocalEngine(model, record_experts=True)

    async def two_turns() -> list[ChatResponse]:
        first = await completions(engine, PROMPTS)
        again = [[*r.prompt_token_ids, *r.completion_token_ids, 3, 4] for r in first]
        return [*first, *await completions(engine, again, max_tokens=5)]

    try:
        responses = asyncio.run(two_turns())
        assert engine.stats["prefix_tokens_reused"] > 0
    finally:
        engine.close()
    for response in responses:
        experts = response.experts
        num_tokens = len(response.prompt_token_ids) + len(response.completion_token_ids)
        assert experts.dtype == np.int16 and len(experts) == num_tokens
        assert np.array_equal(experts[:-1], chosen(model, response)[:-1])
        assert (experts[-1] == -1).all(), "the last token has not been computed"
        assert response.to_trace().experts.shape == experts.shape


def test_after_new_weights_the_experts_are_those_of_the_new_weights():
    model = family_model("qwen3_moe")
    engine = LocalEngine(model, record_experts=True)

    async def before_and_after() -> list[ChatResponse]:
        (first,) = await completions(engine, PROMPTS[:1])
        with engine.updating(), torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.copy_(layer.mlp.gate.weight.flip(0))
        return [first, *await completions(engine, PROMPTS[:1])]

    try:
        _, second = asyncio.run(before_and_after())
    finally:
        engine.close()
    assert np.array_equal(second.experts[:-1], chosen(model, second)[:-1])


def test_an_engine_that_is_not_asked_records_nothing_and_one_that_cannot_says_so():
    engine = LocalEngine(family_model("qwen3_moe"))
    try:
        (response,) = asyncio.run(completions(engine, PROMPTS[:1]))
    finally:
        engine.close()
    assert response.experts is None
    with pytest.raises(ConfigError, match="no mixture of experts"):
        LocalEngine(family_model("llama"), record_experts=True)
    with pytest.raises(ConfigError, match=r"Leave record_experts=True out: it needs the engine's block cache alone"):
        LocalEngine(family_model("qwen3_next"), record_experts=True)
