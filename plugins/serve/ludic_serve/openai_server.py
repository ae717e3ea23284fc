"""The embedded engine as an OpenAI-compatible HTTP server: `ludic serve`.

It checks a body, turns it into token requests, and the replies into OpenAI's JSON; sampling, batching and limits are the
engine's. A field that would change the answer but is not supported is refused by name, never ignored.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from ludic.http.address import check_host
from ludic.http.errors import RequestRefused, describe_error
from ludic.http.tokens import bearer_of, require_secret
from ludic.inference.local.engine import LocalEngine
from ludic.inference.templates.chat import ChatTemplate
from ludic.inference.templates.hf import HFChatTemplate, tool_parser_for
from ludic.tasks import all_or_none, cancel_all
from ludic.types import (
    ConfigError,
    Message,
    MissingExtra,
    PromptTooLong,
    ReturnSpec,
    SamplingParams,
    TemplateError,
    TokenArray,
    TokenChunk,
    TokenCompletionRequest,
    token_array,
)
from ludic.types.errors import encodable
from ludic.types.sampling import MAX_COUNT
from ludic_serve.request import (
    Body,
    ChatBody,
    CompletionBody,
    JSONObject,
    RequestBody,
    check_length,
    check_num_logprobs,
    check_prompt,
    read_body,
    read_messages,
    read_prompts,
    read_tools,
)
from ludic_serve.response import Answer, ChatAnswer, CompletionAnswer

try:
    from aiohttp import web

    from ludic.http.app import AppServer, Load, ServerLimits, answering, guard, json_error
except ImportError as error:
    raise MissingExtra("serve", "The HTTP server") from error

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_CLIENT_GONE = 499


def make_app(
    engine: LocalEngine,
    *,
    model_name: str,
    api_key: str | None = None,
    chat_template: ChatTemplate | None = None,
    limits: ServerLimits | None = None,
) -> web.Application:
    """The server as an aiohttp application. Without `chat_template`, the tokenizer's own is used.

    `serve` enforces the limits on connections and heads; the application enforces the others.
    """
    server = _Server(engine, model_name, api_key, chat_template, limits or ServerLimits())
    app = web.Application(
        middlewares=[server.count, guard(server.limits, json_error, admit=server.check_key)],
        handler_args={"handler_cancellation": True},  # a disconnecting client cancels its handler and its sampling
    )
    app.add_routes(
        [
            web.post("/v1/completions", server.completions),
            web.post("/v1/chat/completions", server.chat),
            web.get("/v1/models", server.models),
            web.get("/v1/models/{name:.+}", server.model),
            web.get("/health", server.health),
            web.get("/metrics", server.metrics),
        ]
    )
    return app


async def serve(
    engine: LocalEngine,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    model_name: str,
    api_key: str | None = None,
    insecure: bool = False,
    chat_template: ChatTemplate | None = None,
    limits: ServerLimits | None = None,
    drain_s: float = 0.0,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until cancelled; then requests in progress may go on for `drain_s`, or until this is cancelled again.

    Port 0 takes a free one; `on_ready` gets the address.
    """
    check_host(host, api_key, insecure)
    limits = limits or ServerLimits()
    app = make_app(engine, model_name=model_name, api_key=api_key, chat_template=chat_template, limits=limits)
    await AppServer(app, limits, has_token=bool(api_key)).serve(host, port, on_ready=on_ready, drain_s=drain_s)


class _Server:
    """One engine, its chat template, and the counters of /metrics."""

    def __init__(
        self,
        engine: LocalEngine,
        model_name: str,
        api_key: str | None,
        chat_template: ChatTemplate | None,
        limits: ServerLimits,
    ) -> None:
        self._engine = engine
        self.limits = limits
        self._load = Load(limits)
        self._model_name = model_name
        self._api_key = api_key
        self._started = int(time.time())
        self._num_requests: Counter[tuple[str, int]] = Counter()
        self._num_active = 0
        self._num_prompt_tokens = 0
        self._num_completion_tokens = 0
        self._no_chat = (
            "This server has no tokenizer and therefore no chat template; send token ids to /v1/completions."
        )
        self._template = chat_template
        if chat_template is None and engine.tokenizer is not None:
            try:
                self._template = HFChatTemplate(engine.tokenizer, tool_parser=tool_parser_for(engine.tokenizer))
            except TemplateError as error:  # a base model; /v1/completions still works
                self._no_chat = str(error)

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts requests by path and status."""
        status = _CLIENT_GONE  # unless the response is sent
        self._num_active += 1
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            self._num_active -= 1
            resource = request.match_info.route.resource
            self._num_requests[resource.canonical if resource else "other", status] += 1

    def check_key(self, request: web.Request) -> None:
        if self._api_key and request.path != "/health":
            message = "This server needs its API key as 'Authorization: Bearer <key>'."
            require_secret(bearer_of(request.headers), self._api_key, RequestRefused(401, "invalid_api_key", message))

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._model_card()]})

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["name"])
        return web.json_response(self._model_card())

    def _model_card(self) -> JSONObject:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._started,
            "owned_by": "ludic",
            "max_model_len": self._engine.max_total_tokens,
        }

    async def health(self, request: web.Request) -> web.Response:
        failure = self._engine.failure
        if failure is not None:
            return web.json_response({"status": "dead", "reason": failure}, status=503)
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        families: list[tuple[str, str, dict[str, int]]] = [
            ("ludic_engine_up", "gauge", {"": int(self._engine.failure is None)}),
            ("ludic_requests_in_progress", "gauge", {"": self._num_active}),
            ("ludic_prompt_tokens_total", "counter", {"": self._num_prompt_tokens}),
            ("ludic_completion_tokens_total", "counter", {"": self._num_completion_tokens}),
        ]
        counts = {f'{{path="{path}",status="{s}"}}': n for (path, s), n in sorted(self._num_requests.items())}
        families.append(("ludic_requests_total", "counter", counts))
        for name, value in self._engine.stats.items():
            counts_up = name in ("preemptions", "prefix_tokens_reused")
            kind, suffix = ("counter", "_total") if counts_up else ("gauge", "")
            families.append((f"ludic_engine_{name}{suffix}", kind, {"": value}))
        lines = []
        for name, kind, samples in families:
            lines.append(f"# TYPE {name} {kind}")
            lines += [f"{name}{labels} {value}" for labels, value in samples.items()]
        return web.Response(text="\n".join(lines) + "\n", headers={"Content-Type": "text/plain; version=0.0.4"})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, await self._completion_answer(request))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._respond(request, await self._chat_answer(request))

    # Each body is read in a function that returns before sampling starts, so that nothing of it stays in memory meanwhile.

    async def _completion_answer(self, request: web.Request) -> CompletionAnswer:
        async with self._body(request, CompletionBody) as body:
            check_num_logprobs("logprobs", body.logprobs)
            params = SamplingParams(**body.sampling(), max_tokens=body.max_tokens)
            texts = read_prompts(body.prompt, body.n, self._engine.max_total_tokens)
            prompts = await asyncio.to_thread(lambda: [self._encode(t, body.add_special_tokens) for t in texts])
            requests = self._requests(prompts, params, body, logprobs=body.logprobs is not None)
            return CompletionAnswer(self._model_name, self._engine.tokenizer, requests, body)

    async def _chat_answer(self, request: web.Request) -> ChatAnswer:
        async with self._body(request, ChatBody) as body:
            template = self._template
            if template is None:
                raise ConfigError(self._no_chat)
            check_num_logprobs("top_logprobs", body.top_logprobs)
            if body.top_logprobs is not None and not body.logprobs:
                raise ConfigError("top_logprobs needs logprobs: true.")
            sampling = body.sampling()
            max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
            SamplingParams(**sampling, max_tokens=max_tokens or MAX_COUNT)  # before anything is rendered
            prompt, tools = await asyncio.to_thread(self._render, template, read_messages(body.messages), body)
            room = self._engine.max_total_tokens
            if max_tokens is None and len(prompt) >= room:
                raise PromptTooLong(len(prompt), room, "There is no room for a reply; shorten the conversation.")
            sampling["max_tokens"] = room - len(prompt) if max_tokens is None else max_tokens
            requests = self._requests([prompt], SamplingParams(**sampling), body, logprobs=body.logprobs)
            parser = template if tools else None
            return ChatAnswer(self._model_name, self._engine.tokenizer, requests, body, parser=parser)

    # --- from a body to requests ---

    @contextlib.asynccontextmanager
    async def _body(self, request: web.Request, kind: type[RequestBody]) -> AsyncIterator[RequestBody]:
        # A web page can post to this machine without asking, but only as a form or as plain text.
        if request.content_type != "application/json":
            raise ConfigError(f"The body must be application/json, not {request.content_type!r:.80}.")
        async with self._load.body(request) as data:
            body = read_body(data, kind)
            self._check_model(self._model_name if body.model is None else body.model)
            yield body

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            raise RequestRefused(
                404, "model_not_found", f"The model {name!r:.80} is not served here; {self._model_name!r} is."
            )

    def _encode(self, prompt: str | list[int], add_special_tokens: bool) -> TokenArray:
        if isinstance(prompt, list):
            return token_array(prompt)
        if self._engine.tokenizer is None:
            raise ConfigError("This server has no tokenizer; send the prompt as token ids.")
        text, tokenizer = encodable(prompt), self._engine.tokenizer

        def ids_of(text: str) -> list[int]:
            ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            return ids

        check_length(lambda piece: len(ids_of(piece)), text, self._engine.max_total_tokens)
        return token_array(ids_of(text))

    def _render(
        self, template: ChatTemplate, messages: list[Message], body: ChatBody
    ) -> tuple[TokenArray, list[JSONObject]]:
        """The prompt, and the tools in it."""
        check_prompt(template, messages, body.tools, self._engine.max_total_tokens)
        tools = read_tools(body.tools, body.tool_choice, template)
        return template.apply(messages, tools=tools or None).prompt_token_ids, tools

    def _requests(
        self, prompts: Sequence[TokenArray], sampling: SamplingParams, body: Body, *, logprobs: bool
    ) -> list[TokenCompletionRequest]:
        """`n` requests for each prompt in turn, which is the order of the choices."""
        return [
            TokenCompletionRequest(
                model=self._model_name,
                prompt_token_ids=prompt,
                sampling=sampling,
                return_=ReturnSpec(return_chosen_logprobs=logprobs, return_candidates=False),
                seed=None if body.seed is None else body.seed + i,  # as vLLM does
            )
            for prompt in prompts
            for i in range(body.n)
        ]

    # --- from replies to a body ---

    async def _respond(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        with self._load.completions(answer.requests):
            if answer.is_streamed:
                return await self._stream(request, answer)
            replies = await all_or_none(self._engine.complete_tokens(r) for r in answer.requests)
            responses = [response for response, _ in replies]
            self._count(answer, sum(len(r.completion_token_ids) for r in responses))
            # In a thread: decoding each token of many completions takes seconds, during which other clients would wait.
            text = await asyncio.to_thread(lambda: json.dumps(answer.whole(responses)))
            return web.Response(text=text, content_type="application/json")

    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )

        async def send(event: bytes) -> None:
            async with answering(request, self.limits):
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)

        try:
            async with aclosing(_merged([self._engine.stream_tokens(r) for r in answer.requests])) as chunks:
                async for index, chunk in chunks:
                    for event in answer.events(index, chunk):
                        await send(_sse(event))
            if answer.include_usage:
                await send(_sse(answer.usage_event()))
            await send(b"data: [DONE]\n\n")
        except Exception as error:
            if not response.prepared:
                raise
            # The status is already sent, so the error is an event and [DONE] is omitted.
            await send(_sse(describe_error(error).openai_body()))
        finally:
            if response.prepared:
                self._count(answer, answer.num_sampled)
        return response

    def _count(self, answer: Answer, num_sampled: int) -> None:
        self._num_prompt_tokens += answer.num_prompt_tokens
        self._num_completion_tokens += num_sampled


async def _merged(streams: Sequence[AsyncGenerator[TokenChunk, None]]) -> AsyncGenerator[tuple[int, TokenChunk], None]:
    """Chunks of several streams as they arrive, with the index of their stream; the first error ends all."""
    arrived: asyncio.Queue[tuple[int, TokenChunk] | BaseException | None] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[TokenChunk, None]) -> None:
        try:
            async with aclosing(stream):
                async for chunk in stream:
                    arrived.put_nowait((index, chunk))
            arrived.put_nowait(None)
        except Exception as error:  # noqa: BLE001 - raised again below, in the consumer
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    num_open = len(tasks)
    try:
        while num_open:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await cancel_all(tasks)


def _sse(event: JSONObject) -> bytes:
    return f"data: {json.dumps(event)}\n\n".encode()
