"""What the HTTP server refuses to hold, and whom it does not wait for."""

import asyncio
import contextlib
import gzip
import json
import socket
import tracemalloc
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from ludic.http.app import ServerLimits
from ludic.inference import ByteTemplate
from ludic.types import ChatResponse, ConfigError, PromptTooLong
from ludic_serve.request import check_prompt
from plugins.serve.tests.test_server import HELLO, TOOL, Reciting, serving, until

pytestmark = pytest.mark.slow

JSON_TYPE = {"Content-Type": "application/json"}


class Waiting(Reciting):
    """Says its text when it is told to, and counts what it was asked."""

    def __init__(self, text: str = "3", *, is_open: bool = True) -> None:
        super().__init__(text)
        self.num_asked = 0
        self.num_running = 0
        self.gate = asyncio.Event()
        if is_open:
            self.gate.set()

    async def complete_tokens(self, request: Any) -> tuple[ChatResponse, dict[str, Any]]:
        self.num_asked += 1
        self.num_running += 1
        try:
            await self.gate.wait()
            return await super().complete_tokens(request)
        finally:
            self.num_running -= 1


async def post(address: str, body: Any, path: str = "completions", **options: Any) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session:
        url = f"{address}/v1/{path}"
        async with session.post(
            url, data=data, headers={**JSON_TYPE, **options.pop("headers", {})}, **options
        ) as answer:
            return answer.status, await answer.json()


@contextlib.asynccontextmanager
async def connected(address: str, *pieces: bytes) -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which this much was sent, and nothing more will be."""
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
        yield reader
    finally:
        writer.close()


async def what_comes(reader: asyncio.StreamReader) -> bytes:
    """Up to the end of the connection, which must come."""
    async with asyncio.timeout(30):
        with contextlib.suppress(ConnectionResetError):
            return await reader.read()
    return b""


def head(length: int | str, path: str = "completions") -> bytes:
    size = f"Content-Length: {length}" if isinstance(length, int) else length
    return f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{size}\r\n\r\n".encode()


async def post_and_measure(address: str, body: bytes) -> tuple[int, Any, int]:
    """Status, answer, and the most memory that Python held meanwhile."""
    tracemalloc.start()
    try:
        return *await post(address, body), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# --- what one body asks for --------------------------------------------------------------------------------------


async def test_a_fan_out_of_millions_is_refused_before_anything_is_built():
    engine = Waiting()
    body = json.dumps({"prompt": ["a"] * 20_000, "n": 128}).encode()
    async with serving(engine) as address:
        status, answer, peak = await post_and_measure(address, body)
    assert status == 400 and "20000 prompts with n=128 are 2560000 completions" in answer["error"]["message"]
    assert engine.num_asked == 0 and peak < 20 * 2**20, f"{peak / 2**20:.0f} MB"


def nested(depth: int) -> Any:
    """A value that is this many lists within each other."""
    value: Any = []
    for _ in range(depth - 1):
        value = [value]
    return value


def message(content: str = "x") -> dict[str, Any]:
    return {"role": "user", "content": content}


AT_THE_LIMIT: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("completions", {"prompt": ["a"] * 8, "n": 128}, {"prompt": ["a"] * 9, "n": 128}, "1152 completions"),
    ("completions", {"prompt": ["a"] * 1024}, {"prompt": ["a"] * 1025}, "1025 completions"),
    ("completions", {"prompt": [[1]] * 1024}, {"prompt": [[1]] * 1025}, "1025 completions"),
    ("completions", {"n": 128}, {"n": 129}, "n: Expected `int` <= 128"),
    ("completions", {"prompt": [1] * 1000}, {"prompt": [1] * 1001}, "limit is 1000"),
    ("completions", {"stop": ["x"] * 32}, {"stop": ["x"] * 33}, "at most 32 texts"),
    ("completions", {"stop": "x" * 256}, {"stop": "x" * 257}, "1 to 256 characters"),
    ("completions", {"stop_token_ids": [1] * 1024}, {"stop_token_ids": [1] * 1025}, "at most 1024 token ids"),
    ("completions", {"logit_bias": {}}, {"logit_bias": {"1": 0}}, "logit_bias"),
    ("completions", {"temperature": 0.001}, {"temperature": 0.0009}, "temperature=0.0009; it must be 0"),
    ("completions", {"temperature": 1e6}, {"temperature": 1.1e6}, "at most 1e6"),
    ("completions", {"top_p": 5e-324}, {"top_p": 0}, "top_p=0.0; it must be above 0"),
    ("completions", {"top_p": 1}, {"top_p": 1.001}, "top_p=1.001"),
    ("completions", {"top_k": 2**31 - 1}, {"top_k": 2**31}, "top_k=2147483648"),
    ("completions", {"top_k": -1}, {"top_k": -2}, "top_k=-2"),
    ("completions", {"min_p": 0.999}, {"min_p": 1}, "min_p=1.0; it must be at least 0 and below 1"),
    ("completions", {"repetition_penalty": 0.01}, {"repetition_penalty": 1e-300}, "between 0.01 and 100"),
    ("completions", {"repetition_penalty": 100}, {"repetition_penalty": 100.5}, "between 0.01 and 100"),
    ("completions", {"presence_penalty": -2}, {"presence_penalty": -2.1}, "between -2 and 2"),
    ("completions", {"frequency_penalty": 2}, {"frequency_penalty": 2.1}, "between -2 and 2"),
    ("completions", {"min_tokens": 16}, {"min_tokens": 17}, "between 0 and max_tokens=16"),
    ("completions", {"max_tokens": 1}, {"max_tokens": 0}, "max_tokens=0"),
    ("completions", {"seed": -(2**63) + 1}, {"seed": -(2**63)}, "seed: Expected `int` >= -9223372036854775807"),
    ("completions", {"logprobs": 1}, {"logprobs": 2}, "0 or 1"),
    ("completions", {"metadata": nested(31)}, {"metadata": nested(32)}, "more than 32 levels"),
    ("completions", {"metadata": nested(31)}, {"metadata": nested(900)}, "more than 32 levels"),
    ("chat/completions", {"messages": [message()] * 200}, {"messages": [message()] * 4097}, "may have 4096"),
    ("chat/completions", {"tools": [TOOL] * 4}, {"tools": [TOOL] * 257}, "may have 256"),
    ("chat/completions", {}, {"messages": [message("x" * 10**6)]}, "only the first 32768 of its 10000"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "good", "bad", "why"), AT_THE_LIMIT, ids=[f"{next(iter(b))} {w[:20]}" for *_, b, w in AT_THE_LIMIT]
)
async def test_a_request_at_a_limit_is_served_and_one_beyond_it_is_told_the_limit(path, good, bad, why):
    engine = Waiting()
    base = {"prompt": "a"} if path == "completions" else {"messages": HELLO}
    engine.max_total_tokens = 1000 if path == "completions" else 10_000
    async with serving(engine) as address:
        status, answer = await post(address, {**base, **good}, path)
        assert status == 200, answer
        asked = engine.num_asked
        status, answer = await post(address, {**base, **bad}, path)
    assert status == 400 and why in answer["error"]["message"] and engine.num_asked == asked
    assert len(answer["error"]["message"]) < 500


def test_the_length_of_a_prompt_is_that_of_its_texts_and_not_of_their_json():
    template = ByteTemplate()
    check_prompt(template, [message("\n" * 17_000)], [], room=1100)  # 34,000 characters of JSON
    with pytest.raises(PromptTooLong, match=r"That counts only the first 2\d{3} of its 2\d{3} characters"):
        check_prompt(template, [message("Hi")], [{"enum": {"x" * 2000: 1}}], room=100)


@pytest.mark.parametrize("values", [b"1", b"[]", b'"a"'])
async def test_a_body_of_millions_of_values_is_refused_before_it_is_parsed(values):
    body = b'{"prompt": [' + (values + b",") * (2**20 + 1) + values + b"]}"
    async with serving(Waiting()) as address:
        status, answer, peak = await post_and_measure(address, body)
    assert status == 400 and "more than 1048576 values" in answer["error"]["message"]
    assert peak < 4 * len(body) + 2**20, "the body as it was sent, received and put together"


@pytest.mark.parametrize("name", ["x" * 10**6, "temperatur" * 10**5, "\U0001f600" * 10**5], ids=lambda name: name[:12])
async def test_an_unknown_field_or_model_with_a_huge_name_costs_nothing(name):
    async with serving(Waiting()) as address:
        async with asyncio.timeout(20):
            assert (await post(address, {"prompt": "a", name: 1}))[0] == 400
            status, answer = await post(address, {"prompt": "a", "model": name})
    assert status == 404 and len(answer["error"]["message"]) < 300


# --- bodies that do not come as they should ----------------------------------------------------------------------

HONEST = json.dumps({"prompt": "a"}).encode()
BROKEN_BODIES: list[tuple[bytes, bytes]] = [
    (head("Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n", b" 400 "),
    (head("Transfer-Encoding: chunked") + b"5\r\n{}\r\n0\r\n\r\n", b" 400 "),
    (head(10) + HONEST, b" 400 "),
    (head("Content-Length: -5") + HONEST, b" 400 "),
    (head("Content-Length: 5\r\nContent-Length: 6") + HONEST, b" 400 "),
    (head(f"Content-Length: {10**12}") + HONEST, b" 413 "),
    (head("Content-Encoding: gzip\r\nContent-Length: 15") + HONEST, b" 400 "),
    (b"POST /v1/completions HTTP/9.9\r\n\r\n", b" 400 "),
    (b"\x16\x03\x01" + bytes(200), b" 400 "),
]


@pytest.mark.parametrize(("sent", "status"), BROKEN_BODIES, ids=[str(sent[70:110]) for sent, _ in BROKEN_BODIES])
async def test_a_body_that_is_not_what_its_head_says_is_a_bad_request(sent, status, caplog):
    engine = Waiting()
    async with serving(engine, limits=ServerLimits(head_s=0.3, body_s=0.3)) as address:
        async with connected(address, sent) as reader:
            assert status in (await what_comes(reader)).split(b"\r\n")[0]
        assert (await post(address, HONEST))[0] == 200
    assert engine.num_asked == 1 and "Traceback" not in caplog.text


async def test_a_compressed_body_counts_with_what_it_is_uncompressed():
    engine = Waiting()
    async with serving(engine, limits=ServerLimits(max_body_bytes=10_000)) as address:
        packed = {"Content-Encoding": "gzip"}
        bomb = gzip.compress(json.dumps({"prompt": "a" * 10**6}).encode())
        assert len(bomb) < 5000 and (await post(address, bomb, headers=packed))[0] == 413
        assert (await post(address, gzip.compress(HONEST), headers=packed))[0] == 200
    assert engine.num_asked == 1


# --- clients that take their time --------------------------------------------------------------------------------


async def test_connections_that_send_no_request_are_closed_and_those_that_wait_for_an_answer_are_not():
    engine = Waiting(is_open=False)
    async with serving(engine, limits=ServerLimits(head_s=0.3)) as address, contextlib.AsyncExitStack() as stack:
        asking = asyncio.create_task(post(address, HONEST))
        beginnings = [b"", b"POST /v1/compl", head(15)[:-2], b"GET /health HTTP/1.1\r\nHost: localhost\r\n"]
        silent = [await stack.enter_async_context(connected(address, b)) for b in beginnings * 10]
        # One that was answered and then says nothing, or half of the next request.
        asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        silent += [await stack.enter_async_context(connected(address, asked, b)) for b in (b"", b"GET /hea")]
        ends = await asyncio.gather(*map(what_comes, silent))
        assert all(b" 200 OK" not in end for end in ends[:-2]) and all(b" 200 OK" in end for end in ends[-2:])
        assert not asking.done(), "longer than a head may take"
        engine.gate.set()
        assert (await asking)[0] == 200


async def test_a_body_that_does_not_come_is_a_timeout():
    engine = Waiting()
    async with serving(engine, limits=ServerLimits(body_s=0.2)) as address:
        async with connected(address, head(100), b'{"prompt": "') as reader:
            answer = await what_comes(reader)
        assert answer.startswith(b"HTTP/1.1 408 ") and b"did not arrive within 0.2 s" in answer
    assert engine.num_asked == 0


class Verbose(Waiting):
    """One token, and more text than the buffers of sockets hold."""

    async def complete_tokens(self, request: Any) -> tuple[ChatResponse, dict[str, Any]]:
        response, info = await super().complete_tokens(request)
        response.text = "x" * 30_000_000
        return response, info


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_does_not_read_is_disconnected(stream):
    body = json.dumps({"prompt": "a", "stream": stream}).encode()
    async with serving(Verbose(), limits=ServerLimits(answer_s=0.3)) as address:
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head(len(body)) + body)

            async def is_gone() -> bool:
                async with aiohttp.ClientSession() as session, session.get(f"{address}/metrics") as answer:
                    return 'path="/v1/completions",status="499"} 1' in await answer.text()

            async with asyncio.timeout(60):
                while not await is_gone():
                    await asyncio.sleep(0.05)


# --- many at once ------------------------------------------------------------------------------------------------


async def test_connections_beyond_the_limit_are_told_so_and_served_when_there_is_room():
    async with serving(Waiting(), limits=ServerLimits(max_connections=3)) as address:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(3):
                await stack.enter_async_context(connected(address))
            await asyncio.sleep(0.05)
            for _ in range(5):
                async with connected(address) as reader:
                    answer = await what_comes(reader)
                assert answer.startswith(b"HTTP/1.1 503 ") and b"3 connections are already open" in answer
        for _ in range(100):  # the server hears of the closed ones a moment later
            with contextlib.suppress(aiohttp.ClientError):
                if (await post(address, HONEST))[0] == 200:
                    return
            await asyncio.sleep(0.05)
        raise AssertionError("there is room again, but it is not given")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("limits", [{"max_completions": 3}, {"max_prompt_tokens": 9}], ids=str)
async def test_completions_beyond_the_limit_are_refused_while_others_are_in_progress(limits, stream):
    engine = Waiting(is_open=False)
    body = {"prompt": [1, 2, 3], "n": 2, "stream": stream}
    async with serving(engine, limits=ServerLimits(**limits)) as address:
        first = asyncio.create_task(post(address, {**body, "stream": False}))
        await until(lambda: engine.num_running == 2)
        status, answer = await post(address, body)
        assert (status, answer["error"]["code"]) == (429, "queue_full") and "busy" in answer["error"]["message"]
        assert (await post(address, {**body, "n": 4}))[0] == 429 and engine.num_asked == 2
        engine.gate.set()
        assert (await first)[0] == 200
        assert (await post(address, {**body, "stream": False}))[0] == 200, "what has ended counts no more"


async def test_bodies_that_are_too_large_together_are_refused_and_forgotten():
    limits = ServerLimits(max_body_bytes_in_all=1000, body_s=30)
    async with serving(Waiting(), limits=limits) as address:
        async with connected(address, head(900), b" " * 800):
            await asyncio.sleep(0.1)
            status, answer = await post(address, b" " * 400 + HONEST)
            assert status == 429 and "busy" in answer["error"]["message"]
            assert (await post(address, HONEST))[0] == 200
        for _ in range(100):
            if (await post(address, b" " * 400 + HONEST))[0] == 200:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the body of a client that has gone still counts")


@pytest.mark.parametrize("name", ["max_connections", "head_s", "max_completions"])
def test_limits_must_be_positive(name):
    with pytest.raises(ConfigError, match=rf"ServerLimits\.{name}=0"):
        replace(ServerLimits(), **{name: 0})
