"""Teachers: the embedded engine's scores are the model's, and vLLM's answers are read at the right places."""

import json

import numpy as np
import pytest
import torch
from aiohttp import web

from ludic.http.client import EndpointError
from ludic.inference import LocalTeacher, VLLMTeacher, tokenizer_fingerprint
from ludic.inference.local import LocalEngine
from ludic.types import ConfigError, TeacherScorer
from plugins.vllm.tests.vllm_fake import FakeVLLM, client_of
from tests.unit.training.bandit import ByteTokenizer, tiny_llama


class Vocabulary(ByteTokenizer):
    def __init__(self, **changes):
        self._vocabulary = {f"<{number}>": number for number in range(264)} | changes

    def get_vocab(self):
        return dict(reversed(self._vocabulary.items()))


# --- fingerprints ---


def test_fingerprint_depends_on_the_meaning_of_ids_not_on_their_order():
    one, same = Vocabulary(), Vocabulary()
    same._vocabulary = dict(sorted(same._vocabulary.items()))
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(same)
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(Vocabulary(extra=264))
    swapped = Vocabulary(**{"<1>": 2, "<2>": 1})
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(swapped)


def test_a_tokenizer_without_a_vocabulary_has_no_fingerprint():
    with pytest.raises(ConfigError, match=r"ByteTokenizer.*get_vocab"):
        tokenizer_fingerprint(ByteTokenizer())


# --- the embedded engine ---


async def test_a_local_teacher_gives_the_models_own_log_probs():
    model = tiny_llama()
    engine = LocalEngine(model, Vocabulary(), max_model_len=64, kv_tokens=1024)
    teacher = LocalTeacher(engine)
    tokens = [257, 120, 260, 258, 65, 66, 67]
    found = await teacher.score_tokens(tokens[:4], tokens[4:], temperature=0.5)
    engine.close()
    with torch.no_grad():
        log_probs = torch.log_softmax(model(torch.tensor([tokens])).logits[0].float() / 0.5, -1)
    expected = [log_probs[3 + i, token].item() for i, token in enumerate(tokens[4:])]
    assert found.tolist() == pytest.approx(expected, abs=1e-4)
    assert isinstance(teacher, TeacherScorer)
    assert teacher.tokenizer_fingerprint == tokenizer_fingerprint(Vocabulary())


# --- vLLM ---


class ScoringVLLM(FakeVLLM):
    """Gives token t at position p the log-prob −p − t/100, and the likeliest token beside it."""

    spoil = None

    async def _answer(self, request, body, prompt, sampling):
        response = await super()._answer(request, body, prompt, sampling)
        if sampling.get("prompt_logprobs") is None:
            return response
        scores = [None] + [
            {str(t): {"logprob": -p - t / 100, "rank": 5}, "9999": {"logprob": -0.1, "rank": 1}}
            for p, t in enumerate(prompt[1:], start=1)
        ]
        if self.spoil is not None:
            scores = self.spoil(scores)
        answer = json.loads(response.body)
        place = answer if request.path.startswith("/inference") else answer["choices"][0]
        return web.json_response({**answer, "prompt_logprobs": scores} if place is answer else _within(answer, scores))


def _within(answer, scores):
    return {**answer, "choices": [{**answer["choices"][0], "prompt_logprobs": scores}]}


async def scored(completion=(4, 5, 6), temperature=1.0, spoil=None, **ways):
    server = ScoringVLLM(**ways)
    server.spoil = spoil
    await server.start()
    try:
        async with client_of(server) as client:
            teacher = VLLMTeacher(client, "fake", Vocabulary())
            return await teacher.score_tokens([1, 2, 3], completion, temperature=temperature), server
    finally:
        await server.stop()


@pytest.mark.parametrize("has_generate", [True, False], ids=["generate", "completions"])
async def test_a_vllm_teacher_reads_the_completions_tokens_from_the_prompts_log_probs(has_generate):
    logps, server = await scored(has_generate=has_generate)
    assert logps.dtype == np.float32 and logps.tolist() == pytest.approx([-3.04, -4.05, -5.06])
    _, body = server.requests[-1]
    sampling = body.get("sampling_params", body)
    assert sampling["prompt_logprobs"] == 1 and sampling["max_tokens"] == 1
    assert body.get("token_ids", body.get("prompt")) == [1, 2, 3, 4, 5, 6]


async def test_a_vllm_teacher_scores_only_at_temperature_one():
    with pytest.raises(ConfigError, match="sampled at 0.7"):
        await scored(temperature=0.7)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda scores: scores[:-1], "6 prompt tokens were requested, but 5 came"),
        (lambda scores: [*scores[:-1], {"7": {"logprob": -1.0}}], "no log-prob for prompt token 6"),
        (lambda scores: [*scores[:-1], {"6": {"logprob": -9999.0}}], "is not finite"),
    ],
    ids=["too few", "other token", "not finite"],
)
async def test_malformed_prompt_logprobs_are_refused(spoil, says):
    with pytest.raises(EndpointError, match=says):
        await scored(spoil=spoil)


async def test_a_server_without_prompt_logprobs_is_an_error():
    with pytest.raises(EndpointError, match="but none came"):
        await scored(spoil=lambda scores: None)
