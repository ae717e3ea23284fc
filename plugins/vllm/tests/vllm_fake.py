"""A small stand-in for a vLLM server on loopback: both token endpoints, versions, control; and every way of failing.

It "samples" the numbers that follow the last token of the prompt, so a test knows what must come back; or what `reply` says to a
prompt of ByteTemplate, or to the messages of a chat.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
from aiohttp import web

from ludic.inference import ByteTemplate
from ludic.types import ReturnSpec, SamplingParams, TokenCompletionRequest
from ludic_vllm.client import VLLMChatClient

NOT_FOUND = {"detail": "Not Found"}


class FakeVLLM:
    """Change its attributes to change its ways. `faults` holds what happens to the next requests, one by one."""

    def __init__(self, **ways: Any) -> None:
        self.version = "default"
        self.spans: list[tuple[str, int]] = []
        """(version, number of tokens) of the next completions; all of `version` where empty."""
        self.has_generate = self.has_versions = self.is_processed = True
        self.is_old = False
        """Its /inference/v1/generate returns neither text nor versions, as in vLLM 0.26."""
        self.max_model_len: int | None = 512
        self.context = 512
        self.control_token = "right"
        self.faults: list[str] = []
        self.logprob = -0.5
        self.reply: Callable[[str], str] | None = None
        self.delay_s = self.pause_s = 0.0
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.num_probes = self.num_hung_up = self.num_pauses = 0
        self.hanging = asyncio.Event()
        for name, value in ways.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    async def start(self, port: int = 0) -> "FakeVLLM":
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/weight_info", self._weight_info)
        app.router.add_post("/pause", self._pause)
        app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, reuse_address=True).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    # --- endpoints ---

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        if not self.has_generate:
            self.requests.append((request.path, body))
            return _error(403, "Scale-out endpoints are disabled.", "PermissionDeniedError")
        sampling = body["sampling_params"]
        return await self._answer(request, body, body["token_ids"], sampling)

    async def _completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        return await self._answer(request, body, body["prompt"], body)

    async def _answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], sampling: dict[str, Any]
    ) -> web.Response:
        is_probe = len(prompt) == 1 and sampling["max_tokens"] == 1 and sampling["top_k"] == 1
        if is_probe:
            self.num_probes += 1
        else:
            self.requests.append((request.path, body))
            if self.faults:
                return await self._fail(request, self.faults.pop(0))
            await asyncio.sleep(self.delay_s)
        if body["model"] != "fake":
            return _error(404, f"The model `{body['model']}` does not exist. Valid aliases: fake.", "NotFoundError")
        if len(prompt) >= self.context:
            text = f"This model's maximum context length is {self.context} tokens. However, you had {len(prompt)}."
            return _error(400, text, "BadRequestError")
        number = min(sampling["max_tokens"], self.context - len(prompt))
        ids = [prompt[-1] + i + 1 for i in range(number)]
        is_said = self.reply is not None and not is_probe
        if self.reply is not None and is_said:
            ids = list(self.reply(ByteTemplate().decode(prompt)).encode())[:number]
            number = len(ids)
        logprob = 0.0 if is_probe and self.is_processed else self.logprob
        choice = {
            "index": 0,
            "finish_reason": "stop" if is_said else "length",
            "stop_reason": None,
            "text": bytes(ids).decode() if is_said else " ".join(map(str, ids)),
            "token_ids": ids,
        }
        wants_logprobs = sampling.get("logprobs") is not None
        if request.path.startswith("/inference"):
            choice["logprobs"] = {"content": [{"logprob": logprob} for _ in ids]} if wants_logprobs else None
            choice["weight_versions"] = self._weight_versions(number)
            if self.is_old:
                del choice["text"], choice["weight_versions"]
        else:
            choice["logprobs"] = {"token_logprobs": [logprob] * number} if wants_logprobs else None
            choice["prompt_token_ids"] = prompt
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(prompt)}})

    async def _chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append((request.path, body))
        assert self.reply is not None, "a chat needs reply="
        text = self.reply("\n".join(message["content"] for message in body["messages"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 9}})

    async def _fail(self, request: web.Request, fault: str) -> web.Response:
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "hang":
            self.hanging.set()
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.num_hung_up += 1
                raise
        if fault == "abort":
            choice = {"index": 0, "finish_reason": "abort", "token_ids": [1], "text": "1", "logprobs": None}
            return web.json_response({"choices": [choice]})
        if fault == "two":
            return web.json_response({"choices": [{}, {}]})
        if fault == "page":
            return web.Response(text="<html>")
        if fault == "other prompt":
            choice = {"finish_reason": "length", "token_ids": [1], "text": "1", "prompt_token_ids": [9, 9, 9]}
            return web.json_response({"choices": [choice], "usage": {"prompt_tokens": 3}})
        return _error(int(fault), f"fault {fault}", "Some")

    def _weight_versions(self, number: int) -> list[dict[str, Any]]:
        spans, start = [], 0
        for version, length in self.spans or [(self.version, number)]:
            spans.append({"version": version, "start": start, "end": start + length})
            start += length
        return spans

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": self.max_model_len}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        if not self.has_versions:
            return web.json_response(NOT_FOUND, status=404)
        return web.json_response({"weight_version": self.version})

    async def _pause(self, request: web.Request) -> web.Response:
        if request.headers.get("X-Ludic-Control-Token") != self.control_token:
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.num_pauses += 1
        await asyncio.sleep(self.pause_s)
        return web.json_response({"status": "paused", "mode": request.query.get("mode"), "body": await request.text()})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        return web.Response(text="Success: added.")


def _error(status: int, message: str, kind: str) -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@contextlib.asynccontextmanager
async def fake(**ways: Any) -> AsyncIterator[FakeVLLM]:
    server = await FakeVLLM(**ways).start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def client_of(*servers: FakeVLLM, **settings: Any) -> AsyncIterator[VLLMChatClient]:
    client = VLLMChatClient(
        servers=[server.url for server in servers], **{"connection_timeout_s": 0, "wait_s": 0.001, **settings}
    )
    try:
        yield client
    finally:
        await client.close()


def a_request(prompt: Any = (1, 2, 3), **fields: Any) -> TokenCompletionRequest:
    sampling = {"temperature": 1.0, "max_tokens": 4, **fields.pop("sampling", {})}
    return TokenCompletionRequest(
        **{
            "model": "fake",
            "prompt_token_ids": np.array(prompt, np.int32),
            "sampling": SamplingParams(**sampling),
            "return_": ReturnSpec.for_rl(),
            **fields,
        }
    )
