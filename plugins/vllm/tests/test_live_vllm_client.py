"""The vLLM client on a real vLLM server: the same tokens as the local engine, true log-probs, and what breaks and mends."""

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ludic.batch_gen import RolloutEngine
from ludic.inference import HFChatTemplate, LocalTeacher, OpenAIChatClient, VLLMChatClient, VLLMTeacher
from ludic.interaction import SingleAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import (
    ChatResponse,
    EnvSpec,
    InferenceSpec,
    PromptTooLong,
    ProtocolSpec,
    ReturnSpec,
    RolloutRequest,
    SamplingParams,
    TokenCompletionRequest,
    VLLMExtensions,
)
from tests.fakes import CountingEnv, RecordingClient, make_agent

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GREEDY = {"temperature": 0.0, "max_tokens": 40}
LONG = {"temperature": 1.0, "max_tokens": 1500, "ignore_eos": True}


@pytest.fixture(scope="module")
def client(vllm_server) -> VLLMChatClient:
    return VLLMChatClient(vllm_server.host, vllm_server.port, control_token=vllm_server.control_token)


@pytest.fixture(scope="module")
def model(vllm_server) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(vllm_server.model_dir).eval()


@pytest.fixture(scope="module")
def tokenizer(vllm_server) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(vllm_server.model_dir)


@pytest.fixture(scope="module")
def engine(vllm_server) -> Iterator[Any]:
    import torch

    from ludic.inference.local import LocalEngine

    engine = LocalEngine(str(vllm_server.model_dir), dtype=torch.float32, kv_tokens=4096)
    yield engine
    engine.close()


def some_prompt(length: int, seed: int = 0) -> np.ndarray:
    """Whole characters (ids 0–93 are ! to ~): after half a character, vLLM decodes the reply as if it went on with it."""
    return np.random.default_rng([seed, length]).integers(94, size=length).astype(np.int32)


def a_request(
    prompt: Any, *, seed: int | None = None, extensions: Any = None, **sampling: Any
) -> TokenCompletionRequest:
    return TokenCompletionRequest(
        model="tiny",
        prompt_token_ids=np.asarray(prompt, np.int32),
        sampling=SamplingParams(**sampling),
        return_=ReturnSpec.for_rl(),
        seed=seed,
        extensions=extensions,
    )


async def answer_of(client: Any, request: TokenCompletionRequest) -> ChatResponse:
    response, _ = await client.complete_tokens(request)
    return response


def plain_logprobs(model: Any, response: ChatResponse, *, temperature: float, top_k: int = 0) -> np.ndarray:
    """Of each sampled token, under the distribution it was drawn from: one forward pass of transformers."""
    import torch

    prompt, completion = response.prompt_token_ids.tolist(), response.completion_token_ids.tolist()
    with torch.no_grad():
        logits_TV = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / temperature
    if top_k:
        kth_T1 = logits_TV.topk(top_k).values[:, -1:]
        logits_TV = logits_TV.masked_fill(logits_TV < kth_T1, float("-inf"))
    return logits_TV.log_softmax(-1).gather(-1, torch.tensor(completion)[:, None])[:, 0].numpy()


# --- the same policy ---


async def test_a_stream_hands_out_the_tokens_of_the_whole_completion(client):
    request = a_request(some_prompt(20), seed=4, temperature=1.0, max_tokens=60, ignore_eos=True)
    whole = await answer_of(client, request)
    async with aclosing(client.stream_tokens(request)) as stream:
        chunks = [chunk async for chunk in stream]
    response = chunks[-1].response
    assert response is not None and len(chunks) > 10
    assert [i for chunk in chunks for i in chunk.token_ids] == response.completion_token_ids.tolist()
    assert [p for chunk in chunks for p in chunk.logprobs] == pytest.approx(list(response.completion_logprobs))
    assert (response.text, response.finish_reason, response.version_runs) == (
        whole.text,
        whole.finish_reason,
        whole.version_runs,
    )
    assert response.completion_token_ids.tolist() == whole.completion_token_ids.tolist()


async def test_a_stream_that_is_closed_early_leaves_the_batch(client, vllm_server):
    async with aclosing(client.stream_tokens(a_request(some_prompt(5), **LONG))) as stream:
        await anext(stream)
        await until(lambda: metric(vllm_server.url, "vllm:num_requests_running") == 1)
    await until(lambda: metric(vllm_server.url, "vllm:num_requests_running") == 0)


@pytest.mark.parametrize("length", [1, 7, 130])
async def test_greedy_replies_are_those_of_the_local_engine(client, engine, length):
    request = a_request(some_prompt(length), **GREEDY)
    served, local = await answer_of(client, request), await answer_of(engine, request)
    assert served.completion_token_ids.tolist() == local.completion_token_ids.tolist()
    assert ended(served) == ended(local)


def ended(response: ChatResponse) -> tuple[str, str | None]:
    """Text and reason. vLLM leaves out half a character at the end, which the local engine shows as a replacement character."""
    return response.text.rstrip("\ufffd"), response.finish_reason


@pytest.mark.parametrize("how", ["stop string", "stop token", "stop token by override", "fewest tokens"])
async def test_replies_end_where_those_of_the_local_engine_end(client, engine, how):
    prompt = some_prompt(9, seed=3)
    plain = await answer_of(engine, a_request(prompt, **GREEDY))
    ids = plain.completion_token_ids.tolist()
    extensions = None
    if how == "stop string":
        ascii_letters = re.findall(r"[ -~]", plain.text[4:])
        sampling = {"stop": ascii_letters[0]}
    elif how == "fewest tokens":
        sampling = {"stop_token_ids": tuple(ids[2:4]), "min_tokens": 3}
    else:
        sampling = {"stop_token_ids": (ids[5],)}
    local = await answer_of(engine, a_request(prompt, **GREEDY, **sampling))
    if how == "stop token by override":
        extensions, sampling = VLLMExtensions(extra_body_overrides={"stop_token_ids": [ids[5]]}), {}
    served = await answer_of(client, a_request(prompt, **GREEDY, **sampling, extensions=extensions))
    assert served.completion_token_ids.tolist() == local.completion_token_ids.tolist() != ids
    assert ended(served) == ended(local) and local.finish_reason == "stop"


@pytest.mark.parametrize("sampling", [{"temperature": 1.0}, {"temperature": 0.7, "top_k": 5}])
async def test_log_probs_are_those_of_a_transformers_forward_pass(client, model, sampling):
    requests = [a_request(some_prompt(12, seed), seed=seed, max_tokens=64, **sampling) for seed in range(4)]
    responses = await asyncio.gather(*(answer_of(client, request) for request in requests))
    assert sum(len(response.completion_token_ids) for response in responses) > 50
    for response in responses:
        expected = plain_logprobs(model, response, **sampling)
        np.testing.assert_allclose(response.completion_logprobs, expected, atol=1e-3)


async def test_the_older_endpoint_gives_the_same_completion(vllm_server, client):
    older = VLLMChatClient(vllm_server.host, vllm_server.port, control_token=vllm_server.control_token)
    request = a_request(some_prompt(20), temperature=0.7, top_k=5, max_tokens=32, seed=11)
    await older.complete_tokens(request)
    (server,) = older._pool.servers
    assert server.facts is not None and server.facts.has_generate and server.facts.gives_processed_logprobs
    assert server.facts.max_model_len == 2048 and server.facts.has_versions
    server.facts = replace(server.facts, has_generate=False)
    first, second = await answer_of(client, request), await answer_of(older, request)
    assert first.completion_token_ids.tolist() == second.completion_token_ids.tolist()
    assert (first.text, first.finish_reason, first.version_runs) == (
        second.text,
        second.finish_reason,
        second.version_runs,
    )
    np.testing.assert_allclose(first.completion_logprobs, second.completion_logprobs, atol=1e-3)


async def test_32_requests_at_once_are_all_answered_and_carry_their_version(client):
    requests = [
        a_request(some_prompt(5 + i, i), temperature=1.0, max_tokens=16, ignore_eos=True, seed=i) for i in range(32)
    ]
    responses = await asyncio.gather(*(answer_of(client, request) for request in requests))
    version = await client.get_policy_version()
    for request, response in zip(requests, responses, strict=True):
        assert response.prompt_token_ids is request.prompt_token_ids
        assert len(response.completion_token_ids) == len(response.completion_logprobs) == 16
        assert response.version_runs == ((version, 16),)
    assert len({response.text for response in responses}) == 32


@pytest.mark.extended(covered_by="test_greedy_replies_are_those_of_the_local_engine")
async def test_more_prompts_than_one_step_can_take_are_answered_with_their_seeds(client):
    """vLLM's CPU build dies of a request with a seed whose prompt it reads in pieces; the server is started so that it does not."""
    requests = [
        a_request(some_prompt(200, i), temperature=1.0, max_tokens=4, ignore_eos=True, seed=i) for i in range(64)
    ]
    first = await asyncio.gather(*(answer_of(client, request) for request in requests))
    again = await asyncio.gather(*(answer_of(client, request) for request in requests))
    assert [r.completion_token_ids.tolist() for r in first] == [r.completion_token_ids.tolist() for r in again]


async def test_a_chat_endpoint_with_token_ids_gives_the_same_tokens(vllm_server, client, tokenizer):
    messages = [{"role": "user", "content": "Hello"}]
    chat = OpenAIChatClient(f"{vllm_server.url}/v1")
    response, info = await chat.complete_messages(messages, model="tiny", sampling=SamplingParams(**GREEDY))
    await chat.close()
    prompt = HFChatTemplate(tokenizer).apply(messages).prompt_token_ids
    direct = await answer_of(client, a_request(prompt, **GREEDY))
    assert response.prompt_token_ids.tolist() == prompt.tolist()
    assert response.completion_token_ids.tolist() == direct.completion_token_ids.tolist()
    np.testing.assert_allclose(response.completion_logprobs, direct.completion_logprobs, atol=1e-3)
    assert info["completion_tokens"] == len(direct.completion_token_ids)


@pytest.mark.parametrize("has_generate", [True, False], ids=["generate", "completions"])
async def test_a_vllm_teacher_scores_as_the_local_one_does(vllm_server, engine, tokenizer, has_generate):
    """Same weights, same texts: log-probs agree to 1e-3. Twice each: what the server remembers of a text must not cost it scores."""
    client = VLLMChatClient(vllm_server.host, vllm_server.port, control_token=vllm_server.control_token)
    await client.complete_tokens(a_request(some_prompt(3), **GREEDY))
    (server,) = client._pool.servers
    server.facts = replace(server.facts, has_generate=has_generate)
    served, local = VLLMTeacher(client, "tiny", tokenizer), LocalTeacher(engine)
    assert served.tokenizer_fingerprint == local.tokenizer_fingerprint
    texts = [
        (some_prompt(prompt, 1), some_prompt(reply, 2)) for prompt, reply in [(1, 1), (9, 40), (130, 7), (700, 300)]
    ]
    expected = await asyncio.gather(*(local.score_tokens(*text) for text in texts))
    for _ in range(2):
        found = await asyncio.gather(*(served.score_tokens(*text) for text in texts))
        for ours, theirs, (_, reply) in zip(expected, found, texts, strict=True):
            assert len(theirs) == len(reply)
            np.testing.assert_allclose(theirs, ours, atol=1e-3)
    assert np.concatenate(expected).std() > 0.5, "there is something to confuse"
    await client.close()


# --- what the server refuses ---


async def test_a_prompt_beyond_the_context_is_too_long_here_and_there(client, vllm_server):
    with pytest.raises(PromptTooLong, match=r"2049 tokens, but the limit is 2048"):
        await client.complete_tokens(a_request(some_prompt(2009), **GREEDY))
    unaware = VLLMChatClient(vllm_server.host, vllm_server.port)
    await unaware.complete_tokens(a_request(some_prompt(3), **GREEDY))
    (server,) = unaware._pool.servers
    assert server.facts is not None
    server.facts = replace(server.facts, max_model_len=None)
    with pytest.raises(PromptTooLong, match="limit is 2048"):
        await unaware.complete_tokens(a_request(some_prompt(2100), **GREEDY))
    with pytest.raises(PromptTooLong, match="limit is 2048"):
        await unaware.complete_tokens(a_request(some_prompt(2030), temperature=1.0, max_tokens=40, ignore_eos=True))


# --- cancellation ---


async def test_a_cancelled_request_is_aborted_on_the_server(client, vllm_server):
    await client.complete_tokens(a_request(some_prompt(3), **GREEDY))
    before = metric(vllm_server.url, "vllm:generation_tokens_total")
    asking = [asyncio.create_task(client.complete_tokens(a_request(some_prompt(4, i), **LONG))) for i in range(4)]
    await until(lambda: metric(vllm_server.url, "vllm:num_requests_running") == 4)
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    assert all(task.cancelled() for task in asking)
    await until(lambda: metric(vllm_server.url, "vllm:num_requests_running") == 0)
    sampled = metric(vllm_server.url, "vllm:generation_tokens_total") - before
    assert 0 < sampled < 4 * LONG["max_tokens"], "they were aborted, not finished"


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.05)


def metric(url: str, pattern: str) -> float:
    """The sum of the server's counters whose line begins so."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if re.match(pattern, line))


# --- several servers, and a server that dies ---


async def test_a_server_that_is_killed_fails_episodes_as_data_and_is_used_again_when_it_returns(lora_server, tokenizer):
    server = lora_server
    client = VLLMChatClient(server.host, server.port, max_retries=1, wait_s=0.01)
    recorder = RecordingClient(client)

    async def kill_in_the_middle() -> None:
        # 16 episodes of 5 calls, 4 at a time: by now some are over, some under way, and most have not begun.
        await until(lambda: len(recorder.calls) >= 26)
        await asyncio.to_thread(server.process.kill)

    try:
        rollouts, _ = await asyncio.gather(play_16(recorder, tokenizer), kill_in_the_middle())
        failed = [rollout for rollout in rollouts if rollout.failure is not None]
        assert len(rollouts) == 16 and 4 <= len(failed) <= 12
        assert all("EndpointError" in rollout.failure.error for rollout in failed)
        assert any(rollout.agent_steps for rollout in failed), "what was played before is kept"
        with pytest.raises(ConnectionError):
            await client.get_policy_version()
    finally:
        server.process.start()
        await asyncio.to_thread(server.wait)
    assert await client.get_policy_version() == 0, "it came back with the weights of its folder"
    rollouts = await play_16(client, tokenizer)
    assert [rollout.failure for rollout in rollouts] == [None] * 16
    assert all(len(rollout.agent_steps) == 5 for rollout in rollouts)


async def play_16(client: Any, tokenizer: Any) -> list[Any]:
    def protocol(**kwargs: Any) -> SingleAgentProtocol:
        agent = make_agent(
            client,
            model="tiny",
            chat_template=HFChatTemplate(tokenizer),
            parser=raw_parser,
            reject_incomplete_completions=False,
        )
        return SingleAgentProtocol(agent, **kwargs)

    inference = InferenceSpec(
        sampling=SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True), return_=ReturnSpec.for_rl()
    )
    request = RolloutRequest(
        env=EnvSpec("counting", {"target": 99}), protocol=ProtocolSpec("single"), inference=inference, num_episodes=16
    )
    engine = RolloutEngine(
        env_registry={"counting": CountingEnv},
        protocol_registry={"single": protocol},
        max_retries=0,
        max_failed_share=1.0,
    )
    return await engine.generate_rollouts([request], max_steps=5, concurrency=4)
