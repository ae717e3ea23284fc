"""`SGLangChatClient`: SGLang servers as a policy. Token ids in; token ids, log-probs and weight versions out.

Requests are retried on the same server or another, unless the request itself is wrong. Loads without SGLang and torch.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ludic.inference.http import EndpointError, HttpSessions, Retries, RetryableError, get_without_loop, json_object
from ludic.inference.sglang.wire import GENERATE, NOT_SGLANG, generate_body, read_generated, refusal
from ludic.inference.vllm.routing import Server, ServerPool
from ludic.inference.vllm.wire import version_of
from ludic.types import ChatResponse, ConfigError, Info, PolicyPublisher, TokenCompletionRequest, shown_url
from ludic.types.urls import without_login

_QUICK_S = 10.0
_LONGEST_WAIT_S = 10.0


class SGLangChatClient:
    """Completions from one SGLang server or several, given by their URLs."""

    def __init__(
        self,
        servers: Sequence[str],
        *,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        request_timeout_s: float | None = 1800.0,
        max_retries: int = 8,
        wait_s: float = 0.5,
        publisher: PolicyPublisher | None = None,
    ) -> None:
        """`admin_api_key` is for servers that were started with --admin-api-key: only updates of weights need it."""
        if not servers:
            raise ConfigError("SGLangChatClient needs a server: give its URL, such as http://127.0.0.1:30000.")
        for url in servers:
            if not url.startswith(("http://", "https://")) or "?" in url or url.rstrip("/").endswith("/v1"):
                raise ConfigError(f"servers: {shown_url(url)!r}; give the address alone, such as http://HOST:30000.")
        self.servers = [without_login(url).rstrip("/") for url in servers]
        """Their URLs, without logins."""
        self.publisher = publisher
        self._admin = {} if admin_api_key is None else {"Authorization": f"Bearer {admin_api_key}"}
        self._request_timeout_s = request_timeout_s
        self._retries = Retries(max_retries=max_retries, wait_s=wait_s, longest_wait_s=_LONGEST_WAIT_S)
        self._pool = ServerPool(self.servers)
        self._http = HttpSessions(list(servers), api_key, needed_for="SGLangChatClient")

    # --- completions ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task disconnects, and the server aborts the request."""
        if not len(request.prompt_token_ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        body = msgspec.json.encode(generate_body(request))
        try:
            async with asyncio.timeout(self._request_timeout_s) as deadline:
                return await self._retries.run(partial(self._complete_once, request, body))
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise TimeoutError(
                f"No completion within request_timeout_s={self._request_timeout_s:g} from {', '.join(self.servers)}. A server "
                "that is paused does not respond (POST /continue_generation)."
            ) from error

    async def _complete_once(self, request: TokenCompletionRequest, body: bytes) -> tuple[ChatResponse, Info]:
        with self._pool.lease(request.prompt_token_ids) as server:
            response = await self._complete_at(server, request, body)
            self._pool.worked(server, request.prompt_token_ids, response.completion_token_ids)
            info: Info = {"mode": "token_in"}
            if len(self.servers) > 1:
                info["server"] = server.url
            return response, info

    async def _complete_at(self, server: Server, request: TokenCompletionRequest, body: bytes) -> ChatResponse:
        url = server.url + GENERATE
        answer = await self._http.ask("POST", url, body=body)
        if answer.status != 200:
            raise refusal(url, answer, request)
        return read_generated(url, answer.data, request)

    # --- versions and weights ---

    async def get_policy_version(self) -> int:
        """The served version; the smallest if servers differ. A server without a push says 0."""
        return min(await asyncio.gather(*(self.version_at(url) for url in self.servers)))

    async def version_at(self, server: str) -> int:
        """The version that one server serves."""
        return version_of(str((await self.model_info(server)).get("weight_version") or "default"))

    async def model_info(self, server: str) -> dict[str, Any]:
        """What a server says of its model: `model_path`, `served_model_name`, `weight_version`, …"""
        url = f"{server}/model_info"
        answer = await self._http.ask("GET", url, timeout_s=_QUICK_S)
        if answer.status != 200:
            raise refusal(url, answer)
        return json_object(url, answer, NOT_SGLANG)

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        """Pass the weights to `publisher`, whose own timeouts apply. `version` defaults to the served one plus one."""
        if self.publisher is None:
            raise ConfigError(
                "This SGLangChatClient has no publisher. To push weights, make one with "
                "ludic.distributed.publish.sglang.SGLangPublisher, and give it to the Trainer or set client.publisher."
            )
        if version is None:
            answers = [
                get_without_loop(f"{url}/model_info", _QUICK_S, self._http.login_headers(url)) for url in self.servers
            ]
            served = [msgspec.json.decode(answer).get("weight_version") or "default" for answer in answers]
            version = 1 + max(map(version_of, served))
        number = version_of(str(version))
        self.publisher.publish(params, number)
        return str(number)

    async def control(
        self, server: str, path: str, body: Mapping[str, Any] | None = None, timeout_s: float = 600.0
    ) -> dict[str, Any]:
        """One POST to a control endpoint of one of `servers`; never retried. EndpointError if it fails."""
        url = server + path
        answer = await self._http.ask(
            "POST", url, body=msgspec.json.encode(body or {}), headers=self._admin, timeout_s=timeout_s
        )
        if answer.status != 200:
            decoded = msgspec.json.decode(answer.data) if answer.data.startswith(b"{") else {}
            message = decoded.get("message") or answer.text[:300]
            raise EndpointError(f"{url} returned {answer.status}: {message}", status=answer.status)
        return json_object(url, answer, NOT_SGLANG)

    # --- health and closing ---

    async def is_healthy(self, server: str) -> bool:
        """Whether it answers GET /health."""
        try:
            return (await self._http.ask("GET", f"{server}/health", timeout_s=_QUICK_S)).status == 200
        except RetryableError:
            return False

    async def close(self) -> None:
        """Close the running event loop's connections; further use of the client opens new ones."""
        await self._http.close()
