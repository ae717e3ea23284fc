"""Overhead of VLLMChatClient over plain aiohttp: the same requests, 256 at a time, in one run, in alternating rounds.

Two servers. A real vLLM on this machine with a tiny model, as in a run. And one that returns the same stored
response at once, so that only the client is measured: the hardest case. "client CPU" is this process's own time per
request. Plain aiohttp posts the same bodies and decodes the JSON, and does nothing else: no retries, no deadline, no arrays.

    OMP_NUM_THREADS=1 .venv/bin/python research/experiments/vllm.py [--concurrency 256] [--rounds 5] [--url http://… --model NAME]
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from ludic.inference import VLLMChatClient
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_vllm.wire import GENERATE, generate_body

PROMPT_TOKENS, NEW_TOKENS = 64, 32

Complete = Callable[[TokenCompletionRequest], Awaitable[object]]


@dataclass
class Timing:
    """Of each round, per request."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_us: list[float] = field(default_factory=list)


def some_requests(number: int, model: str, vocabulary: int) -> list[TokenCompletionRequest]:
    prompts = np.random.default_rng(0).integers(5, vocabulary, size=(number, PROMPT_TOKENS)).astype(np.int32)
    sampling = SamplingParams(temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    return [
        TokenCompletionRequest(
            model=model, prompt_token_ids=prompt, sampling=sampling, return_=ReturnSpec.for_rl(), seed=seed
        )
        for seed, prompt in enumerate(prompts)
    ]


async def measure(complete: Complete, requests: list[TokenCompletionRequest], concurrency: int, into: Timing) -> None:
    """`concurrency` workers share the requests, each waiting for one answer after the other."""
    waiting = iter(requests)

    async def worker() -> None:
        for request in waiting:
            await complete(request)

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    into.wall_ms.append((time.perf_counter() - wall) / len(requests) * 1e3)
    into.cpu_us.append((time.process_time() - cpu) / len(requests) * 1e6)


async def compare(
    url: str, requests: list[TokenCompletionRequest], concurrency: int, rounds: int
) -> tuple[Timing, Timing]:
    """(plain aiohttp, VLLMChatClient)."""
    plain_timing, our_timing = Timing(), Timing()
    client = VLLMChatClient(servers=[url], connection_timeout_s=0)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def plain(request: TokenCompletionRequest) -> object:
            async with session.post(url + GENERATE, json=generate_body(request)) as response:
                assert response.status == 200, await response.text()
                return await response.json()

        for complete in (plain, client.complete_tokens):  # warm up connections, caches and the probe of the server
            await measure(complete, requests[: 2 * concurrency], concurrency, Timing())
        for number in range(rounds):
            pairs = [(plain, plain_timing), (client.complete_tokens, our_timing)]
            for complete, timing in pairs if number % 2 == 0 else reversed(pairs):
                await measure(complete, requests, concurrency, timing)
    await client.close()
    return plain_timing, our_timing


def report(name: str, plain: Timing, ours: Timing, concurrency: int) -> None:
    wall, cpu = statistics.median(ours.wall_ms), statistics.median(ours.cpu_us)
    plain_wall, plain_cpu = statistics.median(plain.wall_ms), statistics.median(plain.cpu_us)
    ratios = [mine / other for mine, other in zip(ours.wall_ms, plain.wall_ms, strict=True)]
    print(
        f"{name:22} {concurrency:11d} {1e3 / plain_wall:12,.0f} {1e3 / wall:12,.0f} {wall / plain_wall:8.3f} "
        f"({min(ratios):.2f}–{max(ratios):.2f}) {plain_cpu:10.0f} {cpu:8.0f} {cpu / plain_cpu:7.2f}"
    )


async def serve_stored_answers() -> None:
    """Runs in a separate process, whose first line is the address."""
    from aiohttp import web

    def answer(number: int, logprob: float) -> bytes:
        top = {"token": "x", "logprob": logprob, "bytes": [120]}
        choice = {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "text": "x" * number,
            "token_ids": list(range(number)),
            "logprobs": {"content": [{**top, "top_logprobs": [top]}] * number},
            "weight_versions": [{"version": "3", "start": 0, "end": number}],
            "sampling_mask": None,
            "routed_experts": None,
        }
        return json.dumps({"request_id": "generate-tokens-0", "choices": [choice], "usage": None}).encode()

    probed, whole = answer(1, 0.0), answer(NEW_TOKENS, -0.5)

    async def generate(request: web.Request) -> web.Response:
        is_probe = b'"max_tokens":1,' in await request.read()
        return web.Response(body=probed if is_probe else whole, content_type="application/json")

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny", "max_model_len": 4096}], "weight_version": "3"})

    app = web.Application()
    app.router.add_post(GENERATE, generate)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/weight_info", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


@contextmanager
def stored_answers() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, __file__, "--stored-answers"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


@contextmanager
def real_server() -> Iterator[tuple[str, int]]:
    """A tiny Llama on vLLM: (address, vocabulary)."""
    from ludic.models.loading import character_tokenizer, tiny_llama
    from ludic_vllm.vllm_server import start_vllm_server, wait_for_vllm_health

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = character_tokenizer()
        tiny_llama(len(tokenizer), width=64, layers=2, heads=2, max_length=512).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        process = start_vllm_server(
            folder,
            port=0,
            stream_output=False,
            extra_args=["--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--served-model-name", "tiny"],
            run_folder=Path(folder) / "run",
            environment={"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        try:
            wait_for_vllm_health(process.command.host, process.command.port, process)
            yield process.url, len(tokenizer)
        finally:
            process.stop()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--concurrency", type=int, default=256)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--url", help="a server of your own instead of a tiny one")
    arguments.add_argument("--model", default="tiny", help="its model's name")
    arguments.add_argument("--json", type=Path, help="also write the rounds there")
    arguments.add_argument("--stored-answers", action="store_true", help=argparse.SUPPRESS)
    options = arguments.parse_args()
    # Python searches this folder first, and this file is named like the vllm package.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
    if options.stored_answers:
        asyncio.run(serve_stored_answers())
    print(
        f"{PROMPT_TOKENS} prompt tokens, {NEW_TOKENS} new ones with log-probs; medians of {options.rounds} rounds each"
    )
    print(
        f"{'server':22} {'concurrency':>11} {'plain req/s':>12} {'ours req/s':>12} {'wall ours/plain':>20} "
        f"{'client CPU µs':>10} {'ours':>8} {'ratio':>7}"
    )
    rounds = {}

    def run(name: str, url: str, vocabulary: int, number: int) -> None:
        requests = some_requests(number, options.model, vocabulary)
        plain, ours = asyncio.run(compare(url, requests, options.concurrency, options.rounds))
        report(name, plain, ours, options.concurrency)
        rounds[name] = {"plain": vars(plain), "ours": vars(ours)}

    with stored_answers() as url:
        run("stored answers", url, 90, 8 * options.concurrency)
    if options.url:
        run("the one given", options.url.rstrip("/"), 90, 2 * options.concurrency)
    else:
        with real_server() as (url, vocabulary):
            run("vLLM, tiny model, CPU", url, vocabulary, 2 * options.concurrency)
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


if __name__ == "__main__":
    main()
