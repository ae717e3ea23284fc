"""What the gateway costs: model calls per second of one core, and the time that it adds to a call.

The model answers at once, so only the gateway's own work is measured: HTTP, a dialect, where the request attaches, token-exact
continuation, the reply. The load comes from another process, over plain sockets; every conversation is a session. The floor is a
server of the same kind that reads the JSON and answers a constant. A call's time is that of one client alone, less that of
calling the model directly.

    .venv/bin/python benchmarks/gateway.py [--sessions 400] [--turns 8] [--rounds 2] [--profile]
"""

import argparse
import asyncio
import cProfile
import json
import multiprocessing
import os
import pstats
import time
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np
from aiohttp import web

from ludic.inference import ByteTemplate, ReturnSpec, SamplingParams
from ludic.types import ChatResponse, Info, TokenCompletionRequest, VersionRun
from ludic_serve.gateway.server import Gateway
from ludic_serve.gateway.session import Policy

QUESTION = "What is the capital of France? Answer in one word, and say nothing else."
ANSWER = "Paris, I think."
CONCURRENCY = 32


class InstantModel:
    """One answer, at once."""

    _IDS = np.append(ByteTemplate().encode(ANSWER), np.int32(ByteTemplate.END))
    _LOGPROBS = np.zeros(len(_IDS), np.float32)
    _RUNS = (VersionRun(0, len(_IDS)),)

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        response = ChatResponse(
            text=ANSWER,
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=self._IDS,
            completion_logprobs=self._LOGPROBS,
            finish_reason="stop",
            version_runs=self._RUNS,
        )
        return response, {}

    def sync_weights(self, params: Any, *, timeout_s: float = 600.0, version: str | int | None = None) -> str:
        raise RuntimeError("no weights")


# --- the server, in another process ---


async def serve(pipe: Connection, kind: str, num_sessions: int, with_profile: bool) -> None:
    """Serve until the parent says so; then send the processor time that the calls took."""
    keys = ["none"]
    gateway = floor = None
    if kind == "gateway":
        policy = Policy(client=InstantModel(), chat_template=ByteTemplate(), model="m")
        gateway = Gateway({"policy": policy})
        await gateway.start()
        keys = [gateway.open_session(sampling_seed=0).api_key for _ in range(num_sessions)]
        address = gateway.url
    else:
        floor = web.AppRunner(constant_server())
        await floor.setup()
        site = web.TCPSite(floor, "127.0.0.1", 0)
        await site.start()
        address = f"http://127.0.0.1:{floor.addresses[0][1]}"
    profile = cProfile.Profile()
    pipe.send((address, keys))
    if with_profile:
        profile.enable()
    began = time.process_time()
    await asyncio.to_thread(pipe.recv)
    pipe.send(time.process_time() - began)
    if with_profile:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        pstats.Stats(profile).sort_stats("cumtime").print_stats(40)
    if gateway is not None:
        await gateway.close()
    if floor is not None:
        await floor.cleanup()


def constant_server() -> web.Application:
    constant = {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "usage": {"prompt_tokens": 1},
        "choices": [{"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}],
    }  # fmt: skip

    async def answer(request: web.Request) -> web.Response:
        json.loads(await request.read())
        return web.Response(body=json.dumps(constant).encode(), content_type="application/json")

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    return app


def serve_in_process(*args: Any) -> None:
    asyncio.run(serve(*args))


# --- the load ---


class Wire:
    """One connection: writes a request, reads the answer, knows nothing else of HTTP."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def post(self, path: str, key: str, body: Any) -> bytes:
        data = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n"
        )
        self._writer.write(head.encode() + data)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        lowered = answer.lower()
        if b"chunked" in lowered:
            raw = await self._reader.readuntil(b"0\r\n\r\n")
        else:
            length = int(lowered.partition(b"content-length:")[2].partition(b"\r\n")[0])
            raw = await self._reader.readexactly(length)
        if not answer.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{answer!r} {raw!r}")
        return raw


async def connect(address: str) -> Wire:
    host, _, port = address.removeprefix("http://").partition(":")
    return Wire(*await asyncio.open_connection(host, int(port), limit=2**22))


def chat(history: list[Any], raw: bytes) -> None:
    history.append(json.loads(raw)["choices"][0]["message"])


def responses(history: list[Any], raw: bytes) -> None:
    history.extend(json.loads(raw)["output"])


def messages(history: list[Any], raw: bytes) -> None:
    history.append({"role": "assistant", "content": json.loads(raw)["content"]})


def streamed(history: list[Any], raw: bytes) -> None:
    history.append({"role": "assistant", "content": ANSWER})


KINDS: dict[str, tuple[str, dict[str, Any], str, Any]] = {
    "chat": ("/v1/chat/completions", {}, "messages", chat),
    "chat, streamed": ("/v1/chat/completions", {"stream": True}, "messages", streamed),
    "responses": ("/v1/responses", {}, "input", responses),
    "messages": ("/v1/messages", {"max_tokens": 100}, "messages", messages),
}


async def converse(wire: Wire, key: str, kind: str, turns: int, took: list[float] | None = None) -> None:
    """One session: each turn sends the whole history, as clients do."""
    path, more, field, take = KINDS[kind]
    history: list[Any] = []
    for _ in range(turns):
        history.append({"role": "user", "content": QUESTION})
        began = time.perf_counter()
        raw = await wire.post(path, key, {"model": "policy", field: history, **more})
        if took is not None:
            took.append(time.perf_counter() - began)
        take(history, raw)


def measure(server: str, kind: str, args: argparse.Namespace, with_profile: bool = False) -> tuple[float, float, float]:
    """Calls per second of the server's processor time, calls per second of the clock, and the median time of a call alone."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    num_alone = 30
    num_sessions = args.sessions + num_alone
    process = multiprocessing.get_context("spawn").Process(
        target=serve_in_process, args=(theirs, server, num_sessions, with_profile)
    )
    process.start()
    address, keys = ours.recv()
    keys = keys * num_sessions if len(keys) == 1 else keys

    async def load() -> tuple[float, list[float]]:
        took: list[float] = []
        wire = await connect(address)
        for key in keys[args.sessions : num_sessions]:
            await converse(wire, key, kind, args.turns, took)
        waiting = iter(keys[: args.sessions])
        began = time.perf_counter()

        async def worker() -> None:
            own = await connect(address)
            for key in waiting:
                await converse(own, key, kind, args.turns)

        await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))
        return time.perf_counter() - began, took

    wall_s, took = asyncio.run(load())
    ours.send("stop")
    cpu_s = ours.recv()
    process.join()
    num_calls = num_sessions * args.turns
    return num_calls / cpu_s, args.sessions * args.turns / wall_s, median(took)


def directly() -> float:
    """The median time of calling the model without a gateway."""
    model, prompt = InstantModel(), ByteTemplate().apply([{"role": "user", "content": QUESTION}]).prompt_token_ids
    took = []

    async def run() -> None:
        for seed in range(1000):
            began = time.perf_counter()
            request = TokenCompletionRequest(
                model="m",
                prompt_token_ids=prompt,
                seed=seed,
                sampling=SamplingParams(max_tokens=100),
                return_=ReturnSpec.for_rl(),
            )
            await model.complete_tokens(request)
            took.append(time.perf_counter() - began)

    asyncio.run(run())
    return median(took)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=400)
    parser.add_argument("--turns", type=int, default=8, help="calls of a session")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--profile", action="store_true", help="profile the server during chat calls, and nothing else")
    args = parser.parse_args()
    if args.profile:
        measure("gateway", args.only or "chat", args, with_profile=True)
        return
    direct_s = directly()
    print(f"{os.cpu_count()} cores, {args.sessions} sessions of {args.turns} calls, {CONCURRENCY} at a time")
    print("| | calls/s of one core | of the floor | calls/s (clock) | ms added to a call | floor |")
    print("|---|---|---|---|---|---|")
    for _ in range(args.rounds):
        for kind in [args.only] if args.only else KINDS:
            floor = measure("constant", "chat", args)
            ours = measure("gateway", kind, args)
            print(
                f"| {kind} | {ours[0]:,.0f} | {ours[0] / floor[0]:.2f} | {ours[1]:,.0f} "
                f"| {1e3 * (ours[2] - direct_s):.2f} | {1e3 * (floor[2] - direct_s):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
