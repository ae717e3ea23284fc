"""The gateway over the embedded engine, when much goes on at once and much goes wrong: load, hang-ups, retries, hostile bodies."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest

from ludic.batch_gen.stitching import stitch_rollouts
from ludic.http.app import ServerLimits
from ludic.inference import (
    HFChatTemplate,
    InferenceSpec,
    ReturnSpec,
    SamplingParams,
    ScriptedClient,
    tool_parser_for,
)
from ludic.inference.local import LocalEngine
from ludic.types import ChatClient, ChatResponse, Info, Rollout, SAWItem, TokenCompletionRequest
from ludic_serve.gateway import session as session_module
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy, Session, SessionLimits
from ludic_serve.gateway.threads import session_rollouts
from plugins.serve.tests.test_server import TOKENIZER, TOOL, tiny_model
from plugins.serve.tests.test_server_fuzz import FIELDS, TEXTS, blame, extreme, message, tool, written
from tests.fuzz import Fuzz

pytestmark = pytest.mark.integration

TEMPLATE = HFChatTemplate(TOKENIZER, tool_parser=tool_parser_for(TOKENIZER))
INFERENCE = InferenceSpec(sampling=SamplingParams(max_tokens=8, temperature=1.0), return_=ReturnSpec.for_rl())
LONG = InferenceSpec(
    sampling=SamplingParams(max_tokens=3000, temperature=1.0, ignore_eos=True), return_=ReturnSpec.for_rl()
)
CONTROL = {"X-Ludic-Control-Token": "secret"}


@pytest.fixture(scope="module")
def engine():
    engine = LocalEngine(tiny_model(), TOKENIZER, max_sequences=64, kv_tokens=60_000)
    yield engine
    engine.close()


@contextlib.asynccontextmanager
async def serving(client: ChatClient, **settings: Any) -> AsyncIterator[Gateway]:
    policy = Policy(client=client, chat_template=TEMPLATE, model="m")
    gateway = Gateway({"policy": policy}, **settings)
    await gateway.start()
    try:
        yield gateway
    finally:
        await gateway.close()


def openai_of(gateway: Gateway, **settings: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", **{"api_key": "none", "max_retries": 0, **settings})


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def items_of(rollouts: list[Rollout]) -> list[SAWItem]:
    weights = {(rollout.id, step.index): 1.0 for rollout in rollouts for step in rollout.steps}
    return stitch_rollouts(rollouts, weights, require_logprobs=True)


async def until(is_true: Any) -> None:
    async with asyncio.timeout(60):
        while not is_true():
            await asyncio.sleep(0.01)


# --- load ---


async def converse(client: openai.AsyncOpenAI, session: Session, name: str) -> list[SAWItem]:
    """Three turns, some of them streamed; the items of the session."""
    own = client.with_options(api_key=session.api_key)
    messages = question(f"I am {name}.")
    for turn in range(3):
        if turn == 1:
            stream = await own.chat.completions.create(model="policy", messages=messages, stream=True)
            reply = "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])
        else:
            reply = (await own.chat.completions.create(model="policy", messages=messages)).choices[0].message.content
        messages += [{"role": "assistant", "content": reply}, *question(f"And then, {name}?")]
    session.close()
    return items_of(session_rollouts(session))


async def test_eighty_sessions_at_once_get_what_each_would_get_alone(engine):
    async with serving(engine) as gateway, openai_of(gateway) as client:
        sessions = [gateway.open_session(inference=INFERENCE, sampling_seed=seed) for seed in range(80)]
        together = await asyncio.gather(
            *(converse(client, session, str(seed)) for seed, session in enumerate(sessions))
        )
        for session, items in zip(sessions, together, strict=True):
            counts = session.counts
            assert counts["calls"] == 3 and counts["continued"] + counts["healed"] == 2, counts
            assert len(items) == 1 and items[0].num_action_tokens == session.num_tokens
        for seed in (0, 33, 79):
            [alone] = await converse(client, gateway.open_session(inference=INFERENCE, sampling_seed=seed), str(seed))
            np.testing.assert_array_equal(alone.input_ids, together[seed][0].input_ids)
            np.testing.assert_allclose(alone.actor_logps, together[seed][0].actor_logps, atol=1e-4)
    assert engine.stats["running"] == engine.stats["waiting"] == 0


# --- clients that are gone ---


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
async def test_a_client_that_hangs_up_in_a_stream_frees_the_engine_and_is_not_trained(engine, path, monkeypatch):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 0.05)
    body = {"model": "policy", "stream": True, "max_tokens": 3000, "messages": question("Tell me.")}
    if path == "responses":
        body = {"model": "policy", "stream": True, "input": "Tell me."}
    async with serving(engine) as gateway, aiohttp.ClientSession() as http:
        session = gateway.open_session(inference=LONG)
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with http.post(f"{gateway.url}/v1/{path}", json=body, headers=headers) as answer:
            assert answer.status == 200
            await answer.content.readuntil(b"delta")
            assert engine.stats["running"] == 1
        await until(lambda: engine.stats["running"] == 0)
        await until(lambda: session.counts["undelivered"] == 1)
        assert session_rollouts(session) == []
        # The next call of the session begins where it would have begun.
        session.inference = INFERENCE
        async with openai_of(gateway, api_key=session.api_key) as client:
            await client.chat.completions.create(model="policy", messages=question("Tell me."))
        [item] = items_of(session_rollouts(session))
        assert item.num_action_tokens <= 8


async def test_a_client_that_does_not_read_its_answer_is_disconnected(engine, monkeypatch, caplog):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 0.05)
    long = "word " * 4_000_000  # more than the buffers of a connection hold
    client = ScriptedClient([long], tokenizer=TOKENIZER)
    monkeypatch.setattr(client, "_encode", lambda text: np.arange(5, dtype=np.int32))
    async with serving(client, limits=ServerLimits(answer_s=0.3)) as gateway:
        session = gateway.open_session(inference=INFERENCE)
        body = json.dumps({"messages": question("Tell me."), "model": "policy"}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nx-api-key: {session.api_key}\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]), limit=1024)
        writer.write(head.encode() + body)
        await until(lambda: session.counts["undelivered"] == 1)
        writer.close()
        assert session_rollouts(session) == [] and not blame(caplog)


# --- retries of the SDKs ---


class GatedClient:
    """Answers when it is let."""

    def __init__(self, inner: ChatClient) -> None:
        self.inner, self.gate, self.num_calls = inner, asyncio.Event(), 0

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        self.num_calls += 1
        await self.gate.wait()
        return await self.inner.complete_tokens(request)

    def sync_weights(self, params: Any, **settings: Any) -> str:
        raise RuntimeError("not here")


async def ask_openai(url: str, key: str, timeout_s: float) -> str:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, timeout=timeout_s, max_retries=3) as client:
        done = await client.chat.completions.create(model="policy", messages=question("Hello?"))
        return done.choices[0].message.content or ""


async def ask_anthropic(url: str, key: str, timeout_s: float) -> str:
    async with anthropic.AsyncAnthropic(base_url=url, api_key=key, timeout=timeout_s, max_retries=3) as client:
        done = await client.messages.create(model="policy", max_tokens=8, messages=question("Hello?"))
        return "".join(block.text for block in done.content)


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
async def test_an_sdk_that_lost_patience_joins_the_call_that_it_began(engine, ask, monkeypatch):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 60.0)  # the SDKs wait half a second before they ask again
    client = GatedClient(engine)
    async with serving(client) as gateway:
        session = gateway.open_session(inference=INFERENCE, sampling_seed=1)
        asking = asyncio.create_task(ask(gateway.url, session.api_key, 0.5))
        await until(lambda: session.counts["joined"] == 1)
        client.gate.set()
        text = await asking
        assert client.num_calls == session.counts["calls"] == 1
        [rollout] = session_rollouts(session)
        assert rollout.agent_steps[0].action.strip() == text.strip()


@pytest.mark.parametrize("ask", [ask_openai, ask_anthropic])
async def test_an_answer_that_was_lost_on_the_way_is_given_again(engine, ask):
    num_connections = 0
    async with serving(engine) as gateway:
        port = int(gateway.url.rpartition(":")[2])

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            """Passes a request on; the first answer never arrives."""
            nonlocal num_connections
            num_connections += 1
            there, back = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                is_first = num_connections == 1
                while data := await reader.read(2**16):
                    back.write(data)
                    answer = await there.readuntil(b"\r\n\r\n")
                    length = re.search(rb"(?i)content-length: (\d+)", answer)
                    answer += await there.readexactly(int(length[1])) if length else b""
                    if is_first:
                        break
                    writer.write(answer)
            back.close()
            writer.close()

        proxy = await asyncio.start_server(relay, "127.0.0.1", 0)
        async with proxy:
            session = gateway.open_session(inference=INFERENCE, sampling_seed=1)
            text = await ask(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", session.api_key, 30)
        assert num_connections == 2 and session.counts["joined"] == 1 and session.counts["calls"] == 1
        [rollout] = session_rollouts(session)
        assert rollout.agent_steps[0].action.strip() == text.strip()


# --- keys, limits, versions ---


async def test_a_wrong_key_and_a_closed_session_are_refused_and_not_asked_again(engine):
    async with serving(engine) as gateway:
        session = gateway.open_session(inference=INFERENCE)
        with pytest.raises(openai.AuthenticationError):
            await ask_openai(gateway.url, "sk-wrong", 30)
        with pytest.raises(anthropic.AuthenticationError):
            await ask_anthropic(gateway.url, "sk-wrong", 30)
        gateway.close_session(session)
        with pytest.raises(openai.AuthenticationError):
            await ask_openai(gateway.url, session.api_key, 30)
        assert not session.nodes


@pytest.mark.parametrize("limits", [SessionLimits(max_calls=2), SessionLimits(max_tokens=11)])
async def test_past_a_limit_an_agent_gets_one_last_reply_and_then_an_error(engine, limits):
    inference = InferenceSpec(
        sampling=SamplingParams(max_tokens=8, temperature=1.0, ignore_eos=True), return_=INFERENCE.return_
    )
    async with serving(engine) as gateway:
        session = gateway.open_session(inference=inference, limits=limits)
        async with openai_of(gateway, api_key=session.api_key, max_retries=3) as client:
            messages, replies = question("Hello?"), []
            for _ in range(3):
                done = await client.chat.completions.create(model="policy", messages=messages)
                replies.append(done.choices[0].message.content)
                messages += [{"role": "assistant", "content": replies[-1]}, *question("Go on.")]
            with pytest.raises(openai.BadRequestError, match="This session has used"):
                await client.chat.completions.create(model="policy", messages=messages)
        with pytest.raises(anthropic.BadRequestError, match="This session has used"):
            await ask_anthropic(gateway.url, session.api_key, 30)
        assert "no further call is answered" in (replies[2] or "") and session.counts["limited"] == 3
        [rollout] = session_rollouts(session)
        [item] = items_of([rollout])
        assert len(rollout.agent_steps) == session.counts["calls"] == 2
        assert item.num_action_tokens == (16 if limits.max_calls else 11)


async def test_new_weights_in_the_middle_of_a_session_are_tagged(engine):
    before = engine.version
    async with serving(engine) as gateway, openai_of(gateway) as client:
        session = gateway.open_session(inference=INFERENCE, sampling_seed=1)
        own = client.with_options(api_key=session.api_key)
        messages = question("Hello?")
        for _ in range(3):
            done = await own.chat.completions.create(model="policy", messages=messages)
            messages += [{"role": "assistant", "content": done.choices[0].message.content}, *question("Go on.")]
            await asyncio.to_thread(engine.sync_weights, {})
        long = gateway.open_session(inference=LONG)
        streaming = await client.with_options(api_key=long.api_key).chat.completions.create(
            model="policy", messages=question("Tell me."), stream=True, max_tokens=300
        )
        num_pieces = 0
        async for _ in streaming:
            num_pieces += 1
            if num_pieces == 20:
                await asyncio.to_thread(engine.sync_weights, {})
        [item], [in_between] = items_of(session_rollouts(session)), items_of(session_rollouts(long))
    assert [run.version for run in item.attachments.version_runs] == [before, before + 1, before + 2]
    assert sum(run.length for run in item.attachments.version_runs) == item.num_action_tokens
    assert [run.version for run in in_between.attachments.version_runs] == [before + 3, before + 4]


# --- hostile bodies ---

DIALECTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": question("Hi")},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": question("Hi"), "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": question("Hi")},
    "/sessions": {},
}


def block(rng: Random) -> Any:
    """Part of a message of Anthropic's, or an item of the Responses API."""
    kinds = ["text", "thinking", "tool_use", "tool_result", "image", "message", "reasoning", "function_call"]
    kinds += ["function_call_output", "input_text", "output_text", "summary_text", "item_reference"]
    names = ["text", "thinking", "signature", "id", "call_id", "name", "input", "arguments", "output", "content"]
    names += ["summary", "tool_use_id", "role", "status", "is_error"]
    found = {"type": rng.choice([*kinds, extreme(rng)])}
    for name in rng.sample(names, rng.choice([0, 1, 2, 4, 8])):
        found[name] = rng.choice(
            ["x", "{}", "assistant", f"call_{'0' * 24}_0", [{"type": "text", "text": "x"}], {}, extreme(rng)]
        )
    return rng.choice([found, found, found, extreme(rng)])


def some_messages(rng: Random) -> Any:
    found = [message(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))]
    for value in found:
        if isinstance(value, dict) and rng.random() < 0.5:
            value["content"] = [block(rng) for _ in range(rng.choice([0, 1, 2]))]
    return found


MORE_FIELDS: dict[str, Any] = {
    **{name: field for name, field in FIELDS.items() if name not in ("n", "prompt")},
    "messages": some_messages,
    "input": lambda rng: rng.choice(["Hi", [block(rng) for _ in range(rng.choice([0, 1, 3]))], some_messages(rng)]),
    "instructions": lambda rng: rng.choice(TEXTS),
    "previous_response_id": lambda rng: rng.choice(["resp_" + "0" * 24, extreme(rng)]),
    "system": lambda rng: rng.choice(["x", [block(rng)], extreme(rng)]),
    "thinking": lambda rng: rng.choice([{"type": "enabled", "budget_tokens": 5}, extreme(rng)]),
    "tools": lambda rng: [rng.choice([tool(rng), TOOL["function"], block(rng)]) for _ in range(rng.choice([0, 1, 2]))],
    "model": lambda rng: rng.choice(["policy", "other", extreme(rng)]),
    "max_calls": lambda rng: rng.choice([1, 0, extreme(rng)]),
    "seed": lambda rng: rng.choice([1, -1, 2**70, extreme(rng)]),
}


def some_body(rng: Random) -> tuple[str, bytes]:
    path = rng.choice(list(DIALECTS))
    body = {"model": "policy", **DIALECTS[path]} if path != "/sessions" else {}
    for name in rng.sample(sorted(MORE_FIELDS), rng.choice([0, 1, 1, 2, 3, 5])):
        body[name] = extreme(rng) if rng.random() < 0.4 else MORE_FIELDS[name](rng)
    data = written(body).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        where = rng.randrange(len(data) + 1)
        data = data[:where] + rng.choice([b"", b"\xff\xfe", b"\0", b"[" * 3000]) + data[where + rng.randrange(9) :]
    return path, data


async def send(http: aiohttp.ClientSession, url: str, key: str, rng: Random, at: str) -> int:
    path, data = some_body(rng)
    if rng.random() < 0.1:
        path = rng.choice(
            [
                "/v1/models",
                f"/s/{key}/v1/models",
                "/sessions/x",
                "/sessions/x/reward",
                "/",
                "/v1/v1/messages",
                "/%00%ff",
            ]
        )
    method = rng.choice(["POST"] * 15 + ["GET", "PUT", "NONSENSE"])
    headers = {"Content-Type": rng.choice(["application/json"] * 9 + ["text/plain", "\x01"])}
    headers |= rng.choice(
        [{"Authorization": f"Bearer {key}"}] * 8 + [{"x-api-key": key}, {"Authorization": "Bearer \xff"}, {}]
    )
    headers |= rng.choice([{}] * 6 + [CONTROL, {"Idempotency-Key": "\x7f"}, {"X-Stainless-Retry-Count": "1"}])
    patience = aiohttp.ClientTimeout(total=rng.choice([60] * 9 + [0.01]))
    try:
        async with http.request(method, url + path, data=data, headers=headers, timeout=patience) as answer:
            raw = await answer.read()
    except (TimeoutError, aiohttp.ClientError, ValueError):  # gone early, or refused by our own client
        return 0
    shown = f"{at}\n{method} {path} {data[:2000]!r}\n{answer.status} {raw[:500]!r}"
    assert answer.status in (200, 400, 401, 403, 404, 405, 408, 413, 429), shown
    if answer.content_type == "application/json" and raw:
        found = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON: {shown}"))
        if answer.status != 200:
            assert 0 < len(found["error"]["message"]) < 2000, shown
    elif answer.content_type == "text/event-stream":
        assert b"server_error" not in raw and b"api_error" not in raw, shown
        raw.decode()
    return answer.status


async def test_no_body_stops_the_gateway_or_reaches_the_session_of_another(engine, fuzz: Fuzz, caplog):
    limits = ServerLimits(max_body_bytes=200_000, head_s=20, body_s=2)
    async with serving(engine, limits=limits, control_token="secret") as gateway, openai_of(gateway) as client:
        hostile = gateway.open_session(inference=INFERENCE)
        [alone] = await converse(client, gateway.open_session(inference=INFERENCE, sampling_seed=5), "honest")
        statuses: list[int] = []
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            for case in range(fuzz.cases(60)):
                rng, at = fuzz.rng(case), fuzz.at(case)
                honest = gateway.open_session(inference=INFERENCE, sampling_seed=5)
                others = [send(http, gateway.url, hostile.api_key, rng, at) for _ in range(4)]
                [item], *found = await asyncio.gather(converse(client, honest, "honest"), *others)
                statuses += found
                np.testing.assert_array_equal(item.input_ids, alone.input_ids, err_msg=at)
                assert not blame(caplog), f"{at}\n{blame(caplog)}"
        assert statuses.count(200) > len(statuses) // 40 and statuses.count(400) > len(statuses) // 40, "both are tried"
        rollouts = session_rollouts(hostile)
        hostile.close()
        items_of(rollouts)
    assert engine.stats["running"] == engine.stats["waiting"] == 0


@pytest.mark.parametrize("headers", [{}, {"X-Ludic-Control-Token": "wrong"}, {"X-Ludic-Control-Token": "sécret"}])
async def test_sessions_are_neither_opened_nor_shown_nor_rewarded_without_the_token(engine, headers):
    async with serving(engine, control_token="secret") as gateway, aiohttp.ClientSession() as http:
        session = gateway.open_session(inference=INFERENCE)
        place = f"/sessions/{session.id}"
        asked = [("POST", "/sessions"), ("GET", place), ("POST", f"{place}/reward"), ("POST", f"{place}/close")]
        for method, path in asked:
            headers = {**headers, "Authorization": f"Bearer {session.api_key}"}  # a session's key is not enough
            async with http.request(method, gateway.url + path, json={}, headers=headers) as answer:
                assert answer.status == 403, path
        assert not session.is_closed
