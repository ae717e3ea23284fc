"""Models that the block cache cannot hold run through transformers' own cache: the same tokens and log-probs, and said once."""

import asyncio
import logging

import numpy as np
import pytest
import torch
import transformers

from ludic.inference.local.backends import PagedBackend
from ludic.inference.local.cached import CachedBackend
from ludic.models import attention
from tests.tiny_families import family_model
from tests.unit.inference.local.tiny_models import (
    Gate,
    ask,
    ask_all,
    eventually,
    greedy,
    make_engine,
    new_model,
    plain_logprobs,
    request,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

MIXED = "gptj"
"""A family whose attention never goes through the registered function."""


def backend_of(engine):
    return engine._worker.backend


def prompts():
    """Two equal ones, one of the same length and two of others."""
    return [some_prompt(9), some_prompt(9), some_prompt(9, 1), some_prompt(5), some_prompt(14)]


async def test_sequences_that_share_a_cache_or_take_turns_get_what_generate_gives():
    model = family_model(MIXED)
    async with make_engine(model, max_prefill_tokens=12) as engine:
        assert isinstance(backend_of(engine), CachedBackend) and not backend_of(engine).recompute
        lengths = [10, 4, 7, 10, 6]
        asked = [request(p, max_tokens=n) for p, n in zip(prompts(), lengths, strict=True)]
        answers = await ask_all(engine, asked)
        for prompt, length, answer in zip(prompts(), lengths, answers, strict=True):
            assert tokens(answer) == greedy(model, prompt, length)
            expected = plain_logprobs(model, prompt, tokens(answer))
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
        assert engine.stats["running"] == engine.stats["kv_blocks_used"] == 0


async def test_sampled_tokens_have_the_log_probs_of_a_plain_forward_and_repeat_with_their_seed():
    model = family_model("llama4")
    async with make_engine(model) as engine:
        asked = [request(p, seed=7 + i, temperature=0.8, max_tokens=8) for i, p in enumerate(prompts())]
        answers = await ask_all(engine, asked)
        for prompt, answer in zip(prompts(), answers, strict=True):
            expected = plain_logprobs(model, prompt, tokens(answer), temperature=0.8)
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
            scored = await engine.score_tokens(list(prompt), tokens(answer), temperature=0.8)
            np.testing.assert_allclose(scored, expected, atol=1e-4)
        alone = await ask(engine, prompts()[2], seed=9, temperature=0.8, max_tokens=8)
        assert tokens(alone) == tokens(answers[2])


async def test_preempted_sequences_continue_as_if_nothing_happened():
    model = family_model("llama4")
    async with make_engine(model, kv_tokens=40) as engine:
        answers = await ask_all(engine, [request(p, max_tokens=12) for p in prompts()])
        assert engine.stats["preemptions"] > 0
        assert [tokens(answer) for answer in answers] == [greedy(model, p, 12) for p in prompts()]


async def test_new_weights_count_from_the_next_token_on():
    model = family_model(MIXED)
    async with make_engine(model) as engine:
        gate = Gate(model, at_call=4)
        asked = [asyncio.create_task(ask(engine, p, max_tokens=10)) for p in prompts()[:3]]
        await gate.reached()
        change = asyncio.create_task(asyncio.to_thread(_zero_the_embedding, engine, model))
        gate.open()
        await change
        answers = [await task for task in asked]
        for prompt, answer in zip(prompts(), answers, strict=False):
            (old, new) = answer.version_runs
            assert (old.version, new.version) == (0, 1) and old.length + new.length == 10
            written = tokens(answer)[: old.length]
            expected = plain_logprobs(model, [*prompt, *written], tokens(answer)[old.length :])
            np.testing.assert_allclose(answer.completion_logprobs[old.length :], expected, atol=1e-4)


def _zero_the_embedding(engine, model) -> None:
    with engine.updating(), torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)


async def test_a_cancelled_request_leaves_its_row_and_the_others_are_unchanged():
    model = family_model(MIXED)
    async with make_engine(model) as engine:
        gate = Gate(model, at_call=4)
        asked = [asyncio.create_task(ask(engine, p, max_tokens=8)) for p in prompts()[:3]]
        await gate.reached()
        asked[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[1]
        gate.open()
        assert [tokens(await asked[i]) for i in (0, 2)] == [greedy(model, prompts()[i], 8) for i in (0, 2)]
        await eventually(lambda: engine.stats["kv_blocks_used"] == engine.stats["running"] == 0, "blocks come back")


async def test_a_cache_that_differs_from_the_plain_forward_is_not_used():
    model = family_model(
        "zamba2"
    )  # in transformers, its cached steps clamp a time step that its plain forward does not
    async with make_engine(model) as engine:
        assert backend_of(engine).recompute
        prompt = some_prompt(6)
        answer = await ask(engine, prompt, max_tokens=6)
        np.testing.assert_allclose(answer.completion_logprobs, plain_logprobs(model, prompt, tokens(answer)), atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
async def test_a_rotary_embedding_that_changes_with_the_length_is_paged_up_to_that_length(kind):
    extra = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if kind == "longrope" else {}
    rope = {"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0, **extra}

    def model():
        return new_model(rope_parameters=rope, original_max_position_embeddings=16, max_position_embeddings=16)

    async with make_engine(model()) as engine:
        assert isinstance(backend_of(engine), PagedBackend) and engine.max_model_len == 16
        assert tokens(await ask(engine, some_prompt(6), max_tokens=8)) == greedy(model(), some_prompt(6), 8)
    async with make_engine(model(), max_model_len=32) as engine:
        assert backend_of(engine).recompute
        prompt = some_prompt(12)
        answer = await ask(engine, prompt, max_tokens=8)
        reference = model()
        for i, logprob in enumerate(answer.completion_logprobs):  # each token under the frequencies for its length
            before = [*prompt, *tokens(answer)[:i]]
            logits_V = reference(input_ids=torch.tensor([before])).logits[0, -1]
            assert logprob == pytest.approx(logits_V.log_softmax(-1)[tokens(answer)[i]].item(), abs=1e-4)


def test_the_slower_way_is_said_once_and_leaves_the_model_unchanged(caplog, monkeypatch):
    monkeypatch.setattr(attention, "_said", set())
    model = family_model(MIXED)
    before = model.config._attn_implementation
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            make_engine(model).close()
    (said,) = [record.message for record in caplog.records if record.name.startswith("ludic")]
    assert said.startswith("GPTJForCausalLM runs through transformers' own cache, which is slower")
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("kind", ["Mamba", "Bloom"])
async def test_models_outside_the_table_are_served_too(kind):
    sizes = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 2, "n_layer": 2, "n_head": 4}
    config = getattr(transformers, f"{kind}Config")(**sizes, initializer_range=0.3, eos_token_id=None)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    async with make_engine(model) as engine:
        answers = await ask_all(engine, [request(p, max_tokens=6) for p in prompts()[:3]])
        for prompt, answer in zip(prompts(), answers, strict=False):
            expected = plain_logprobs(model, prompt, tokens(answer))
            np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
