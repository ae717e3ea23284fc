"""A chat endpoint as a policy: against our own real server, and against one that misbehaves."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from ludic.inference import ByteTemplate
from ludic.inference.local import LocalEngine
from ludic.inference.openai_client import EndpointError, OpenAIChatClient, messages_of
from ludic.interaction import SingleAgentProtocol
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.parsers import raw_parser
from ludic.types import ConfigError, InferenceSpec, OutOfRoom, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_serve.openai_server import serve
from tests.fakes import CountingEnv, make_agent

WORDS = ["count=0", "count=1", "inc", "dec", "Say", "inc."]


@pytest.fixture(scope="module")
def engine():
    tokenizer = word_tokenizer(WORDS)
    engine = LocalEngine(tiny_llama(len(tokenizer), width=32, layers=1), tokenizer, kv_tokens=4096)
    yield engine
    engine.close()


@contextlib.asynccontextmanager
async def endpoint(engine: LocalEngine, **settings: Any) -> AsyncIterator[OpenAIChatClient]:
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(engine, port=0, model_name="tiny", on_ready=address.set_result, api_key="secret"))
    client = OpenAIChatClient(f"{await address}/v1", **{"api_key": "secret", **settings})
    try:
        yield client
    finally:
        await client.close()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def server(
    answer: Callable[[int, dict[str, Any]], web.Response], **settings: Any
) -> AsyncIterator[OpenAIChatClient]:
    """A server that answers by number of the request."""
    count = 0

    async def handle(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return answer(count, await request.json() if request.can_read_body else {})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = OpenAIChatClient(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", wait_s=0.001, **settings)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def a_request(content: str = "hi", **sampling: Any) -> TokenCompletionRequest:
    prompt = ByteTemplate().apply([{"role": "user", "content": content}]).prompt_token_ids
    return TokenCompletionRequest(model="tiny", prompt_token_ids=prompt, sampling=SamplingParams(**sampling), seed=3)


def says(text: str, finish_reason: str = "stop", **usage: int) -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return web.json_response({"choices": [choice], "usage": usage})


# --- messages ---


def test_messages_survive_encoding_and_decoding():
    messages = [
        {"role": "system", "content": "Ünïcödé 🎲\nand lines"},
        {"role": "user", "content": ""},
        {"role": "assistant", "content": "a<|im_end|>b"},
        {"role": "user", "content": "last"},
    ]
    assert messages_of(ByteTemplate().apply(messages).prompt_token_ids) == messages


def test_a_tool_result_is_rendered_as_text():
    ids = ByteTemplate().apply([{"role": "tool", "content": "4"}]).prompt_token_ids
    assert messages_of(ids) == [{"role": "user", "content": "Tool result: 4"}]


@pytest.mark.parametrize("ids", [[1, 2, 3], [1000, 2000, 3000, 5], [257, 65, 258, 66]])
def test_a_prompt_of_another_template_is_refused(ids):
    with pytest.raises(ConfigError, match="ByteTemplate"):
        messages_of(np.array(ids))


# --- our own server ---


async def test_an_episode_is_played_over_http_and_each_prompt_extends_the_one_before(engine):
    async with endpoint(engine) as client:
        protocol = SingleAgentProtocol(
            make_agent(
                client,
                model="tiny",
                parser=raw_parser,
                chat_template=ByteTemplate(),
                reject_incomplete_completions=False,
            )
        )
        inference = InferenceSpec(sampling=SamplingParams(temperature=0, max_tokens=3), return_=ReturnSpec.for_eval())
        (rollout,) = await protocol.run(env=CountingEnv(), max_steps=3, sampling_seed=1, inference=inference)
    assert len(rollout.agent_steps) == 3
    assert all(1 <= step.info["completion_tokens"] <= 3 for step in rollout.agent_steps), "real tokens, not bytes"
    roles = [message["role"] for message in rollout.agent_steps[-1].prompt_messages]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"]


async def test_the_reply_is_what_the_engine_says_itself(engine):
    messages = [{"role": "user", "content": "count=0"}]
    prompt = engine.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    sampling = SamplingParams(temperature=1.0, max_tokens=12)
    direct, _ = await engine.complete_tokens(
        TokenCompletionRequest(model="tiny", prompt_token_ids=prompt, sampling=sampling, seed=3)
    )
    async with endpoint(engine) as client:
        over_http, info = await client.complete_tokens(a_request("count=0", temperature=1.0, max_tokens=12))
    assert over_http.text == direct.text and over_http.finish_reason == direct.finish_reason
    assert info["completion_tokens"] == len(direct.completion_token_ids)


async def test_the_client_lists_models_and_sends_its_key(engine):
    async with endpoint(engine) as client:
        assert await client.list_models() == ["tiny"]
    async with endpoint(engine, api_key="wrong") as client:
        with pytest.raises(ConfigError, match=r"401.*API key"):
            await client.complete_tokens(a_request())


async def test_an_unknown_model_is_an_error_and_a_long_prompt_ends_the_episode(engine):
    async with endpoint(engine) as client:
        with pytest.raises(ConfigError, match=r"404.*model's name"):
            request = a_request()
            request.model = "gpt-9"
            await client.complete_tokens(request)
        with pytest.raises(OutOfRoom, match="tokens"):
            await client.complete_tokens(a_request("inc " * 400))


# --- others ---


async def test_only_settings_that_were_given_are_sent():
    sent: list[dict[str, Any]] = []

    def answer(number: int, body: dict[str, Any]) -> web.Response:
        sent.append(body)
        return says("ok")

    async with server(answer) as client:
        await client.complete_tokens(a_request(temperature=0.6, max_tokens=9))
        await client.complete_tokens(a_request(top_k=5, top_p=0.9, stop="x"))
    plain = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0.6,
        "max_tokens": 9,
        "seed": 3,
    }
    assert sent[0] == plain, "a field that some endpoint does not know is not sent without need"
    assert (sent[1]["top_k"], sent[1]["top_p"], sent[1]["stop"]) == (5, 0.9, "x")


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_busy_endpoint_is_retried(status):
    async with server(lambda number, _: says("at last") if number == 3 else web.Response(status=status)) as client:
        response, _ = await client.complete_tokens(a_request())
    assert response.text == "at last"


async def test_a_time_to_wait_that_is_no_number_is_ignored():
    busy = web.Response(status=503, headers={"Retry-After": "²"})
    async with server(lambda number, _: says("at last") if number == 2 else busy) as client:
        assert (await client.complete_tokens(a_request()))[0].text == "at last"


async def test_an_endpoint_that_stays_busy_fails_the_episode():
    async with server(lambda number, _: web.Response(status=503, text="down"), max_retries=2) as client:
        with pytest.raises(EndpointError, match="503: down It was tried 3 times"):
            await client.complete_tokens(a_request())


async def test_an_unreachable_endpoint_is_named():
    client = OpenAIChatClient("http://127.0.0.1:9/v1", max_retries=1, wait_s=0.001)
    with pytest.raises(EndpointError, match="127.0.0.1:9/v1/chat/completions cannot be reached"):
        await client.complete_tokens(a_request())
    await client.close()


async def test_a_refused_prompt_does_not_end_the_evaluation():
    body = {"error": {"message": "content policy", "code": "policy"}}
    async with server(lambda *_: web.json_response(body, status=400)) as client:
        with pytest.raises(EndpointError, match="content policy"):
            await client.complete_tokens(a_request())


async def test_an_address_without_an_api_is_named():
    async with server(lambda *_: web.Response(text="<html>hello</html>")) as client:
        with pytest.raises(ConfigError, match="does not follow OpenAI's API"):
            await client.complete_tokens(a_request())


async def test_a_truncated_reply_has_finish_reason_length():
    async with server(lambda *_: says("half a", "length", completion_tokens=2)) as client:
        response, info = await client.complete_tokens(a_request())
    assert response.finish_reason == "length" and info == {"completion_tokens": 2}
    assert response.completion_token_ids[-1] != ByteTemplate.END


def test_an_address_without_http_is_refused():
    with pytest.raises(ConfigError, match="http://"):
        OpenAIChatClient("localhost:8000/v1")


def test_weights_of_an_endpoint_cannot_be_replaced():
    with pytest.raises(ConfigError, match="evaluation"):
        OpenAIChatClient("http://x/v1").sync_weights({})
