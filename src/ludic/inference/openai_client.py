"""`OpenAIChatClient`: any OpenAI-compatible chat endpoint, for evaluation and data generation.

Such an endpoint takes messages and returns text, usually without its tokens, while agents work on tokens. `ByteTemplate`
bridges the two without loss: it writes messages as bytes with a mark per role, and the client reads the messages back. The
"tokens" of such a rollout are bytes: an exact record, but useless for training. The numbers of real tokens are in each step's
info ("prompt_tokens", "completion_tokens") if the endpoint reports them.

vLLM's and Ludic's servers return tokens (`return_token_ids`): `complete_messages` gives them.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ludic.http.client import Answer, EndpointError, HttpSessions, Retries, RetryableError, error_of, json_object
from ludic.inference.templates.chat import ByteTemplate
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LudicError,
    Message,
    OutOfRoom,
    SamplingParams,
    TokenArray,
    TokenCompletionRequest,
    float_array,
    shown_url,
    token_array,
)
from ludic.util.urls import without_login

__all__ = ["EndpointError", "OpenAIChatClient", "messages_of"]

_ROLES = {number: role for role, number in ByteTemplate.ROLES.items()}
_BUSY = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})


class OpenAIChatClient:
    """Posts to `<base_url>/chat/completions`. Use it with `chat_template=ByteTemplate()`, and close it at the end."""

    def __init__(self, base_url: str, *, api_key: str | None = None, max_retries: int = 5, wait_s: float = 0.5) -> None:
        """A busy or failing endpoint is retried `max_retries` times, after `wait_s` and then twice as long each time."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"base_url={shown_url(base_url)!r}; it must begin with http:// or https://, and usually ends in /v1."
            )
        if "?" in base_url:
            raise ConfigError(
                f"base_url={shown_url(base_url)!r} has a query, but the client appends a path. Pass a key as api_key "
                "(`ludic eval`: --api-key-env NAME)."
            )
        self.base_url = without_login(base_url).rstrip("/")
        self._retries = Retries(max_retries=max_retries, wait_s=wait_s)
        self._http = HttpSessions([base_url], api_key, needed_for="An OpenAI-compatible endpoint")

    # --- for agents ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        messages = messages_of(request.prompt_token_ids)
        answer = await self._chat(request.model, messages, request.sampling, request.seed)
        text, finish_reason = _read_choice(answer)
        ids = ByteTemplate().encode(text)
        if finish_reason != "length":
            ids = np.append(ids, np.int32(ByteTemplate.END))
        response = ChatResponse(
            text=text, prompt_token_ids=request.prompt_token_ids, completion_token_ids=ids, finish_reason=finish_reason
        )
        return response, _info(answer)

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise ConfigError(f"{self.base_url} is an endpoint for evaluation; its weights cannot be replaced from here.")

    # --- for scripts ---

    async def complete_messages(
        self,
        messages: Sequence[Message],
        *,
        model: str,
        sampling: SamplingParams | None = None,
        seed: int | None = None,
    ) -> tuple[ChatResponse, Info]:
        """A reply with the endpoint's own token ids (prompt and completion) and log-probs; ConfigError if it returns no ids."""
        extra = {"return_token_ids": True, "logprobs": True}
        answer = await self._chat(model, messages, sampling or SamplingParams(), seed, extra)
        text, finish_reason = _read_choice(answer)
        choice = answer["choices"][0]
        prompt, completion = answer.get("prompt_token_ids"), choice.get("token_ids")
        if prompt is None or completion is None:
            raise ConfigError(
                f"{self.base_url} returned no token ids (it does not know return_token_ids; vLLM and `ludic serve` do). "
                "For text alone, use complete_tokens with a ByteTemplate."
            )
        content = (choice.get("logprobs") or {}).get("content")
        response = ChatResponse(
            text=text,
            prompt_token_ids=token_array(prompt),
            completion_token_ids=token_array(completion),
            completion_logprobs=None
            if content is None
            else float_array([entry["logprob"] for entry in content], "logprobs"),
            finish_reason=finish_reason,
        )
        return response, _info(answer)

    async def list_models(self) -> list[str]:
        """The served model names; also a quick check that the endpoint is up and accepts the key."""
        answer = await self._ask("GET", "/models", None)
        return [str(card["id"]) for card in answer.get("data", [])]

    async def close(self) -> None:
        await self._http.close()

    # --- requests ---

    async def _chat(
        self,
        model: str,
        messages: Sequence[Message],
        sampling: SamplingParams,
        seed: int | None,
        extra: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Send the request, with retries while the endpoint is busy."""
        body = {"model": model, "messages": list(messages), **_sampling_fields(sampling), **(extra or {})}
        if seed is not None:
            body["seed"] = seed
        return await self._retries.run(partial(self._ask, "POST", "/chat/completions", body))

    async def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        url = self.base_url + path
        # No timeout: the caller sets one on the model call.
        answer = await self._http.ask(method, url, body=None if body is None else json.dumps(body).encode())
        if answer.status != 200:
            raise _refusal(url, answer)
        return json_object(url, answer, "does not follow OpenAI's API (check that the base URL ends in /v1)")


def messages_of(ids: TokenArray) -> list[Message]:
    """The messages that ByteTemplate encoded, without the reply it opens at the end."""
    marks = [int(i) for i in np.flatnonzero(ids >= 256)]
    pairs = list(zip(marks[::2], marks[1::2], strict=False))
    if not pairs or any(int(ids[a]) not in _ROLES or ids[b] != ByteTemplate.END for a, b in pairs):
        raise ConfigError(
            "The prompt was not written by ByteTemplate. An agent on an OpenAIChatClient needs chat_template=ByteTemplate(), "
            "because the endpoint takes messages and applies its own template."
        )
    messages: list[Message] = []
    for start, end in pairs:
        role, content = _ROLES[int(ids[start])], ByteTemplate().decode_reply(ids[start + 1 : end])
        if (
            role == "tool"
        ):  # a call in plain text has no id that an endpoint accepts, so its result is sent as user text
            role, content = "user", f"Tool result: {content}"
        messages.append({"role": role, "content": content})
    return messages


def _sampling_fields(sampling: SamplingParams) -> dict[str, Any]:
    """OpenAI's fields always; fields that only some servers know, only if they differ from the default."""
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
        raise EndpointError(f"The endpoint's response has no message: {json.dumps(answer):.300}")
    return message.get("content") or "", choices[0].get("finish_reason")


def _info(answer: Mapping[str, Any]) -> Info:
    usage = answer.get("usage") or {}
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens") if usage.get(name) is not None}


def _refusal(url: str, answer: Answer) -> LudicError:
    error = error_of(answer.text)
    status, message, after = answer.status, error["message"], answer.retry_after
    if error.get("code") == "context_length_exceeded" or "maximum context length" in message:
        return OutOfRoom(message)
    failed = f"{url} returned {status}: {message}"
    if status in _BUSY:
        wait_s = float(after) if after and after.replace(".", "", 1).isdecimal() else None
        return RetryableError(failed, status=status, wait_s=wait_s)
    if status in (401, 403):
        return ConfigError(f"{failed} Check the API key.")
    if status in (404, 405):
        return ConfigError(f"{failed} Check the base URL and the model's name.")
    return EndpointError(failed, status=status)
