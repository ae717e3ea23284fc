"""`OpenAIChatClient`: any OpenAI-compatible chat endpoint as a policy, for evaluation only.

Such an endpoint takes messages and gives text; its tokens are never seen. Agents speak tokens, so here the two meet in a
template that loses nothing: `ByteTemplate` writes messages as bytes with a mark per role, and the client reads the messages
back out of them. The "tokens" on such a rollout are bytes, good for exact records and of no use for training; how many
real ones were sampled is in each step's info ("completion_tokens"), as far as the endpoint says.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from ludic.inference.byte_template import ByteTemplate
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LudicError,
    Message,
    MissingExtra,
    OutOfRoom,
    SamplingParams,
    TokenArray,
    TokenCompletionRequest,
)

_ROLES = {number: role for role, number in ByteTemplate.ROLES.items()}
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_LONGEST_WAIT_S = 60.0


class EndpointError(LudicError, RuntimeError):
    """The endpoint did not give an answer, though it was asked again."""


class OpenAIChatClient:
    """Posts to `<base_url>/chat/completions`. Use it with `chat_template=ByteTemplate()`, and close it at the end."""

    def __init__(self, base_url: str, *, api_key: str | None = None, max_retries: int = 5, wait_s: float = 0.5) -> None:
        """A busy or broken endpoint is asked again `max_retries` times, after `wait_s` and then twice as long each time."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url={base_url!r}; it begins with http:// or https:// and usually ends in /v1.")
        self.base_url = base_url.rstrip("/")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._max_retries = max_retries
        self._wait_s = wait_s
        self._session: Any = None

    # --- what agents call ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        body = {
            "model": request.model,
            "messages": messages_of(request.prompt_token_ids),
            **_sampling_fields(request.sampling),
        }
        if request.seed is not None:
            body["seed"] = request.seed
        answer = await self._post("/chat/completions", body)
        text, finish_reason = _read_choice(answer)
        ids = ByteTemplate().encode(text)
        if finish_reason != "length":
            ids = np.append(ids, np.int32(ByteTemplate.END))
        response = ChatResponse(
            text=text,
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=ids,
            finish_reason=finish_reason,
        )
        used = (answer.get("usage") or {}).get("completion_tokens")
        return response, {} if used is None else {"completion_tokens": used}

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise ConfigError(f"{self.base_url} is an endpoint for evaluation; its weights cannot be replaced from here.")

    async def list_models(self) -> list[str]:
        """The names that it serves; the quickest way to see whether it is there and takes the key."""
        answer = await self._ask("GET", "/models", None)
        return [str(card["id"]) for card in answer.get("data", [])]

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # --- asking ---

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Ask, and ask again while the endpoint is busy."""
        for attempt in range(self._max_retries + 1):
            try:
                return await self._ask("POST", path, body)
            except _Busy as busy:
                if attempt == self._max_retries:
                    raise EndpointError(f"{busy} It was asked {attempt + 1} times.") from busy
                # Not all who were sent away at the same moment should come back at the same moment.
                wait = self._wait_s * 2**attempt * random.uniform(0.75, 1.25)
                await asyncio.sleep(min(busy.wait_s if busy.wait_s is not None else wait, _LONGEST_WAIT_S))
        raise AssertionError("the last attempt returns or raises")

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        session, failures = self._open()
        url = self.base_url + path
        try:
            async with session.request(method, url, json=body, headers=self._headers) as response:
                text = await response.text()
                if response.status != 200:
                    raise _refusal(url, response.status, text, response.headers.get("Retry-After"))
        except failures as error:
            raise _Busy(f"{url} cannot be reached: {error or type(error).__name__}.") from error
        return _read_json(url, text)

    def _open(self) -> tuple[Any, tuple[type[Exception], ...]]:
        """The session (made here, since it belongs to the event loop that uses it), and what it raises."""
        try:
            import aiohttp
        except ImportError as error:
            raise MissingExtra("endpoint", "An OpenAI-compatible endpoint") from error
        if self._session is None:
            # Whoever plays bounds how many episodes run; a model call may take as long as its own timeout allows.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None, sock_connect=30)
            )
        return self._session, (aiohttp.ClientError, ConnectionError)


class _Busy(EndpointError):
    """Worth another try."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


def messages_of(ids: TokenArray) -> list[Message]:
    """The messages that ByteTemplate wrote; the reply that it opened at the end is left out."""
    marks = [int(i) for i in np.flatnonzero(ids >= 256)]
    pairs = list(zip(marks[::2], marks[1::2], strict=False))
    if not pairs or any(int(ids[a]) not in _ROLES or ids[b] != ByteTemplate.END for a, b in pairs):
        raise ConfigError(
            "The prompt is not ByteTemplate's. An agent on an OpenAIChatClient needs chat_template=ByteTemplate(): the "
            "endpoint has a template of its own, and takes messages."
        )
    return [
        _as_sent(_ROLES[int(ids[start])], ids[start + 1 : end].astype(np.uint8).tobytes().decode("utf-8", "replace"))
        for start, end in pairs
    ]


def _as_sent(role: str, content: str) -> Message:
    """Results of tools that were called in plain text have no call that an endpoint knows of; they are told as text."""
    return (
        {"role": "user", "content": f"Tool result: {content}"} if role == "tool" else {"role": role, "content": content}
    )


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """OpenAI's fields always; those that only some servers know, where they ask for something."""
    fields = sampling.to_openai_kwargs()
    usual = SamplingParams()
    for name in ("frequency_penalty", "presence_penalty", "top_p"):
        if fields[name] == getattr(usual, name):
            del fields[name]
    for name in ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos"):
        if (value := getattr(sampling, name)) != getattr(usual, name):
            fields[name] = value
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    return fields


def _read_choice(answer: Mapping[str, Any]) -> tuple[str, str | None]:
    """(text, finish reason)."""
    choices = answer.get("choices") or []
    message = choices[0].get("message") if choices else None
    if not isinstance(message, dict):
        raise EndpointError(f"The endpoint answered without a message: {json.dumps(answer):.300}")
    return message.get("content") or "", choices[0].get("finish_reason")


def _read_json(url: str, text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ConfigError(
            f"{url} does not speak OpenAI's API; it answered {text!r:.200}. Does the base URL end in /v1?"
        )
    return answer


def _refusal(url: str, status: int, text: str, retry_after: str | None) -> LudicError:
    message, code = _error_of(text)
    if code == "context_length_exceeded":
        return OutOfRoom(message)
    said = f"{url} answered {status}: {message}"
    if status in _BUSY:
        return _Busy(said, float(retry_after) if retry_after and retry_after.replace(".", "", 1).isdigit() else None)
    if status in (401, 403):
        return ConfigError(f"{said} Is the API key right?")
    if status in (404, 405):
        return ConfigError(f"{said} Are the base URL and the model's name right?")
    return EndpointError(said)


def _error_of(text: str) -> tuple[str, str | None]:
    """OpenAI's error object where it is one; else the beginning of whatever came."""
    try:
        error = json.loads(text)["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, AttributeError):
        return text.strip()[:300] or "(nothing)", None
