"""`VLLMChatClient`: vLLM servers as a policy. Token ids in; token ids, log-probs and weight versions out.

One client serves one server or several, with thousands of concurrent requests. It retries a failed request on the same server
or another, unless the request itself is wrong. Loads without vLLM and torch.
"""

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from ludic.http.client import (
    Answer,
    EndpointError,
    HttpSessions,
    Retries,
    RetryableError,
    Unreachable,
    error_of,
    get_without_loop,
    json_object,
)
from ludic.http.tokens import CONTROL_HEADER, CONTROL_VARIABLE
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LudicError,
    PolicyPublisher,
    ReturnSpec,
    SamplingParams,
    TokenChunk,
    TokenCompletionRequest,
    shown_url,
)
from ludic.util.urls import without_login
from ludic_vllm.routing import Server, ServerFacts, ServerPool
from ludic_vllm.watch import ServerWatch
from ludic_vllm.wire import (
    COMPLETIONS,
    GENERATE,
    NOT_VLLM,
    Body,
    CompletionStream,
    check_not_cut,
    completions_body,
    generate_body,
    is_plain_sampling,
    lacks_generate,
    max_tokens_of,
    read_completion,
    refusal,
    too_long,
    version_of,
)

_QUICK_S = 10.0
"""Timeout of calls that a healthy server answers at once."""
_LONGEST_WAIT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class _OpenStream:
    """A streamed completion whose first event has arrived."""

    server: Server
    url: str
    version: int | None
    max_tokens: int
    events: AsyncGenerator[bytes | Answer, None]
    first: bytes


class VLLMChatClient:
    """Completions from one vLLM server (`host`, `port`) or several (`servers`, base URLs)."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 8000,
        *,
        servers: Sequence[str] = (),
        control_token: str | None = None,
        api_key: str | None = None,
        connection_timeout_s: float = 60.0,
        request_timeout_s: float | None = 1800.0,
        max_retries: int = 8,
        wait_s: float = 0.5,
        publisher: PolicyPublisher | None = None,
        watch: ServerWatch | None = None,
    ) -> None:
        """Waits up to `connection_timeout_s` for every server to be healthy (0: no check, for use inside an event loop).

        `request_timeout_s` limits one completion with all its retries. The waits between retries start at `wait_s`, double, and
        stay below 10 s, so that eight of them outlast the restart of a server. `control_token` defaults to $LUDIC_CONTROL_TOKEN;
        only weight updates and other control calls need it. `watch`: of a server that this process owns; completions wait while it
        restarts the server.
        """
        given = list(servers) or [f"http://{host}:{port}"]
        self.servers = [_checked_url(url) for url in given]
        """Their URLs, without logins."""
        self.publisher = publisher
        self._watch = watch
        self._control_token = control_token if control_token is not None else os.environ.get(CONTROL_VARIABLE)
        self._request_timeout_s = request_timeout_s
        self._retries = Retries(max_retries=max_retries, wait_s=wait_s, longest_wait_s=_LONGEST_WAIT_S)
        self._pool = ServerPool(self.servers)
        self._http = HttpSessions(given, api_key, needed_for="VLLMChatClient")
        if connection_timeout_s > 0:
            _wait_for_health(self.servers, connection_timeout_s, self._http.login_headers)

    # --- completions ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task disconnects, and the server removes the request from its batch."""
        if not len(request.prompt_token_ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        try:
            async with asyncio.timeout(self._request_timeout_s) as deadline:
                return await self._retries.run(partial(self._complete_once, request))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"No completion within request_timeout_s={self._request_timeout_s:g} from {', '.join(self.servers)}. A server "
                "that is paused does not respond (GET /is_paused)."
            ) from error

    async def _complete_once(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        num_starts = 0 if self._watch is None else await self._watch.ready()
        with self._pool.lease(request.prompt_token_ids) as server:
            response, info = await self._complete_at(server, request)
            if self._watch is not None and self._watch.num_starts != num_starts:
                raise RetryableError(f"{server.url} was restarted and may have answered with its first weights.")
            self._pool.worked(server, request.prompt_token_ids, response.completion_token_ids)
            return response, info

    async def stream_tokens(self, request: TokenCompletionRequest) -> AsyncGenerator[TokenChunk, None]:
        """The same completion as it is sampled; the last chunk holds the whole. Closing the generator early disconnects.

        What was handed out cannot be taken back, so a failure after the first chunk is raised and not retried.
        """
        if not len(request.prompt_token_ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        async with AsyncExitStack() as stack:
            stream = await self._retries.run(partial(self._open_stream, request, stack))
            joined = CompletionStream(stream.url)
            data: bytes | Answer | None = stream.first
            while isinstance(data, bytes):
                ids, logprobs = joined.add(data)
                if ids:
                    yield TokenChunk(token_ids=ids, logprobs=logprobs)
                data = await anext(stream.events, None)
            response = joined.response(request, stream.version)
            check_not_cut(response, stream.max_tokens)
            self._pool.worked(stream.server, request.prompt_token_ids, response.completion_token_ids)
            yield TokenChunk(token_ids=[], logprobs=[], response=response)

    async def _open_stream(self, request: TokenCompletionRequest, stack: AsyncExitStack) -> _OpenStream:
        """Ask a server for a stream and wait for its first event; `stack` closes it."""
        if self._watch is not None:
            await self._watch.ready()
        async with AsyncExitStack() as attempt:
            server = attempt.enter_context(self._pool.lease(request.prompt_token_ids))
            path, body, version = await self._body_for(server, request)
            url = server.url + path
            data = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
            events = await attempt.enter_async_context(aclosing(self._http.events(url, data)))
            first = await anext(events, None)
            if isinstance(first, Answer):
                raise _refusal_of(server, path, first, request, max_tokens_of(body))
            if first is None:
                raise RetryableError(f"{url} ended a stream without an event.")
            stack.push_async_exit(attempt.pop_all())
            return _OpenStream(
                server=server, url=url, version=version, max_tokens=max_tokens_of(body), events=events, first=first
            )

    async def _complete_at(self, server: Server, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        path, body, version = await self._body_for(server, request)
        data = await self._ask_for_tokens(server, path, body, request)
        response = read_completion(server.url + path, data, request, version)
        check_not_cut(response, max_tokens_of(body))
        server.models.add(request.model)
        info: Info = {"raw_response": data, "used_args": body, "mode": "token_in"}
        if len(self.servers) > 1:
            info["server"] = server.url
        return response, info

    async def _body_for(self, server: Server, request: TokenCompletionRequest) -> tuple[str, Body, int | None]:
        """The endpoint and body for this server; its version, if the endpoint does not report one."""
        facts = await self._facts_of(server, request)
        _check_fits(facts, request)
        if facts.has_generate:
            return GENERATE, generate_body(request), None
        # Read before the request, so that it can only be too old: a sample may look staler than it is, never fresher.
        version = await self._version_at(server.url) if facts.has_versions else None
        return COMPLETIONS, completions_body(request), version

    async def _ask_for_tokens(self, server: Server, path: str, body: Body, request: TokenCompletionRequest) -> bytes:
        answer = await self._ask("POST", server.url + path, body=msgspec.json.encode(body))
        if answer.status != 200:
            raise _refusal_of(server, path, answer, request, max_tokens_of(body))
        return answer.data

    async def _ask(self, method: str, url: str, **more: Any) -> Answer:
        try:
            return await self._http.ask(method, url, **more)
        except Unreachable:
            if self._watch is not None:
                self._watch.require_alive()
            raise

    # --- capabilities of a server ---

    async def _facts_of(self, server: Server, request: TokenCompletionRequest) -> ServerFacts:
        """Determined by the first request to a server, while others wait for it."""
        if server.facts is None:
            num_failures = server.num_failures
            async with (await self._http.for_loop()).locks[server.url]:
                if server.num_failures > num_failures:  # otherwise every waiting request would probe it in turn
                    raise RetryableError(f"{server.url} has just failed to respond.")
                if server.facts is None:
                    server.facts = await self._find_facts(server, request)
        return server.facts

    async def _find_facts(self, server: Server, request: TokenCompletionRequest) -> ServerFacts:
        probe = TokenCompletionRequest(  # for one token with one candidate
            model=request.model,
            prompt_token_ids=request.prompt_token_ids[:1],
            sampling=SamplingParams(temperature=1.0, top_k=1, max_tokens=1),
            return_=ReturnSpec.for_rl(),
        )
        answer = await self._ask("POST", server.url + GENERATE, body=msgspec.json.encode(generate_body(probe)))
        has_generate = not lacks_generate(server.url + GENERATE, answer)
        if not has_generate:
            data = await self._ask_for_tokens(server, COMPLETIONS, completions_body(probe), probe)
        elif answer.status == 200:
            data = answer.data
        else:
            raise _refusal_of(server, GENERATE, answer, probe, max_tokens=1)
        response = read_completion(server.url, data, probe)
        logprobs = response.completion_logprobs
        assert logprobs is not None, "the probe requests them"
        return ServerFacts(
            has_generate=has_generate,
            # top_k=1 leaves one candidate, which has probability 1 if log-probs account for truncation.
            gives_processed_logprobs=bool(logprobs[0] == 0),
            max_model_len=await self._context_at(server.url),
            has_versions=(await self._ask("GET", f"{server.url}/weight_info", timeout_s=_QUICK_S)).status == 200,
        )

    async def _context_at(self, server: str) -> int | None:
        url = f"{server}/v1/models"
        answer = await self._ask("GET", url, timeout_s=_QUICK_S)
        if answer.status != 200:
            raise refusal(url, answer)
        lengths = [card.get("max_model_len") for card in json_object(url, answer, NOT_VLLM).get("data", [])]
        return min((length for length in lengths if length), default=None)

    # --- versions and weights ---

    async def get_policy_version(self) -> int:
        """The served version; the smallest if servers differ. Raises if a server is unreachable."""
        return min(await asyncio.gather(*(self._version_at(url) for url in self.servers)))

    async def _version_at(self, server: str) -> int:
        return version_of(str((await self.control_get(server, "/weight_info"))["weight_version"]))

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Pass the weights to `publisher`, whose own timeouts apply. `version` defaults to the served one plus one."""
        if self.publisher is None:
            raise ConfigError(
                "This VLLMChatClient has no publisher. To push weights, make one with "
                "ludic.distributed.create_vllm_publisher(client), and give it to the Trainer or set client.publisher."
            )
        if version is None:
            answers = [
                get_without_loop(f"{url}/weight_info", _QUICK_S, self._http.login_headers(url)) for url in self.servers
            ]
            version = 1 + max(version_of(msgspec.json.decode(answer)["weight_version"]) for answer in answers)
        number = version_of(str(version))
        self.publisher.publish(params, number)
        return str(number)

    # --- control ---

    async def control_get(
        self, server: str, path: str, params: Mapping[str, str] | None = None, timeout_s: float = _QUICK_S
    ) -> dict[str, Any]:
        """The same as `control_post`, for a quick GET."""
        return await self._control("GET", server + path, None, params, timeout_s)

    async def control_post(
        self,
        server: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
    ) -> dict[str, Any]:
        """One control call to one of `servers`, with the control token; never retried.

        Set-up errors (401, 403, 404) raise ConfigError, an unreachable server ConnectionError, a slow one TimeoutError, any other
        refusal EndpointError with the server's message.
        """
        return await self._control("POST", server + path, body, params, timeout_s)

    async def _control(
        self, method: str, url: str, body: Mapping[str, Any] | None, params: Mapping[str, str] | None, timeout_s: float
    ) -> dict[str, Any]:
        headers = {} if self._control_token is None else {CONTROL_HEADER: self._control_token}
        data = None if body is None else msgspec.json.encode(body)
        answer = await self._ask(method, url, body=data, headers=headers, params=params, timeout_s=timeout_s)
        if answer.status != 200:
            raise _control_refusal(url, answer, has_token=self._control_token is not None)
        try:
            decoded = msgspec.json.decode(answer.data) if answer.data else {}
        except (msgspec.DecodeError, RecursionError):
            decoded = answer.text  # some of vLLM's answers are plain text
        return decoded if isinstance(decoded, dict) else {"message": decoded}

    # --- health and closing ---

    async def is_healthy(self, server: str) -> bool:
        """Return True if the server answers GET /health; a healthy server may still be paused."""
        try:
            return (await self._http.ask("GET", f"{server}/health", timeout_s=_QUICK_S)).status == 200
        except RetryableError:
            return False

    async def close(self) -> None:
        """Close the running event loop's connections; further use of the client opens new ones."""
        await self._http.close()


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"servers: {shown_url(url)!r} is not a URL; it must begin with http:// or https://.")
    if "?" in url or url.rstrip("/").endswith("/v1"):
        raise ConfigError(f"servers: {shown_url(url)!r}; give the address alone, without /v1 and without a query.")
    return without_login(url).rstrip("/")


def _refusal_of(
    server: Server, path: str, answer: Answer, request: TokenCompletionRequest, max_tokens: int
) -> LudicError:
    if answer.status == 404 and request.model in server.models:
        # The server was restarted and lost an adapter; other servers have it, and the publisher will push it again.
        return RetryableError(
            f"{server.url} has lost {request.model!r}: {error_of(answer.text)['message']}", status=404
        )
    return refusal(server.url + path, answer, num_prompt=len(request.prompt_token_ids), max_tokens=max_tokens)


def _check_fits(facts: ServerFacts, request: TokenCompletionRequest) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if facts.max_model_len is not None and num_prompt + max_tokens > facts.max_model_len:
        raise too_long(num_prompt, max_tokens, facts.max_model_len)
    wants_logprobs = request.return_.return_chosen_logprobs
    if wants_logprobs and not facts.gives_processed_logprobs and not is_plain_sampling(request):
        raise ConfigError(
            "The server returns raw log-probs, which match its samples only at temperature 1 without truncation or penalties; "
            "ratios would be wrong. Start it with --logprobs-mode processed_logprobs (`ludic serve` does)."
        )


def _control_refusal(url: str, answer: Answer, *, has_token: bool) -> LudicError:
    failed = f"{url} returned {answer.status}: {error_of(answer.text)['message']}"
    if answer.status == 401:
        reason = "The control token is not the server's" if has_token else "This client has no control token"
        return ConfigError(
            f"{failed} {reason}: pass control_token=, or set ${CONTROL_VARIABLE}; the server wrote it to its run folder."
        )
    if answer.status in (403, 404):
        return ConfigError(
            f"{failed} A server has control endpoints only with VLLM_SERVER_DEV_MODE=1 (`ludic serve` sets it)."
        )
    return EndpointError(failed, status=answer.status)


def _wait_for_health(
    servers: Sequence[str], timeout_s: float, login_headers: Callable[[str], Mapping[str, str]]
) -> None:
    deadline = time.monotonic() + timeout_s
    for server in servers:
        while True:
            try:
                get_without_loop(f"{server}/health", 2.0, login_headers(server))
                break
            except (OSError, EndpointError) as error:
                if time.monotonic() >= deadline:
                    raise Unreachable(
                        f"{server}/health: {error}, after connection_timeout_s={timeout_s:g}. Check that the server is up and "
                        "its address is right."
                    ) from error
            time.sleep(min(2.0, max(0.0, deadline - time.monotonic())))
