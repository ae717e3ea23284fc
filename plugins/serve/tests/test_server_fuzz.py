"""Random requests against one real server: it lives, blames itself for nothing, and answers honest clients as if they were alone.

Every field of every endpoint gets extreme values, wrong types and values at its limits, alone and in combinations; bodies are
cut, bent and sent with wrong heads; clients leave in the middle. `--fuzz-cases 5000` tries more.
"""

import asyncio
import json
import logging
import platform
import re
from random import Random
from typing import Any

import aiohttp
import numpy as np
import pytest

from ludic.http.app import ServerLimits
from ludic.inference.local import LocalEngine
from plugins.serve.tests.test_server import TOKENIZER, TOOL, serving, tiny_model
from tests.fuzz import Fuzz

pytestmark = pytest.mark.slow

LIMITS = ServerLimits(max_completions=96, max_body_bytes=200_000, head_s=20, body_s=2)
LENGTH = 96
PROMPT = TOKENIZER("The quick brown fox")["input_ids"]
EXACT = platform.machine() == "aarch64"
"""Whether logits do not depend on the batch at all (docs/engine.md); elsewhere they are equal up to rounding."""


@pytest.fixture(scope="module")
def engine():
    engine = LocalEngine(tiny_model(), TOKENIZER, max_sequences=48, max_model_len=LENGTH, kv_tokens=8000)
    yield engine
    engine.close()


# --- honest requests ---------------------------------------------------------------------------------------------

HONEST: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 1}),
    ("/v1/completions", {"prompt": "Another", "temperature": 0.9, "top_p": 0.9, "seed": 5, "max_tokens": 12, "logprobs": 0}),
    ("/v1/completions", {"prompt": [PROMPT, [7]], "n": 2, "seed": 9, "repetition_penalty": 1.2, "logprobs": 0}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "seed": 3, "max_tokens": 9, "logprobs": True}),
]  # fmt: skip


async def honest_answer(session: aiohttp.ClientSession, number: int) -> tuple[list[Any], np.ndarray[Any, Any]]:
    """Everything that was sampled, and its log-probabilities. A server that is busy is asked again."""
    path, body = HONEST[number]
    patience = aiohttp.ClientTimeout(total=300, sock_connect=None)
    for _ in range(600):
        asked = {**body, "ignore_eos": True, "return_token_ids": True}
        async with session.post(path, json=asked, timeout=patience) as answer:
            found = await answer.json()
            if answer.status != 429:
                break
        await asyncio.sleep(0.05)
    assert answer.status == 200, found
    texts, logprobs = [], []
    for choice in found["choices"]:
        texts.append((choice["token_ids"], choice.get("text"), choice.get("message"), choice["finish_reason"]))
        given = choice["logprobs"]
        logprobs += given.get("token_logprobs") or [entry["logprob"] for entry in given["content"]]
    return texts, np.array(logprobs)


def assert_same(
    found: tuple[list[Any], np.ndarray[Any, Any]], alone: tuple[list[Any], np.ndarray[Any, Any]], at: str
) -> None:
    assert found[0] == alone[0], at
    np.testing.assert_allclose(found[1], alone[1], rtol=0, atol=0 if EXACT else 1e-4, err_msg=at)


# --- other requests ----------------------------------------------------------------------------------------------


class Literal(str):
    """Text that goes into the body as it is."""


def written(value: Any) -> str:
    """JSON, and what some clients take for it."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


NUMBERS = [
    0,
    -0.0,
    1,
    -1,
    2,
    7,
    0.5,
    1e-3,
    1e-50,
    5e-324,
    1e-300,
    1e6,
    1e30,
    1e308,
    -1e308,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63),
]
LITERALS = [
    Literal(text) for text in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 400, "1" * 5000, "0x10", "01", "'a'", "")
]
TEXTS = [
    "",
    " ",
    "x",
    "auto",
    "none",
    "null",
    "\0",
    "\ud800",
    "\udfff\ud800",
    "\U0001f600" * 9,
    "é" * 300,
    "ab" * 5000,
    "<|im_end|>",
]


def nested(depth: int, value: Any) -> Literal:
    return Literal('{"a": [' * depth + json.dumps(value) + "]}" * depth)


def extreme(rng: Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 4)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(LITERALS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice([None, True, False, [], {}, [[]], [{}], [None], {"": None}])
    if kind == 4:
        return nested(rng.choice([1, 14, 15, 17, 100, 450]), rng.choice(TEXTS))
    if kind == 5:
        return [extreme(rng, depth + 1) for _ in range(rng.randrange(4))] * rng.choice([1, 1, 1, 1 if depth else 700])
    return {rng.choice([*TEXTS, *FIELDS]): extreme(rng, depth + 1) for _ in range(rng.randrange(4))}


def some_ids(rng: Random) -> list[int]:
    return [rng.randrange(len(TOKENIZER)) for _ in range(rng.choice([1, 5, 60, LENGTH - 1, LENGTH]))]


def message(rng: Random) -> Any:
    value: dict[str, Any] = {
        "role": rng.choice(["user", "system", "assistant", "tool", "developer", "robot"]),
        "content": rng.choice(["Hi", [{"type": "text", "text": "Hi"}], [], extreme(rng)]),
    }
    if rng.random() < 0.3:
        arguments = rng.choice(["{}", '{"a": 1}', "{", "[" * 5000, '{"a": ' * 200 + "1" + "}" * 200, extreme(rng)])
        call = {
            "id": rng.choice(["1", extreme(rng)]),
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        value["tool_calls"] = rng.choice([[call], [call] * 3, call, extreme(rng)])
    if rng.random() < 0.2:
        value[rng.choice(["name", "tool_call_id", "reasoning_content", "x"])] = extreme(rng)
    return rng.choice([value, value, value, extreme(rng)])


def tool(rng: Random) -> Any:
    function = {"name": rng.choice(["f", extreme(rng)]), "description": extreme(rng), "parameters": extreme(rng)}
    return rng.choice([TOOL, {"type": "function", "function": function}, extreme(rng)])


FIELDS: dict[str, Any] = {
    "temperature": lambda rng: rng.choice([0, 1e-3, 1, 1e6]),
    "top_p": lambda rng: rng.choice([5e-324, 1e-50, 1e-8, 0.5, 1]),
    "top_k": lambda rng: rng.choice([-1, 0, 1, 5, 10**6, 2**31 - 1]),
    "min_p": lambda rng: rng.choice([0, 5e-324, 0.5, 0.999999999999]),
    "repetition_penalty": lambda rng: rng.choice([0.01, 1, 1.3, 100]),
    "frequency_penalty": lambda rng: rng.choice([-2, 0, 2]),
    "presence_penalty": lambda rng: rng.choice([-2, 0, 2]),
    "max_tokens": lambda rng: rng.choice([1, 2, 20, LENGTH]),
    "max_completion_tokens": lambda rng: rng.choice([1, 2, 20, LENGTH]),
    "min_tokens": lambda rng: rng.choice([0, 1, 4, 20]),
    "n": lambda rng: rng.choice([1, 2, 8, 33, 128]),
    "seed": lambda rng: rng.choice([0, -1, 2**62, 2**63 - 1, -(2**63) + 1]),
    "stop": lambda rng: rng.choice(["e", ["e", "the"], ["x"] * 32, "y" * 256]),
    "stop_token_ids": lambda rng: rng.choice([some_ids(rng), list(range(len(TOKENIZER))), [0] * 1024]),
    "ignore_eos": lambda rng: rng.random() < 0.5,
    "logprobs": lambda rng: rng.choice([0, 1, True, False]),
    "top_logprobs": lambda rng: rng.choice([0, 1]),
    "stream": lambda rng: rng.random() < 0.5,
    "stream_options": lambda rng: {"include_usage": rng.random() < 0.5},
    "return_token_ids": lambda rng: rng.random() < 0.5,
    "add_special_tokens": lambda rng: rng.random() < 0.5,
    "model": lambda rng: "tiny",
    "prompt": lambda rng: rng.choice(["a", some_ids(rng), [some_ids(rng) for _ in range(3)], ["a", some_ids(rng)], ["a"] * 90]),
    "messages": lambda rng: [message(rng) for _ in range(rng.choice([0, 1, 1, 2, 3]))],
    "tools": lambda rng: [tool(rng) for _ in range(rng.choice([0, 1, 2]))],
    "tool_choice": lambda rng: rng.choice(["auto", "none", "required", TOOL]),
    **dict.fromkeys(
        ["echo", "best_of", "suffix", "logit_bias", "response_format", "user", "metadata", "prompt_logprobs", "temprature", ""],
        lambda rng: rng.choice([False, 1, {}, {"type": "text"}]),
    ),
}  # fmt: skip


def some_body(rng: Random) -> tuple[str, bytes]:
    """A path and a body: mostly JSON with a few fields that an honest client would not send."""
    path = rng.choice(["/v1/completions", "/v1/chat/completions"])
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Hi"}]}
    body |= {"max_tokens": rng.choice([1, 4])}
    for name in rng.sample(sorted(FIELDS), rng.choice([1, 1, 2, 3, 5])):
        body[name] = extreme(rng) if rng.random() < 0.5 else FIELDS[name](rng)
    text = written(body)
    if rng.random() < 0.05:
        text = text[:-1] + ", " + text[1:]  # every field twice
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.15:
        where = rng.randrange(len(data) + 1)
        data = (
            data[:where]
            + rng.choice([b"", rng.randbytes(3), b"\xff\xfe", b"\0", b"[" * 3000])
            + data[where + rng.randrange(9) :]
        )
    return path, data


# --- sending -----------------------------------------------------------------------------------------------------


async def send(session: aiohttp.ClientSession, rng: Random, at: str) -> int:
    """One request of a client that is careless, hostile or gone; what is answered must blame the client."""
    path, data = some_body(rng)
    if rng.random() < 0.2:
        path = rng.choice(
            [
                "/v1/models",
                "/v1/models/x/y",
                "/health",
                "/metrics",
                "/",
                "/v1",
                "/v1/completions/",
                "/tokenize",
                "/%00%ff",
            ]
        )
    method = rng.choice(["POST"] * 12 + ["GET", "PUT", "DELETE", "HEAD", "OPTIONS", "NONSENSE"])
    headers = {
        "Content-Type": rng.choice(
            ["application/json"] * 9 + ["text/plain", "application/json; charset=utf-7", "", "\x01"]
        )
    }
    headers |= rng.choice(
        [{}] * 9 + [{"Content-Encoding": "gzip"}, {"Authorization": "Bearer \xff"}, {"Expect": "100-continue"}]
    )
    patience = aiohttp.ClientTimeout(total=rng.choice([60] * 9 + [0.01]))
    try:
        async with session.request(method, path, data=data, headers=headers, timeout=patience) as answer:
            raw = await answer.read()
    except (TimeoutError, aiohttp.ClientError, ValueError):  # gone early, or refused by our own client
        return 0
    shown = f"{at}\n{method} {path} {data[:2000]!r}\n{answer.status} {raw[:500]!r}"
    assert answer.status in (200, 400, 404, 405, 408, 413, 417, 429), shown
    if answer.content_type == "application/json" and raw:
        found = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is not JSON: {shown}"))
        if answer.status != 200:
            assert 0 < len(found["error"]["message"]) < 2000, shown
    elif answer.content_type == "text/event-stream":
        for line in filter(None, raw.decode().split("\n")):
            assert line.startswith("data: "), shown
            if line != "data: [DONE]":
                event = json.loads(line[6:])
                assert "error" not in event or event["error"]["type"] != "server_error", shown
    return answer.status


async def send_raw(port: int, rng: Random, at: str) -> None:
    """A head that does not fit its body, or bytes that are no HTTP."""
    path, data = some_body(rng)
    length = rng.choice([len(data), len(data) + 5, max(0, len(data) - 5), 0, -1, 10**9, 10**30, "x", "1, 2"])
    size = rng.choice(
        [f"Content-Length: {length}", "Transfer-Encoding: chunked", "Content-Length: 3\r\nTransfer-Encoding: chunked"]
    )
    raw = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n{size}\r\n\r\n".encode()
        + data
    )
    if rng.random() < 0.3:
        raw = bytearray(raw)
        for _ in range(rng.randrange(1, 9)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(bytes(raw))
        if rng.random() < 0.7:
            writer.write_eof()
        async with asyncio.timeout(LIMITS.body_s + 60):
            answer = await reader.read(4096)
        found = re.match(rb"HTTP/1\.[01] (\d+)", answer)
        assert not answer or (found and found[1][:1] != b"5"), f"{at}\n{bytes(raw)[:2000]!r}\n{answer[:500]!r}"
    except ConnectionError:
        pass
    finally:
        writer.close()


def blame(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_no_request_stops_the_server_or_changes_the_answer_to_another(engine: LocalEngine, fuzz: Fuzz, caplog):
    async with serving(engine, limits=LIMITS) as address:
        port = int(address.rsplit(":", 1)[1])
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(address, connector=connector) as session:
            alone = [await honest_answer(session, number) for number in range(len(HONEST))]
            statuses: list[int] = []
            for case in range(fuzz.cases(40)):
                rng, at = fuzz.rng(case), fuzz.at(case)
                others = [send(session, rng, at) for _ in range(3)]
                honest = honest_answer(session, case % len(HONEST))
                *found, _, answered = await asyncio.gather(*others, send_raw(port, rng, at), honest)
                statuses += found
                assert_same(answered, alone[case % len(HONEST)], at)
                async with session.get("/health") as answer:
                    assert answer.status == 200, f"{at}\n{await answer.text()}"
                assert not blame(caplog), f"{at}\n{blame(caplog)}"
        assert statuses.count(200) > len(statuses) // 40 and statuses.count(400) > len(statuses) // 40, "both are tried"
    assert engine.stats["running"] == engine.stats["waiting"] == engine.stats["kv_blocks_used"] == 0
