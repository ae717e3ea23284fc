"""Texts are scored together where they can be, and each gets the scores that it would get alone."""

import asyncio
import threading

import numpy as np
import pytest

from ludic.inference.local import LocalEngine
from ludic.inference.local.sampling import Scoring, ScoringQueue
from tests.unit.inference.local.tiny_models import VOCAB, new_model


def text(length, num_prompt=1, temperature=1.0):
    return Scoring(np.arange(length, dtype=np.int32), num_prompt, temperature)


@pytest.mark.parametrize(
    ("limits", "taken"),
    [
        ({"max_tokens": 100, "max_logits": 100}, [0, 1, 3]),
        ({"max_tokens": 9, "max_logits": 100}, [0, 1]),
        ({"max_tokens": 100, "max_logits": 3}, [0, 1]),
        ({"max_tokens": 1, "max_logits": 1}, [0]),
    ],
    ids=["all of one temperature", "tokens", "logits", "one alone always fits"],
)
def test_a_batch_is_of_one_temperature_and_within_its_limits(limits, taken):
    waiting = [text(5, 4), text(4, 2), text(3, 1, temperature=0.5), text(6, 3)]
    queue = ScoringQueue(threading.Condition())
    for scoring in waiting:
        queue.add(scoring)
    batch = queue.take(**limits)
    assert batch == [waiting[i] for i in taken]
    assert len(queue) == len(waiting) - len(batch)


def count_batches(engine: LocalEngine) -> list[int]:
    """How many texts go through the model together, from now on."""
    batches, make = [], engine._worker._make_runner

    def make_counting():
        runner = make()
        score = runner.score
        runner.score = lambda texts: batches.append(len(texts)) or score(texts)
        return runner

    engine._worker._make_runner = make_counting
    return batches


async def test_texts_that_come_together_are_scored_together_as_they_would_be_alone():
    rng = np.random.default_rng(0)
    texts = [rng.integers(VOCAB, size=length) for length in (3, 40, 17, 8, 25, 2)]
    engine = LocalEngine(new_model("qwen2"), None, max_model_len=64, kv_tokens=1024, max_prefill_tokens=80)
    batches = count_batches(engine)
    alone = [await engine.score_tokens(ids[:2], ids[2:], temperature=0.8) for ids in texts]
    assert batches == [1] * 5, "a text of nothing but prompt needs no model"
    engine.pause()
    answers = [asyncio.create_task(engine.score_tokens(ids[:2], ids[2:], temperature=0.8)) for ids in texts]
    await asyncio.sleep(0.01)
    engine.resume()
    together = await asyncio.gather(*answers)
    engine.close()
    assert batches[5:] == [4, 1], "3 + 40 + 17 + 8 tokens, then 25"
    for one, other, ids in zip(alone, together, texts, strict=True):
        assert len(one) == len(other) == len(ids) - 2
        np.testing.assert_allclose(other, one, atol=1e-5)
