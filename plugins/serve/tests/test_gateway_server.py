"""The gateway over HTTP: keys, dialects, streams, hang-ups, retries, control endpoints."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from ludic.inference import ByteTemplate, ChatTemplate, HermesToolParser, HFChatTemplate, ScriptedClient
from ludic.types import ChatClient, Message, Rollout, TokenArray, TokenChunk, TokenCompletionRequest
from ludic_serve.gateway import session as session_module
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy
from ludic_serve.gateway.threads import session_rollouts
from plugins.serve.tests.sessions import INFERENCE, TOOLS, called
from plugins.serve.tests.test_dialects import CONSTRAINTS
from plugins.serve.tests.test_session import SlowClient, StreamingClient
from tests.chat_templates import make_tokenizer
from tests.fakes import status_with_header

PATHS = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}]}),
    "responses": ("/v1/responses", {"input": "Hello"}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50}),
}


class Http:
    """A started gateway and a client of one of its sessions."""

    def __init__(self, gateway: Gateway, http: aiohttp.ClientSession) -> None:
        self.gateway, self.http = gateway, http
        self.session = gateway.open_session(inference=INFERENCE)

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {self.session.api_key}"} | headers
        async with self.http.post(f"{self.gateway.url}{path}", json=body, headers=headers) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if answer.content_type == "application/json" else text


@asynccontextmanager
async def served(client: ChatClient, template: ChatTemplate | None = None, **settings: Any) -> AsyncIterator[Http]:
    template = template or ByteTemplate(tool_parser=HermesToolParser())
    policy = Policy(client=client, chat_template=template, model="policy")
    gateway = Gateway({"policy": policy}, default="policy", **settings)
    await gateway.start()
    try:
        async with aiohttp.ClientSession() as http:
            yield Http(gateway, http)
    finally:
        await gateway.close()


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("is_streamed", [False, True])
async def test_every_dialect_is_answered_and_recorded(name: str, is_streamed: bool):
    path, body = PATHS[name]
    async with served(StreamingClient("Hi there", 3)) as http:
        status, answer = await http.post(path, {**body, "model": "policy", "stream": is_streamed})
        assert status == 200
        assert "Hi" in json.dumps(answer)
        [rollout] = session_rollouts(http.session)
        assert rollout.agent_steps[0].action == "Hi there"


@pytest.mark.parametrize("name", PATHS)
async def test_keys_of_sessions_are_checked(name: str):
    path, body = PATHS[name]
    async with served(ScriptedClient(lambda request: "x")) as http:
        key = http.session.api_key
        assert (await http.post(path, body, Authorization="Bearer wrong"))[0] == 401
        assert (await http.post(path, body, Authorization=""))[0] == 401
        for headers in ({"x-api-key": key}, {"x-goog-api-key": key}):
            assert (await http.post(path, body, Authorization="Bearer sk-other", **headers))[0] == 200
        assert (await http.post(f"/s/{key}{path}", body, Authorization=""))[0] == 200
        http.gateway.close_session(http.session)
        assert (await http.post(path, body))[0] == 401


async def test_keys_and_tokens_that_are_no_text_are_refused():
    async with served(ScriptedClient([]), control_token="sécret") as http:
        for name, status, path in (
            ("Authorization", 401, "/v1/models"),
            ("x-api-key", 401, "/v1/models"),
            ("X-Ludic-Control-Token", 403, f"/sessions/{http.session.id}"),
        ):
            for value in (b"Bearer s\xe9cret", "sécret²".encode(), b"\xed\xa0\x80"):
                assert await status_with_header(f"{http.gateway.url}{path}", name, value) == status
        right = "sécret".encode()
        assert await status_with_header(f"{http.gateway.url}{path}", name, right) == 200


async def test_anthropic_tokens_are_counted_and_models_listed():
    async with served(ScriptedClient([])) as http:
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        status, answer = await http.post("/v1/messages/count_tokens", body)
        assert (status, answer) == (200, {"input_tokens": 8})
        assert not http.session.nodes
        headers = {"Authorization": f"Bearer {http.session.api_key}"}
        async with http.http.get(f"{http.gateway.url}/v1/models", headers=headers) as listed:
            assert [card["id"] for card in (await listed.json())["data"]] == ["policy"]


async def test_a_gateway_that_is_closed_lets_calls_in_progress_end_first():
    client = SlowClient()
    async with served(client) as http:
        call = asyncio.create_task(http.post(*PATHS["chat"]))
        await client.began.wait()
        closing = asyncio.create_task(http.gateway.close(drain_s=600))
        await asyncio.sleep(0)
        assert http.gateway.num_sessions == 1 and not closing.done()
        client.go.set()
        status, answer = await call
        assert status == 200 and answer["choices"][0]["message"]["content"] == "slow"
        await closing
        assert http.gateway.num_sessions == 0 and not client.num_cancelled


async def test_a_client_that_hangs_up_cancels_its_call(monkeypatch):
    monkeypatch.setattr(session_module, "RETRY_GRACE_S", 0.01)
    client = SlowClient()
    async with served(client) as http:
        task = asyncio.create_task(http.post(*PATHS["chat"]))
        await client.began.wait()
        task.cancel()
        async with asyncio.timeout(60):
            while not client.num_cancelled:
                await asyncio.sleep(0.01)
        assert http.session.counts["undelivered"] == 1


class BrokenStream(ScriptedClient):
    """Loses its model in the middle of a reply."""

    async def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(token_ids=list(b"one two"), logprobs=[])
        await asyncio.sleep(0.01)
        raise ConnectionResetError("away")


@pytest.mark.parametrize("name", PATHS)
async def test_a_model_that_goes_away_in_the_middle_of_a_stream_is_an_event(name: str):
    path, body = PATHS[name]
    async with served(BrokenStream([])) as http:
        status, text = await http.post(path, {**body, "stream": True})
    assert status == 200 and "one two" in text and "Internal error" in text


async def test_a_retry_of_the_sdk_gets_the_first_answer():
    replies = iter(["one", "two", "three"])
    async with served(ScriptedClient(lambda request: next(replies))) as http:
        first = await http.post(*PATHS["chat"])
        again = await http.post(*PATHS["chat"], **{"X-Stainless-Retry-Count": "1"})
        keyed = [await http.post(*PATHS["chat"], **{"Idempotency-Key": "k"}) for _ in range(2)]
        path, body = PATHS["chat"]
        other = await http.post(path, {**body, "max_tokens": 9}, **{"Idempotency-Key": "k"})
    assert again == first
    assert keyed[0] == keyed[1] != first
    assert other[1]["choices"][0]["message"]["content"] == "three", "a key is of one body"


async def test_a_reference_to_a_reply_continues_it_in_its_session_alone():
    # As `ai` 7.0.173 with @ai-sdk/openai 4.0.118 sends it: replies by reference, calls and their results whole.
    replies = iter(["One.", called({"a": 1}, prose="I add."), "3", "4"])
    async with served(ScriptedClient(lambda request: next(replies))) as http:
        items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": "Add."}]}]
        functions = [{"type": "function", **TOOLS[0]["function"]}]
        for _ in range(3):
            status, answer = await http.post("/v1/responses", {"input": items, "tools": functions})
            assert status == 200
            for item in answer["output"]:
                if item["type"] == "message":
                    items.append({"type": "item_reference", "id": item["id"]})
                else:
                    items.append({name: item[name] for name in ("type", "call_id", "name", "arguments")})
                    items.append({"type": "function_call_output", "call_id": item["call_id"], "output": "3"})
            if items[-1]["type"] == "item_reference":
                items.append({"role": "user", "content": "Go on."})
        assert (
            http.session.counts["calls"] == 3 and http.session.counts["forked"] == http.session.counts["foreign"] == 0
        )
        [rollout] = session_rollouts(http.session)
        assert len(rollout.agent_steps) == 3
        other = Http(http.gateway, http.http)
        for client, id in ((other, items[1]["id"]), (http, f"msg_{'0' * 24}"), (http, "msg_²"), (http, None)):
            body = {"input": [{"type": "item_reference", "id": id}, {"role": "user", "content": "And?"}]}
            status, answer = await client.post("/v1/responses", body)
            assert status == 404 and "this session has no item" in answer["error"]["message"]
        assert (await http.post("/v1/responses", {"input": [items[0], items[1], {"role": "user", "content": "x"}]}))[
            0
        ] == 200
        changed = [{"role": "user", "content": "Something else."}, items[1], {"role": "user", "content": "And?"}]
        await http.post("/v1/responses", {"input": changed})
        assert http.session.nodes[-1].messages[1].content == "One.", "a history that differs has the text, too"


@pytest.mark.parametrize("name", PATHS)
async def test_a_lenient_session_says_which_constraints_had_no_effect(name: str):
    path, body = PATHS[name]
    asked = {**body, **CONSTRAINTS[name]}
    async with served(ScriptedClient(lambda request: "x")) as http:
        status, answer = await http.post(path, asked)
        assert status == 400 and "--lenient" in json.dumps(answer)
    async with served(ScriptedClient(lambda request: "x"), lenient=True) as http:
        assert (await http.post(path, asked))[0] == 200
        [rollout] = session_rollouts(http.session)
        assert {field.split(".")[0] for field in rollout.agent_steps[0].info["without_effect"]} == {*CONSTRAINTS[name]}


# --- long requests ---


class Gate(ByteTemplate):
    """Tokenises long texts only when `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.go, self.has_waited_in_vain = threading.Event(), threading.Event(), False

    def encode_message(self, message: Message) -> TokenArray:
        if len(message["content"]) > 10**6:
            self.begun.set()
            self.has_waited_in_vain = self.has_waited_in_vain or not self.go.wait(20)
        return super().encode_message(message)


@pytest.mark.parametrize("place", ["prompt", "delta", "count"])
async def test_other_sessions_are_answered_while_a_long_text_is_tokenised(place: str):
    template = Gate()
    async with served(ScriptedClient(lambda request: "x"), template) as http:
        other, messages = Http(http.gateway, http.http), [{"role": "user", "content": "Hello"}]
        if place == "delta":
            _, first = await http.post("/v1/chat/completions", {"messages": messages})
            messages.append(first["choices"][0]["message"])
        body = {"messages": [*messages, {"role": "user", "content": "x" * (2 << 20)}]}
        path = "/v1/messages/count_tokens" if place == "count" else "/v1/chat/completions"
        long = asyncio.create_task(http.post(path, body))
        await asyncio.to_thread(template.begun.wait, 20)
        assert (await other.post(*PATHS["chat"]))[0] == 200
        assert not long.done()
        template.go.set()
        assert (await long)[0] == 200
    assert not template.has_waited_in_vain


class Counting(HFChatTemplate):
    """Counts the characters that are tokenised."""

    num_chars = 0

    def _encode_uncached(self, text: str) -> TokenArray:
        self.num_chars += len(text)
        return super()._encode_uncached(text)


class Limited(ScriptedClient):
    max_total_tokens = 1000


TOO_LONG: dict[str, Any] = {
    "one message": {"messages": [{"role": "user", "content": "a b c " * 400_000}]},
    "15 MB": {"messages": [{"role": "user", "content": "word " * 3_000_000}]},
    "4000 messages": {"messages": [{"role": "user", "content": "a b c " * 100}] * 4000},
    "200 tools": {
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d " * 5000}}] * 200,
    },
}


@pytest.mark.parametrize("name", TOO_LONG)
async def test_a_prompt_that_cannot_fit_is_refused_after_its_first_part(name: str):
    template = Counting(make_tokenizer("qwen"), tool_parser=HermesToolParser())
    async with served(Limited([]), template) as http:
        status, answer = await http.post("/v1/chat/completions", TOO_LONG[name])
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded", answer
        assert "limit is 1000" in answer["error"]["message"] and "only the first" in answer["error"]["message"]
        assert http.session.counts["failed"] == 1 and http.session.error is None
    assert template.num_chars < 100_000


async def test_sessions_are_managed_with_the_control_token():
    closed: list[list[Rollout]] = []
    client = ScriptedClient(lambda request: "x")
    async with served(
        client, control_token="secret", on_closed=lambda session, rollouts: closed.append(rollouts)
    ) as http:
        assert (await http.post("/sessions", {}))[0] == 403
        control = {"X-Ludic-Control-Token": "secret"}
        status, opened = await http.post("/sessions", {"max_calls": 1, "seed": 3}, **control)
        assert status == 200 and opened["base_url"] == f"{http.gateway.url}/v1"
        _, answer = await http.post(*PATHS["chat"], Authorization=f"Bearer {opened['api_key']}")
        place = f"/sessions/{opened['id']}"
        for value in ("high", 1e300, 10**400):
            assert (await http.post(f"{place}/reward", {"value": value}, **control))[0] == 400
            assert (await http.post(f"{place}/reward", {"calls": {answer["id"]: value}}, **control))[0] == 400
        assert (await http.post(f"{place}/reward", {"calls": {"chatcmpl-1": 1}}, **control))[0] == 400
        reward = {"value": 0.5, "components": {"format": 0.25}, "calls": {answer["id"]: 2}}
        assert (await http.post(f"{place}/reward", reward, **control))[0] == 200
        async with http.http.get(f"{http.gateway.url}{place}", headers=control) as shown:
            assert [call["kind"] for call in (await shown.json())["calls"]] == ["new"]
        status, summary = await http.post(f"{place}/close", {}, **control)
        assert status == 200 and summary["rollouts"] == 1
        assert (await http.post(f"{place}/close", {}, **control))[0] == 404
    [[rollout]] = closed
    assert rollout.total_reward == 2.75


async def test_idle_sessions_expire_and_are_kept_if_they_have_a_reward():
    closed: list[str] = []
    control = {"X-Ludic-Control-Token": "secret"}
    async with served(
        ScriptedClient(lambda request: "x"),
        control_token="secret",
        on_closed=lambda session, _: closed.append(session.id),
    ) as http:
        opened = [(await http.post("/sessions", {}, **control))[1] for _ in range(3)]
        for session in opened:
            await http.post(*PATHS["chat"], Authorization=f"Bearer {session['api_key']}")
        for number in (0, 2):
            await http.post(f"/sessions/{opened[number]['id']}/reward", {"value": 1}, **control)
        for session in opened:
            http.gateway._sessions[session["api_key"]].last_used -= 1000.0
        await http.post(*PATHS["chat"], Authorization=f"Bearer {opened[2]['api_key']}")
        http.gateway.close_idle(500.0)
        assert closed == [opened[0]["id"]], "the second has no reward, the third was used"
        async with http.http.get(f"{http.gateway.url}/health") as health:
            assert await health.json() == {"status": "ok", "sessions": 2, "expired": 2}
        status, _ = await http.post(*PATHS["chat"], Authorization=f"Bearer {opened[0]['api_key']}")
        assert status == 401
        http.gateway.close_idle(0.0)
        assert closed[1:] == [opened[2]["id"]] and not http.session.is_closed, "that one was not opened by a request"


async def test_expired_sessions_are_looked_for():
    async with served(ScriptedClient([]), control_token="secret", max_idle_s=0.05) as http:
        await http.post("/sessions", {}, **{"X-Ludic-Control-Token": "secret"})
        async with asyncio.timeout(30):
            while http.gateway.num_sessions > 1:
                await asyncio.sleep(0.02)


async def test_a_session_with_a_call_in_progress_is_not_idle():
    client = SlowClient()
    async with served(client) as http:
        asked = asyncio.create_task(http.post(*PATHS["chat"]))
        await client.began.wait()
        http.session.last_used -= 1000.0
        assert http.session.idle_s == 0.0
        client.go.set()
        await asked


async def test_without_a_control_token_sessions_cannot_be_managed():
    async with served(ScriptedClient([])) as http:
        assert (await http.post("/sessions", {}, **{"X-Ludic-Control-Token": ""}))[0] == 403


async def test_a_session_that_forks_often_is_warned_about_with_the_difference(caplog):
    async with served(ScriptedClient(lambda request: "x")) as http:
        await http.post(*PATHS["chat"])
        messages = [
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "y"},
            {"role": "user", "content": "?"},
        ]
        await http.post("/v1/chat/completions", {"messages": messages})
        http.gateway.close_session(http.session)
    assert "1 of 2 calls of a session forked" in caplog.text
    assert "message 1: recorded 'assistant: x', sent 'assistant: y'" in caplog.text


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Origin": "https://evil.example"}])
async def test_web_pages_reach_no_gateway_without_a_control_token(headers: dict[str, str]):
    for token, expected in ((None, 403), ("secret", 200)):
        async with (
            served(ScriptedClient(lambda request: "x"), control_token=token) as http,
            http.http.get(f"{http.gateway.url}/health", headers=headers) as answer,
        ):
            assert answer.status == expected
