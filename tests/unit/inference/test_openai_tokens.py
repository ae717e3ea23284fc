"""Token ids from a chat endpoint that offers them: our own server."""

import asyncio
import contextlib

import numpy as np
import pytest
from aiohttp import web

from ludic.inference import OpenAIChatClient
from ludic.inference.local import LocalEngine
from ludic.models.loading import tiny_llama, word_tokenizer
from ludic.types import ConfigError, ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_serve.openai_server import serve

MESSAGES = [{"role": "user", "content": "one two"}]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=8)


@pytest.fixture(scope="module")
def engine():
    tokenizer = word_tokenizer(["one", "two", "three"])
    engine = LocalEngine(tiny_llama(len(tokenizer), width=32, layers=1), tokenizer, kv_tokens=1024)
    yield engine
    engine.close()


async def test_the_tokens_are_the_engines_own_and_so_are_their_log_probs(engine):
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(engine, port=0, model_name="tiny", on_ready=address.set_result))
    client = OpenAIChatClient(f"{await address}/v1")
    response, info = await client.complete_messages(MESSAGES, model="tiny", sampling=SAMPLING, seed=3)
    await client.close()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    prompt = engine.tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    direct, _ = await engine.complete_tokens(
        TokenCompletionRequest(
            model="tiny", prompt_token_ids=prompt, sampling=SAMPLING, return_=ReturnSpec.for_rl(), seed=3
        )
    )
    assert response.prompt_token_ids.tolist() == list(prompt)
    assert response.completion_token_ids.tolist() == direct.completion_token_ids.tolist()
    np.testing.assert_allclose(response.completion_logprobs, direct.completion_logprobs, atol=1e-5)
    assert info["completion_tokens"] == len(direct.completion_token_ids)


async def test_an_endpoint_without_token_ids_is_an_error():
    async def answer(request: web.Request) -> web.Response:
        choice = {"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}
        return web.json_response({"choices": [choice]})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = OpenAIChatClient(f"http://127.0.0.1:{runner.addresses[0][1]}/v1")
    with pytest.raises(ConfigError, match="return_token_ids"):
        await client.complete_messages(MESSAGES, model="tiny")
    await client.close()
    await runner.cleanup()
