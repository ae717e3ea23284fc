"""Hybrids in the engine: recurrent states beside the block cache give what transformers gives, whatever happens on the way."""

import asyncio
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ludic.inference.local.cached import CachedRunner
from ludic.models.kinds import recurrent_layers
from ludic.types import ConfigError
from ludic_gpu.hybrids import runners, states
from ludic_gpu.hybrids.runners import RecurrentRunner
from ludic_gpu.hybrids.states import Mixers, StateRows, probe_mixers
from ludic_gpu.recurrent import mix_of
from plugins.gpu.tests.test_recurrent import HYBRIDS
from tests.tiny_families import family_model
from tests.unit.inference.local.tiny_models import (
    Gate,
    ask,
    ask_all,
    eventually,
    greedy,
    make_engine,
    plain_logprobs,
    request,
    some_prompt,
    tokens,
)

pytestmark = pytest.mark.slow

PROMPTS = [some_prompt(9), some_prompt(9), some_prompt(21, 1), some_prompt(1)]
NUM_NEW = [7, 4, 5, 6]


def requests():
    return [request(p, max_tokens=n) for p, n in zip(PROMPTS, NUM_NEW, strict=True)]


def assert_equal_to_generate(model, answers):
    for prompt, length, answer in zip(PROMPTS, NUM_NEW, answers, strict=True):
        assert tokens(answer) == greedy(model, prompt, length)
        expected = plain_logprobs(model, prompt, tokens(answer))
        np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("family", HYBRIDS)
async def test_prompts_in_parts_copies_and_preempted_sequences_equal_generate(family):
    model = family_model(family)
    async with make_engine(model, max_prefill_tokens=8, kv_tokens=40) as engine:
        assert_equal_to_generate(model, await ask_all(engine, requests()))
        assert isinstance(engine._worker.runner, RecurrentRunner)
        assert engine.stats["preemptions"] > 0
        assert engine.stats["running"] == engine.stats["kv_blocks_used"] == 0


async def test_a_group_computes_its_prompt_once_even_if_that_takes_several_steps():
    model = family_model("qwen3_next")
    prompt = some_prompt(30)
    async with make_engine(model, max_prefill_tokens=12) as engine:
        members = [request(prompt, temperature=1.0, seed=seed, max_tokens=5) for seed in range(3)]
        together = await ask_all(engine, members)
        assert engine.stats["prefix_tokens_reused"] == 2 * len(prompt)
        alone = [(await ask_all(engine, [member]))[0] for member in members]
        # Keys and values of the first requests cannot be reused without their states.
        assert engine.stats["prefix_tokens_reused"] == 2 * len(prompt)
    assert [tokens(answer) for answer in together] == [tokens(answer) for answer in alone]
    assert len({tuple(tokens(answer)) for answer in together}) == 3
    for answer in together:
        np.testing.assert_allclose(answer.completion_logprobs, plain_logprobs(model, prompt, tokens(answer)), atol=1e-4)


async def test_scores_are_those_of_a_plain_forward_pass_beside_running_requests():
    model = family_model("jamba")
    async with make_engine(model) as engine:
        running = asyncio.gather(*(ask(engine, p, max_tokens=8) for p in PROMPTS[1:]))
        texts = [(some_prompt(3, 2), some_prompt(8, 3)), (some_prompt(11, 4), some_prompt(2, 5))]
        scores = await asyncio.gather(*(engine.score_tokens(a, b, temperature=0.8) for a, b in texts))
        for (prompt, completion), score in zip(texts, scores, strict=True):
            expected = plain_logprobs(model, prompt, completion, temperature=0.8)
            np.testing.assert_allclose(score, expected, atol=1e-4)
        answers = await running
    assert [tokens(answer) for answer in answers] == [greedy(model, p, 8) for p in PROMPTS[1:]]


async def test_states_of_old_weights_are_dropped():
    model = family_model("qwen3_5")
    async with make_engine(model) as engine:
        gate = Gate(model, at_call=4)
        asked = [asyncio.create_task(ask(engine, p, max_tokens=10)) for p in PROMPTS[1:]]
        await gate.reached()
        change = asyncio.create_task(asyncio.to_thread(_halve_the_embedding, engine, model))
        gate.open()
        await change
        for prompt, task in zip(PROMPTS[1:], asked, strict=True):
            answer = await task
            old, new = answer.version_runs
            assert (old.version, new.version) == (0, 1) and old.length + new.length == 10
            before = [*prompt, *tokens(answer)[: old.length]]
            expected = plain_logprobs(model, before, tokens(answer)[old.length :])
            np.testing.assert_allclose(answer.completion_logprobs[old.length :], expected, atol=1e-4)


def _halve_the_embedding(engine, model):
    with engine.updating(), torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.5)


async def test_a_cancelled_request_gives_its_row_back_and_the_others_are_unchanged():
    model = family_model("bamba")
    async with make_engine(model) as engine:
        gate = Gate(model, at_call=4)
        asked = [asyncio.create_task(ask(engine, p, max_tokens=8)) for p in PROMPTS[1:]]
        await gate.reached()
        asked[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked[0]
        gate.open()
        assert [tokens(await task) for task in asked[1:]] == [greedy(model, p, 8) for p in PROMPTS[2:]]
        await eventually(
            lambda: engine.stats["kv_blocks_used"] == 0 and not engine._worker.runner._states._row_of, "rows"
        )


def test_only_jamba_does_not_continue_a_state_by_several_tokens():
    assert {family: probe_mixers(family_model(family)) for family in HYBRIDS} == {
        family: (True, family != "jamba", True) for family in HYBRIDS
    }


def test_a_layer_that_forgets_its_state_is_detected(monkeypatch):
    monkeypatch.setattr(states, "_cache", lambda layer, *states: None)
    assert probe_mixers(family_model("lfm2")) == (False, False, False)


async def test_a_model_whose_layers_fail_the_probe_runs_through_transformers_cache(monkeypatch):
    monkeypatch.setattr(runners, "probe_mixers", lambda model: Mixers(False, False, False))
    model = family_model("falcon_h1")
    async with make_engine(model) as engine:
        assert_equal_to_generate(model, await ask_all(engine, requests()))
        assert isinstance(engine._worker.runner, CachedRunner)


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "jamba", "lfm2"])
@torch.inference_mode()
def test_prompts_padded_on_the_left_have_the_outputs_and_states_that_each_has_alone(family):
    model = family_model(family)
    layer, mixer = next(iter(recurrent_layers(model).items()))
    lengths = [9, 2, 8, 7, 9]
    prompts = [SimpleNamespace(sequence=SimpleNamespace(number=i), start=0, length=n) for i, n in enumerate(lengths)]
    hidden = torch.randn(
        sum(lengths), model.get_input_embeddings().weight.shape[1], generator=torch.Generator().manual_seed(1)
    )
    calls, found = [], []
    for mixers in (Mixers(True, True, True), Mixers(True, True, False)):
        rows = StateRows(torch.device("cpu"))

        def mix(hidden, cache, mask=None):
            calls.append(len(hidden))
            return mix_of(mixer)(hidden, cache, mask)

        out = states.PromptParts(rows, prompts, mixers).recur(layer, mix, hidden)
        held = rows.read(layer, torch.tensor(rows.rows(prompt.sequence for prompt in prompts))).layers[layer]
        found.append([out, held.conv_states[0], held.recurrent_states[0]])
    assert calls == [5, 2, 1, 1, 1]  # similar lengths, then equal ones
    for together, alone in zip(*found, strict=True):
        if alone is not None:
            torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


def test_states_that_do_not_fit_are_refused_with_what_to_lower():
    with pytest.raises(ConfigError, match=r"recurrent states of all sequences take .* lower max_sequences"):
        make_engine(family_model("lfm2"), kv_tokens=None, max_sequences=10**9)


@pytest.mark.parametrize("seed", range(5))
def test_rows_keep_every_sequence_s_state_wherever_they_move(seed):
    rng = random.Random(seed)
    rows, expected, numbers = StateRows(torch.device("cpu")), {}, iter(range(1000))
    for step in range(60):
        if len(expected) < 2 or rng.random() < 0.4:
            sequence = SimpleNamespace(number=next(numbers))
            cache = states._cache(3, torch.full((1, 2, 4), float(step)), torch.full((1, 5), -float(step)))
            rows.write(3, torch.tensor(rows.rows([sequence])), cache)
            expected[sequence.number] = (sequence, float(step))
        elif rng.random() < 0.4:
            sequence, _ = expected.pop(rng.choice(list(expected)))
            rows.leave(sequence)
        elif rng.random() < 0.3:
            source, copy = rng.sample(list(expected), 2)
            rows.copy([(expected[source][0], expected[copy][0])])
            expected[copy] = expected[copy][0], expected[source][1]
        decoding = rng.sample([sequence for sequence, _ in expected.values()], rng.randint(1, len(expected)))
        num_rows = max(len(decoding), 4)
        rows.arrange(decoding, num_rows)
        held = rows.read(3, slice(num_rows)).layers[3]
        held.conv_states[0][len(decoding) :] = float("nan")  # what padding computes is ignored
        for row, sequence in enumerate(decoding):
            value = expected[sequence.number][1]
            assert (held.conv_states[0][row] == value).all() and (held.recurrent_states[0][row] == -value).all()
