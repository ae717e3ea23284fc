"""Hybrids in the engine on a GPU: recurrent states beside the block cache give what the model's own forward gives.

Prints one line per family: whether its decoding rounds are CUDA graphs, and how far log-probs are from those of a CPU.
"""

import asyncio
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

from plugins.gpu.tests.test_recurrent import HYBRIDS  # noqa: E402
from tests.tiny_families import family_model  # noqa: E402 - after the skip
from tests.unit.inference.local.tiny_models import (  # noqa: E402
    ask_all,
    greedy,
    make_engine,
    plain_logprobs,
    request,
    some_prompt,
    tokens,
)

PROMPTS = [some_prompt(9), some_prompt(9), some_prompt(21, 1), some_prompt(4)]
NUM_NEW = [17, 14, 25, 6]
"""More than the rounds of a step, so that several steps follow each other without the host."""


def on_gpu(family):
    try:
        return family_model(family).cuda()
    except (AttributeError, ImportError) as error:
        pytest.skip(f"this transformers has no {family}: {error}")


@pytest.mark.parametrize("family", HYBRIDS)
async def test_prompts_in_parts_copies_and_preempted_sequences_equal_the_models_own_forward(family, capsys):
    from ludic_gpu.hybrids.cuda import GraphedRecurrentRunner

    model, reference = on_gpu(family), family_model(family)
    largest = 0.0
    async with make_engine(model, max_prefill_tokens=8, block_size=4, kv_tokens=64, max_sequences=4) as engine:
        requests = [request(p, max_tokens=n) for p, n in zip(PROMPTS, NUM_NEW, strict=True)]
        answers = await ask_all(engine, requests)
        runner = engine._worker.runner
        assert isinstance(runner, GraphedRecurrentRunner)
        assert engine.stats["preemptions"] > 0
        assert engine.stats["running"] == engine.stats["kv_blocks_used"] == 0 and not runner._states._row_of
        way = "CUDA graphs" if runner._is_capturable else "kernel by kernel"
    for prompt, length, answer in zip(PROMPTS, NUM_NEW, answers, strict=True):
        assert tokens(answer) == greedy(reference, prompt, length)
        expected = plain_logprobs(reference, prompt, tokens(answer))
        largest = max(largest, float(np.abs(answer.completion_logprobs - expected).max()))
    with capsys.disabled():
        sys.stdout.write(f"\n{family}: {way}, log-probs {largest:.1e}\n")
    assert largest < 1e-4


async def test_sampled_groups_of_several_lengths_and_scores_beside_them():
    model, reference = on_gpu("lfm2"), family_model("lfm2")
    async with make_engine(model, max_sequences=8) as engine:
        texts = [(some_prompt(3, 2), some_prompt(8, 3)), (some_prompt(11, 4), some_prompt(2, 5))]
        group = [request(some_prompt(12), temperature=1.0, seed=seed, max_tokens=3 + 5 * seed) for seed in range(12)]
        answers, *scores = await asyncio.gather(
            ask_all(engine, group), *(engine.score_tokens(a, b, temperature=0.8) for a, b in texts)
        )
        assert engine.stats["prefix_tokens_reused"] > 0
    assert len({tuple(tokens(answer)) for answer in answers}) > 6
    for answer in answers:
        expected = plain_logprobs(reference, some_prompt(12), tokens(answer))
        np.testing.assert_allclose(answer.completion_logprobs, expected, atol=1e-4)
    for (prompt, completion), score in zip(texts, scores, strict=True):
        expected = plain_logprobs(reference, prompt, completion, temperature=0.8)
        np.testing.assert_allclose(score, expected, atol=1e-4)


async def test_states_of_old_weights_are_dropped():
    model, reference = on_gpu("lfm2"), family_model("lfm2")
    async with make_engine(model) as engine:
        running = asyncio.create_task(ask_all(engine, [request(p, max_tokens=200) for p in PROMPTS[1:]]))
        while engine.stats["running"] < 3:
            await asyncio.sleep(0.001)
        with engine.updating(), torch.no_grad():
            model.get_input_embeddings().weight.mul_(0.5)
        answers = await running
    with torch.no_grad():
        reference.get_input_embeddings().weight.mul_(0.5)
    for prompt, answer in zip(PROMPTS[1:], answers, strict=True):
        new = answer.version_runs[-1]
        assert new.version == 1
        written = tokens(answer)
        expected = plain_logprobs(reference, [*prompt, *written[: -new.length]], written[-new.length :])
        np.testing.assert_allclose(answer.completion_logprobs[-new.length :], expected, atol=1e-4)
