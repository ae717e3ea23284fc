"""The HTTP server with the official client: a real socket, a real engine, a tiny random model."""

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ludic.inference.local import LocalEngine
from ludic.inference.local.engine import TokenChunk
from ludic.types import (
    ChatResponse,
    ConfigError,
    MissingExtra,
    ReturnSpec,
    SamplingParams,
    TokenCompletionRequest,
)
from ludic.util.text_stream import TextStream
from ludic_serve.openai_server import check_host, serve
from tests.chat_templates import make_tokenizer
from tests.unit.cli.runner import invoke

pytestmark = pytest.mark.slow

TOKENIZER = make_tokenizer("qwen")
PROMPT = TOKENIZER("The quick brown fox")["input_ids"]
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"type": "object", "properties": {}}}}
ENDLESS = {"ignore_eos": True}


def tiny_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.3,
        eos_token_id=TOKENIZER.eos_token_id,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def engine(model):
    engine = LocalEngine(model, TOKENIZER, max_sequences=8, kv_tokens=20_000)
    yield engine
    engine.close()


@contextlib.asynccontextmanager
async def serving(engine: Any, **options: Any) -> AsyncIterator[str]:
    """The address of a server that runs in the background of this test."""
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(engine, port=0, model_name="tiny", on_ready=address.set_result, **options))
    await asyncio.wait([task, address], return_when=asyncio.FIRST_COMPLETED)
    try:
        yield address.result()
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


@contextlib.asynccontextmanager
async def client_of(engine: Any, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with serving(engine, **options) as address:
        key = options.get("api_key") or "unused"
        # Reading the machine's certificates takes longer than most of these tests.
        http = openai.DefaultAsyncHttpxClient(verify=False)
        async with openai.AsyncOpenAI(
            base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=30, http_client=http
        ) as client:
            yield client


async def fetch(client: openai.AsyncOpenAI, path: str, **headers: str) -> tuple[int, str]:
    address = str(client.base_url).replace("/v1/", path)
    async with aiohttp.ClientSession() as session, session.get(address, headers=headers) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
async def test_web_pages_reach_no_model_without_a_key(engine, headers):
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
    for key, expected in ((None, 403), ("secret", 200)):
        async with serving(engine, api_key=key) as address, aiohttp.ClientSession() as session:
            sent = {"Authorization": f"Bearer {key}", **headers}
            async with session.post(f"{address}/v1/completions", json=body, headers=sent) as answer:
                assert answer.status == expected
                assert expected == 200 or "no key or token" in (await answer.json())["error"]["message"]


async def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited 5 s in vain")


async def sampled(engine: LocalEngine, seed: int = 5, **sampling: Any) -> ChatResponse:
    """What the engine itself says to PROMPT."""
    request = TokenCompletionRequest(
        model="tiny",
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(**sampling),
        seed=seed,
        return_=ReturnSpec.for_rl(),
    )
    response, _ = await engine.complete_tokens(request)
    return response


class Reciting:
    """An engine that says a given text, token by token."""

    def __init__(self, text: str) -> None:
        self.tokenizer = TOKENIZER
        self.ids = [*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id]
        self.prompts: list[str] = []
        self.max_total_tokens = 1000
        self.stats: dict[str, int] = {}
        self.failure = None

    async def complete_tokens(self, request):
        self.prompts.append(TOKENIZER.decode(request.prompt_token_ids))
        ids = np.array(self.ids, dtype=np.int32)
        return ChatResponse(
            text=TOKENIZER.decode(self.ids, skip_special_tokens=True),
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=ids,
            completion_logprobs=np.zeros(len(ids), dtype=np.float32),
            finish_reason="stop",
        ), {}

    async def stream_tokens(self, request):
        response, _ = await self.complete_tokens(request)
        for token in self.ids[:-1]:
            yield TokenChunk(token_ids=[token], logprobs=[0.0])
        yield TokenChunk(token_ids=self.ids[-1:], logprobs=[0.0], response=response)


# --- completions -------------------------------------------------------------------------------------------------


async def test_token_ids_in_and_out_are_those_of_the_engine(engine):
    direct = await sampled(engine, temperature=0.8, max_tokens=24)
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, temperature=0.8, max_tokens=24, seed=5, logprobs=0,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    choice = answer.choices[0]
    assert choice.prompt_token_ids == PROMPT
    assert choice.token_ids == direct.completion_token_ids.tolist()
    assert choice.text == direct.text and choice.finish_reason == direct.finish_reason
    np.testing.assert_array_equal(np.float32(choice.logprobs.token_logprobs), direct.completion_logprobs)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs) == len(choice.token_ids)
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(choice.token_ids)
    assert answer.usage.total_tokens == len(PROMPT) + len(choice.token_ids)


async def test_a_streamed_completion_adds_up_to_the_whole_one(engine):
    direct = await sampled(engine, temperature=1.0, max_tokens=24)
    async with client_of(engine) as client:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, temperature=1.0, max_tokens=24, seed=5, logprobs=1, stream=True,
            extra_body={"return_token_ids": True}, stream_options={"include_usage": True},
        )  # fmt: skip
        events = [event async for event in stream]
    *parts, last = [event for event in events if event.choices]
    choices = [event.choices[0] for event in [*parts, last]]
    assert "".join(choice.text for choice in choices) == direct.text
    assert [token for choice in choices for token in choice.token_ids] == direct.completion_token_ids.tolist()
    logprobs = [value for choice in choices for value in choice.logprobs.token_logprobs]
    np.testing.assert_array_equal(np.float32(logprobs), direct.completion_logprobs)
    assert choices[0].prompt_token_ids == PROMPT and not hasattr(choices[1], "prompt_token_ids")
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1].finish_reason == direct.finish_reason
    assert events[-1].choices == [] and events[-1].usage.completion_tokens == len(direct.completion_token_ids)


async def test_tokens_are_sent_while_the_rest_is_still_being_sampled(engine):
    async with client_of(engine) as client:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, stream=True, extra_body=ENDLESS
        )
        first = await anext(aiter(stream))
        assert first.choices[0].finish_reason is None
        assert engine.stats["running"] == 1
        await stream.close()
        await until(lambda: engine.stats["running"] == 0)


async def test_n_samples_differ_by_their_seed_and_prompts_keep_their_order(engine):
    alone = [(await sampled(engine, seed=seed, temperature=1.0, max_tokens=12)).text for seed in (7, 8)]
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="tiny",
            prompt=[PROMPT, TOKENIZER("Another")["input_ids"]],
            n=2,
            seed=7,
            temperature=1.0,
            max_tokens=12,
        )
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, n=2, seed=7, temperature=1.0, max_tokens=12, stream=True
        )
        streamed = ["", ""]
        async for event in stream:
            streamed[event.choices[0].index] += event.choices[0].text
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices[:2]] == alone == streamed
    assert alone[0] != alone[1]
    assert answer.usage.prompt_tokens == len(PROMPT) + len(TOKENIZER("Another")["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_shown_of_a_stop_string_nor_of_what_follows_it(engine, stream):
    free = await sampled(engine, temperature=0.8, max_tokens=32, ignore_eos=True)
    # A stop string that spans several tokens, so that its beginning is sampled before it is known to be one.
    start = next(i for i in range(10, len(free.text)) if "\ufffd" not in free.text[i : i + 6])
    stop = free.text[start : start + 6]
    expected = free.text[: free.text.index(stop)]
    async with client_of(engine) as client:
        answer = await client.completions.create(
            model="tiny", prompt=PROMPT, seed=5, temperature=0.8, max_tokens=32, stop=[stop, "never said"],
            stream=stream, extra_body=ENDLESS,
        )  # fmt: skip
        choices = [event.choices[0] async for event in answer] if stream else answer.choices
    assert "".join(choice.text for choice in choices) == expected
    assert choices[-1].finish_reason == "stop"


# --- chat --------------------------------------------------------------------------------------------------------


async def test_a_chat_is_rendered_by_the_models_template(engine):
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(
            model="tiny", messages=HELLO, temperature=0, max_completion_tokens=10, logprobs=True, top_logprobs=1,
            extra_body={"return_token_ids": True},
        )  # fmt: skip
    prompt = TOKENIZER.decode(answer.prompt_token_ids)
    assert prompt == f"<|im_start|>user\n{HELLO[0]['content']}<|im_end|>\n<|im_start|>assistant\n"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == TOKENIZER.decode(choice.token_ids, skip_special_tokens=True)
    assert choice.finish_reason == ("length" if len(choice.token_ids) == 10 else "stop")
    assert [entry.token for entry in choice.logprobs.content] == [TOKENIZER.decode([i]) for i in choice.token_ids]
    assert all(entry.logprob == entry.top_logprobs[0].logprob <= 0 for entry in choice.logprobs.content)
    assert answer.usage.prompt_tokens == len(answer.prompt_token_ids)


async def test_a_streamed_chat_says_the_same_as_a_whole_one(engine):
    ask = {"model": "tiny", "messages": HELLO, "temperature": 0.9, "seed": 3, "max_tokens": 24, "n": 2}
    async with client_of(engine) as client:
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True)
        texts, roles, reasons = ["", ""], [[], []], [None, None]
        async for event in stream:
            assert event.object == "chat.completion.chunk"
            (choice,) = event.choices
            texts[choice.index] += choice.delta.content or ""
            if choice.delta.role:
                roles[choice.index].append(choice.delta.role)
            reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == [["assistant"], ["assistant"]]
    assert reasons == [choice.finish_reason for choice in whole.choices]


async def test_without_a_limit_a_reply_may_fill_the_context(model):
    engine = LocalEngine(model, TOKENIZER, max_model_len=48, kv_tokens=20_000)
    async with engine, client_of(engine) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, extra_body=ENDLESS)
    assert answer.usage.total_tokens == 48 and answer.choices[0].finish_reason == "length"


CALL = 'Let me see. <tool_call>{"name": "calculator", "arguments": {"expression": "1 + 2"}}</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_read_back(stream):
    engine = Reciting(CALL)
    async with client_of(engine) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL], stream=stream)
        if not stream:
            content, calls = answer.choices[0].message.content, answer.choices[0].message.tool_calls
            reason = answer.choices[0].finish_reason
        else:
            choices = [event.choices[0] async for event in answer]
            content = "".join(choice.delta.content or "" for choice in choices)
            calls = [call for choice in choices for call in choice.delta.tool_calls or []]
            reason = choices[-1].finish_reason
            assert len([choice for choice in choices if choice.delta.content]) > 1, "the prose is streamed"
    assert '"calculator"' in engine.prompts[0]
    assert content.strip() == "Let me see." and reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("calculator", {"expression": "1 + 2"})
    ]


@pytest.mark.parametrize("text", ["1 < 2 { and so on", "<tool_call>not json</tool_call>", " plain "])
@pytest.mark.parametrize("stream", [False, True])
async def test_text_that_is_no_tool_call_is_shown_whole(text, stream):
    async with client_of(Reciting(text)) as client:
        answer = await client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL], stream=stream)
        if stream:
            choices = [event.choices[0] async for event in answer]
            assert "".join(choice.delta.content or "" for choice in choices) == text
            assert choices[-1].finish_reason == "stop"
        else:
            assert answer.choices[0].message.content == text and answer.choices[0].finish_reason == "stop"


async def test_a_conversation_with_tools_comes_back_as_the_client_wrote_it():
    engine = Reciting("3")
    async with client_of(Reciting(CALL)) as client:
        first = await client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL])
    message = first.choices[0].message
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "Be brief."}]},
        *HELLO,
        message,
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"},
    ]
    async with client_of(engine) as client:
        await client.chat.completions.create(model="tiny", messages=history, tools=[TOOL])
        await client.chat.completions.create(model="tiny", messages=HELLO, tools=[TOOL], tool_choice="none")
    assert "<|im_start|>system\nBe brief." in engine.prompts[0]
    assert '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}' in engine.prompts[0]
    assert "<tool_response>\n3\n</tool_response>" in engine.prompts[0]
    assert "calculator" not in engine.prompts[1]


# --- the rest of the API -----------------------------------------------------------------------------------------


async def test_models_health_and_metrics(engine):
    async with client_of(engine) as client:
        assert [card.id async for card in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).max_model_len == 4096
        with pytest.raises(openai.NotFoundError, match="'tiny' is"):
            await client.models.retrieve("org/other")
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=3, extra_body=ENDLESS)
        assert await fetch(client, "/health") == (200, '{"status": "ok"}')
        status, text = await fetch(client, "/metrics")
    assert status == 200
    numbers = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert numbers['ludic_requests_total{path="/v1/completions",status="200"}'] == "1"
    assert numbers['ludic_requests_total{path="/v1/models/{name}",status="404"}'] == "1"
    assert numbers["ludic_completion_tokens_total"] == "3" and numbers["ludic_engine_up"] == "1"
    assert {"ludic_engine_running", "ludic_engine_kv_blocks", "ludic_engine_preemptions_total"} <= numbers.keys()


BAD_COMPLETIONS = [
    ({"echo": True}, "echo=True is not supported"),
    ({"prompt": []}, "not empty"),
    ({"prompt": None}, "prompt: it must be a text"),
    ({"prompt": [1, "two"]}, "prompt[1]: Expected `int`, got `str`"),
    ({"prompt": [[1], [-1]]}, "prompt[0]: Expected `int` >= 0"),
    ({"prompt": [10**6]}, "Check that the tokenizer belongs to this model"),
    ({"prompt": [10**60]}, "prompt[0]: Expected `int` <= 2147483647"),
    ({"max_tokens": 4096}, "limit is 4096"),
    ({"max_tokens": 1.5}, "max_tokens: Expected `int`, got `float`"),
    ({"max_tokens": True}, "max_tokens: Expected `int`, got `bool`"),
    ({"temperature": "hot"}, "temperature: Expected `float`, got `str`"),
    ({"temperature": -1}, "temperature=-1"),
    ({"n": 0}, "n: Expected `int` >= 1"),
    ({"stop": [""]}, "stop[0]: Expected `str` of length >= 1"),
    ({"stop": 3}, "stop: Expected `str | array`, got `int`"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]: Expected `int`, got `str`"),
    ({"stop_token_ids": [10**6]}, "not in the vocabulary"),
    ({"temprature": 0}, "Did you mean 'temperature'"),
]


@pytest.mark.parametrize(("change", "message"), BAD_COMPLETIONS, ids=[str(c)[:40] for c, _ in BAD_COMPLETIONS])
async def test_a_completion_that_cannot_be_served_is_a_bad_request_that_says_why(engine, change, message):
    async with client_of(engine) as client:
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.completions.create(
                    **{"model": "tiny", "prompt": PROMPT, "stream": stream}, extra_body=change
                )
            assert message in caught.value.body["message"]
            assert caught.value.body["type"] == "invalid_request_error"
    assert engine.failure is None and engine.stats["running"] == 0


BAD_CHATS = [
    ({"messages": []}, "at least one message"),
    ({"messages": ["hi"]}, "messages[0]: Expected `object`, got `str`"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role: Invalid enum value 'robot'. It is system, user, assistant or tool"),
    ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content: Expected `str | array`, got `int`"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type: Invalid enum value 'image_url'. This server reads only text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "JSON object"),
    ({"tools": [{}]}, "tools[0]: Object missing required field `function`"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"top_logprobs": 1}, "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 5}, "chosen token only"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"messages": [{"role": "user", "content": "word " * 5000}]}, "There is no room"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_CHATS, ids=[str(c)[:40] for c, _ in BAD_CHATS])
async def test_a_chat_that_cannot_be_served_is_a_bad_request_that_says_why(engine, change, message):
    async with client_of(engine) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="tiny", messages=HELLO, extra_body=change)
    assert message in caught.value.body["message"]


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"prompt": "hi", "temperature": NaN}', b"[" * 100_000, b"\xff"])
async def test_a_body_that_is_no_json_object_is_a_bad_request(engine, body):
    async with serving(engine) as address, aiohttp.ClientSession() as session:
        json_type = {"Content-Type": "application/json"}
        async with session.post(f"{address}/v1/completions", data=body, headers=json_type) as answer:
            assert answer.status == 400 and "body" in (await answer.json())["error"]["message"]
        async with session.post(f"{address}/v1/completions", data=b'{"prompt": "hi"}') as answer:
            assert answer.status == 400 and "application/json" in (await answer.json())["error"]["message"]


async def test_a_lone_surrogate_is_harmless(engine):
    async with serving(engine) as address, aiohttp.ClientSession() as session:
        for body, status in [({"prompt": "a \ud800 b"}, 200), ({"prompt": "a", "stop": "\ud800"}, 400)]:
            async with session.post(f"{address}/v1/completions", json=body) as answer:
                assert answer.status == status, await answer.text()
    assert engine.failure is None


async def test_a_full_queue_is_a_rate_limit(model):
    engine = LocalEngine(model, TOKENIZER, kv_tokens=1000, max_queue=1)
    async with engine, client_of(engine) as client:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError, match="max_queue=1"):
                await client.completions.create(
                    model="tiny", prompt=PROMPT, n=2, max_tokens=900, stream=stream, extra_body=ENDLESS
                )
            await until(lambda: engine.stats["running"] + engine.stats["waiting"] == 0)
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)


async def test_the_key_is_asked_for_everywhere_but_at_health(engine):
    async with client_of(engine, api_key="secret") as client:
        await client.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
        for wrong in ("secre", "secret2", "Secret"):
            with pytest.raises(openai.AuthenticationError, match="API key"):
                await client.with_options(api_key=wrong).models.list()
        for header in ("secret", "Basic secret", "Bearer", "Bearer sécret"):
            assert (await fetch(client, "/v1/models", Authorization=header))[0] == 401
        assert (await fetch(client, "/health"))[0] == 200
        for path in ("/metrics", "/v1/models", "/nowhere"):
            status, text = await fetch(client, path)
            assert status == 401 and json.loads(text)["error"]["code"] == "invalid_api_key"


# --- engines that stop, clients that leave -----------------------------------------------------------------------


async def test_a_dead_engine_is_unavailable_and_says_why():
    model = tiny_model()
    engine = LocalEngine(model, TOKENIZER, kv_tokens=1000)

    def fail(*_: Any) -> None:
        raise RuntimeError("cosmic ray")

    model.model.layers[0].register_forward_pre_hook(fail)
    async with engine, client_of(engine) as client:
        for _ in range(2):  # the request that it dies of, and one that comes later
            with pytest.raises(openai.InternalServerError, match="cosmic ray") as caught:
                await client.completions.create(model="tiny", prompt=PROMPT)
            assert caught.value.status_code == 503
        status, text = await fetch(client, "/health")
        assert status == 503 and "cosmic ray" in json.loads(text)["reason"]
        assert "ludic_engine_up 0" in (await fetch(client, "/metrics"))[1]


async def test_logits_that_are_not_finite_are_an_error_of_that_request():
    model = tiny_model()
    model.get_input_embeddings().register_forward_hook(lambda module, ids, rows: rows * float("nan"))
    async with LocalEngine(model, TOKENIZER, kv_tokens=1000) as engine, client_of(engine) as client:
        with pytest.raises(openai.InternalServerError, match="not finite.*learning rate") as caught:
            await client.completions.create(model="tiny", prompt=PROMPT)
        assert caught.value.status_code == 500 and caught.value.code == "not_finite"
        assert (await fetch(client, "/health"))[0] == 200


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_weights_that_are_not_finite_fail_requests_and_the_next_weights_serve_them(value):
    model = tiny_model()
    weight = model.model.layers[0].mlp.up_proj.weight
    body = {"model": "tiny", "prompt": PROMPT, "seed": 1, "max_tokens": 8}
    async with LocalEngine(model, TOKENIZER, kv_tokens=1000) as engine, client_of(engine) as client:
        before = await client.completions.create(**body)
        kept = weight.detach().clone()
        with engine.updating(), torch.no_grad():
            weight[0, 0] = value
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="weights of version 1 are not finite") as caught:
                await client.completions.create(**body, stream=stream, n=3)
            assert caught.value.code == "not_finite"
        assert (await fetch(client, "/health"))[0] == 200
        with engine.updating(), torch.no_grad():
            weight.copy_(kept)
        assert (await client.completions.create(**body)).choices[0].text == before.choices[0].text


async def test_an_engine_that_stops_in_the_middle_of_a_stream_ends_it_with_an_error(model):
    engine = LocalEngine(model, TOKENIZER, kv_tokens=5000)
    async with client_of(engine) as client:
        stream = await client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=3000, stream=True, extra_body=ENDLESS
        )
        await anext(aiter(stream))
        await asyncio.to_thread(engine.close)
        with pytest.raises(openai.APIError, match="shut down"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_takes_its_request_with_it(engine, stream):
    body = {"prompt": PROMPT, "max_tokens": 3500, "ignore_eos": True, "stream": stream, "n": 2}
    async with client_of(engine) as client:
        async with aiohttp.ClientSession() as session:
            url = f"{client.base_url}completions"
            asking = asyncio.create_task(session.post(url, json=body))
            await until(lambda: engine.stats["running"] == 2)
            if stream:
                answer = await asking
                assert (await answer.content.readline()).startswith(b"data: {")
                answer.close()
            else:
                asking.cancel()
            await until(lambda: engine.stats["running"] == 0)
            assert engine.stats["kv_blocks_used"] == 0 and engine.stats["waiting"] == 0
        counted = 'ludic_requests_total{path="/v1/completions",status="499"} 1'
        assert counted in (await fetch(client, "/metrics"))[1], "it did not finish on its own"


# --- text in pieces ----------------------------------------------------------------------------------------------


def pieces(ids: list[int], tokenizer: Any = TOKENIZER, **options: Any) -> tuple[list[str], str, str]:
    """(what was shown token by token, the rest at the end, the whole)."""

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    stream = TextStream(decode, **options)
    shown = [stream.push([token]) for token in ids]
    return shown, stream.rest(decode(ids)), decode(ids)


def test_pieces_of_any_tokens_add_up():
    generator = np.random.default_rng(0)
    for _ in range(30):
        shown, rest, whole = pieces(generator.integers(0, len(TOKENIZER), size=60).tolist())
        assert "".join(shown) + rest == whole


def test_pieces_of_a_text_with_byte_tokens_add_up():
    tokenizer = make_tokenizer("mistral")
    shown, rest, whole = pieces(tokenizer(" The fox\n\n 𝄞∑ jumps,\x0e and 世界 ж")["input_ids"], tokenizer)
    assert "".join(shown) + rest == whole and "𝄞∑ jumps" in whole
    assert not any("\ufffd" in piece for piece in shown)


def test_what_may_become_a_stop_string_waits_until_it_is_none():
    ids = [token for letter in "see E and EN then" for token in TOKENIZER(letter)["input_ids"]]
    shown, rest, whole = pieces(ids, stops=("END",))
    assert "".join(shown) + rest == whole
    assert [shown[i] for i in (4, 5)] == ["", "E "], "E waits for the next letter"


# --- starting ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1", "localhost"])
def test_loopback_needs_no_key(host):
    check_host(host, None, insecure=False)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "", "0", "192.168.1.5", "example.org", "localhost.example.org", " 127.0.0.1"]
)
def test_other_hosts_need_a_key_or_a_word(host):
    with pytest.raises(ConfigError, match="--insecure"):
        check_host(host, None, insecure=False)
    check_host(host, "secret", insecure=False)
    check_host(host, None, insecure=True)


def test_localhost_is_this_machine_only_where_it_is_so(monkeypatch):
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_, **__: [(2, 1, 6, "", ("10.0.0.7", 0)), (2, 1, 6, "", ("127.0.0.1", 0))]
    )
    with pytest.raises(ConfigError, match="--insecure"):
        check_host("localhost", None, insecure=False)


async def test_a_port_that_is_taken_is_named(engine):
    async with serving(engine) as address:
        port = int(address.rsplit(":", 1)[1])
        with pytest.raises(ConfigError, match=f"port {port}"):
            await serve(engine, port=port, model_name="tiny")


def test_the_command_refuses_an_open_host_before_it_loads_anything():
    result = invoke(["serve", "--model", "/nowhere", "--host", "0.0.0.0"])
    assert isinstance(result.exception, ConfigError) and "--insecure" in str(result.exception)


def test_the_command_refuses_a_port_in_use_before_it_loads_anything():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = invoke(["serve", "--model", "/nowhere", "--port", str(port)])
    assert isinstance(result.exception, ConfigError) and f"Cannot listen on 127.0.0.1:{port}" in str(result.exception)


def test_the_command_without_aiohttp_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "ludic_serve.openai_server")
    result = invoke(["serve", "--model", "/nowhere"])
    assert isinstance(result.exception, MissingExtra) and "ludic-rl[serve]" in str(result.exception)
