"""Judges behind a vLLM server: by the tokens of its client, by the URL of its chat endpoint, and while it fails."""

import pytest

pytest.importorskip("aiohttp")

from ludic.inference import ByteTemplate
from ludic.run.config.reward import RewardSettings
from ludic_judges import JudgeError, JudgeModel, LLMJudge
from ludic_judges.lazy import LazyJudge
from plugins.judges.tests.cases import mark_in, rollout, section_in
from plugins.vllm.tests.vllm_fake import client_of, fake

LONG = {"context": 4096, "max_model_len": 4096}


def grade(prompt: str) -> str:
    """4 is right."""
    score = 10 if section_in(prompt, "reply") == "4" else 3
    return f'{{"mark": "{mark_in(prompt)}", "reason": "Fine.", "score": {score}}}'


async def test_a_vllm_client_judges_by_tokens():
    async with fake(reply=grade, **LONG) as server, client_of(server) as client:
        judge = LLMJudge(JudgeModel(client, model="fake", chat_template=ByteTemplate()), "Is it right?")
        assert await judge.score([rollout("4"), rollout("5")]) == [{"judge": 1.0}, {"judge": 0.3}]
    asked = [body["sampling_params"] for path, body in server.requests if path == "/inference/v1/generate"]
    assert [(sampling["temperature"], sampling["max_tokens"]) for sampling in asked] == [(0.0, 512)] * 2
    cost = judge.asking.cost
    assert cost.calls == 2 and cost.prompt_tokens == sum(len(body["token_ids"]) for _, body in server.requests)
    assert cost.completion_tokens > 0


async def test_a_busy_server_is_asked_again_and_a_verdict_that_is_none_fails():
    async with fake(reply=grade, faults=["503", "reset"], **LONG) as server, client_of(server) as client:
        judge = LLMJudge(JudgeModel(client, model="fake", chat_template=ByteTemplate()), "Is it right?")
        assert await judge.score([rollout("4")]) == [{"judge": 1.0}] and len(server.requests) == 3
        server.reply = lambda prompt: "Ten."
        with pytest.raises(JudgeError, match="no readable verdict"):
            await judge.score([rollout("5")])
        assert judge.metrics()["judge/failed"] == 1


async def test_the_url_of_a_vllm_server_judges_by_messages():
    def load(place):
        raise AssertionError(f"{place} is a URL")

    async with fake(reply=grade) as server:
        judge = LazyJudge(RewardSettings(judge=f"{server.url}/v1"), load=load)
        assert await judge.score([rollout("4"), rollout("5")]) == [{"judge": 1.0}, {"judge": 0.3}]
    assert [body["model"] for path, body in server.requests if path == "/v1/chat/completions"] == ["fake"] * 2
    assert (judge.metrics()["judge/prompt_tokens"], judge.metrics()["judge/completion_tokens"]) == (100, 18)
