"""Request bodies and response parsing for both of vLLM's token endpoints.

`/inference/v1/generate` takes and returns token ids and says which weights sampled which token; `/v1/completions` is for
servers without it. Pure functions: `client.py` sends the requests.
"""

import base64
import io
import re
from typing import Any

import msgspec
import numpy as np

from ludic.http.client import Answer, EndpointError, RetryableError, error_of
from ludic.types import (
    CandidateSets,
    ChatResponse,
    ConfigError,
    ExpertArray,
    LogprobArray,
    LudicError,
    PromptTooLong,
    TokenArray,
    TokenCompletionRequest,
    TokenMismatch,
    VersionRun,
    VLLMExtensions,
)
from ludic_vllm.routing import Aborted

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
NOT_VLLM = "does not respond like vLLM"

_MAX_SEED = (1 << 63) - 1
NO_LOGPROB = -9999.0
"""vLLM's value for a log-prob that is NaN, −∞ or missing."""
_CONTEXT = re.compile(r"maximum (?:context length is|model length of) (\d+)")
"""The two endpoints' messages about a prompt that is too long."""
_BESIDE_SAMPLING = frozenset({"model", "request_id", "cache_salt", "priority", "reasoning_ended", "kv_transfer_params"})
"""Fields of a generate request itself; every other override is a sampling parameter."""

Body = dict[str, Any]


class _WrongExtensions(ConfigError, TypeError):
    """Extensions for another kind of server."""


# --- requests ---


def generate_body(request: TokenCompletionRequest) -> Body:
    extensions = _extensions_of(request)
    sampling = _sampling_fields(request, extensions)
    if extensions.max_think is not None:
        sampling["extra_args"] = {"max_think": extensions.max_think}
    body: Body = {"model": request.model, "token_ids": _sent_ids(request), "output_mode": "text"}
    if request.images:
        body["content_parts"] = [{"type": "image_url", "url": span.image.url} for span in request.images]
    for name, value in extensions.extra_body_overrides.items():
        if name == "vllm_xargs":
            sampling["extra_args"] = {**sampling.get("extra_args", {}), **value}
        else:
            (body if name in _BESIDE_SAMPLING else sampling)[name] = value
    return {**body, "sampling_params": sampling}


def _sent_ids(request: TokenCompletionRequest) -> list[int]:
    """The prompt's ids. vLLM takes one placeholder per picture and repeats it itself; the number of tokens that it saw is compared
    with the whole prompt's when it answers."""
    ids, images = request.prompt_token_ids, request.images
    if not images:
        return ids.tolist()
    keeps = np.ones(len(ids), dtype=np.bool_)
    for span in images:
        keeps[span.start + 1 : span.end] = False
    sent = ids[keeps]
    if np.count_nonzero(sent == ids[images[0].start]) != len(images):
        raise ConfigError(
            "The model has sampled the placeholder of a picture, and vLLM would take it for one. Forbid it: "
            'VLLMExtensions(extra_body_overrides={"logit_bias": {…}}).'
        )
    return sent.tolist()


def completions_body(request: TokenCompletionRequest) -> Body:
    extensions = _extensions_of(request)
    if request.images:
        raise ConfigError(
            f"The prompt holds pictures, which only {GENERATE} takes with token ids. Start vLLM 0.32 or newer with its token "
            "endpoints."
        )
    body: Body = {
        "model": request.model,
        "prompt": request.prompt_token_ids.tolist(),
        "return_token_ids": True,
        **_sampling_fields(request, extensions),
    }
    if extensions.max_think is not None:
        body["vllm_xargs"] = {"max_think": extensions.max_think}
    return {**body, **extensions.extra_body_overrides}


def max_tokens_of(body: Body) -> int:
    """The effective max_tokens, overrides included."""
    return int(body.get("sampling_params", body)["max_tokens"])


def is_plain_sampling(request: TokenCompletionRequest) -> bool:
    """Return True if tokens are drawn from the model's unmodified distribution, for which raw log-probs are correct."""
    sampling = request.sampling
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, _repetition_penalty(request) - 1.0)
    is_whole = sampling.top_p == 1 and not sampling.top_k and not sampling.min_p and not sampling.min_tokens
    return sampling.temperature in (0, 1) and is_whole and not any(penalties)


def _extensions_of(request: TokenCompletionRequest) -> VLLMExtensions:
    extensions = request.extensions
    if extensions is None:
        return VLLMExtensions()
    if not isinstance(extensions, VLLMExtensions):
        raise _WrongExtensions(
            f"The request has {type(extensions).__name__} (kind {extensions.kind!r}); a vLLM server takes VLLMExtensions."
        )
    return extensions


def _repetition_penalty(request: TokenCompletionRequest) -> float:
    own = _extensions_of(request).repetition_penalty
    return own if own != 1.0 else request.sampling.repetition_penalty


def _sampling_fields(request: TokenCompletionRequest, extensions: VLLMExtensions) -> Body:
    """The fields that both endpoints share."""
    sampling = request.sampling
    fields: Body = {
        **sampling.to_openai_kwargs(),
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": _repetition_penalty(request),
        "min_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
    }
    if not sampling.stop and "stop" not in extensions.extra_body_overrides:
        fields["include_stop_str_in_output"] = True  # the text includes a stop token, as with the local engine
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if request.seed is not None:
        fields["seed"] = request.seed & _MAX_SEED  # the server holds seeds as signed 64-bit integers
    if request.return_.return_chosen_logprobs:
        # 0 returns the sampled token alone; k adds the k likeliest.
        wanted = request.return_.top_logprobs_k
        fields["logprobs"] = 0 if wanted == 1 else wanted
    return fields


# --- answers ---


class LogprobEntry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[LogprobEntry] | None = None
    """Field of /inference/v1/generate."""
    token_logprobs: list[float | None] | None = None
    """Field of /v1/completions."""


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct, gc=False):
    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    prompt_token_ids: list[int] | None = None
    routed_experts: str | None = None
    """Sent by a server with --enable-return-routed-experts: base64 of a .npy file, [tokens, layers, experts per token]."""


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None


class _Completion(msgspec.Struct, gc=False):
    """The parts of a response that are read. Typed, since the rest is most of it: thousands of small unused dicts."""

    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Completion)


def read_completion(url: str, data: bytes, request: TokenCompletionRequest, version: int | None = None) -> ChatResponse:
    """Parse either endpoint's response. `version` (served when the request was sent) is for the endpoint that reports none."""
    return _response_of(_decoded(url, data), request, version)


class CompletionStream:
    """Joins the events of a streamed completion, of either endpoint."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._joined = _Completion(choices=[_Choice(token_ids=[])])

    def add(self, data: bytes) -> tuple[list[int], list[float]]:
        """One event; returns its tokens and their log-probs."""
        if b'"error"' in data[:200]:
            shown = error_of(data.decode("utf-8", "replace"))["message"]
            raise RetryableError(f"{self._url} failed in the middle of a stream: {shown}")
        event = _decoded(self._url, data)
        joined, ids, logprobs = self._joined, [], []
        joined.usage = event.usage or joined.usage
        for part in event.choices:
            whole, ids = joined.choices[0], part.token_ids or []
            assert whole.token_ids is not None, "it begins as a list"
            whole.text += part.text
            whole.token_ids += ids
            whole.finish_reason = part.finish_reason or whole.finish_reason
            whole.weight_versions = part.weight_versions or whole.weight_versions
            whole.routed_experts = part.routed_experts or whole.routed_experts
            if part.logprobs is not None:
                logprobs = _chosen_logprobs(part.logprobs)
                whole.logprobs = whole.logprobs or _Logprobs(token_logprobs=[])
                assert whole.logprobs.token_logprobs is not None, "it begins as a list"
                whole.logprobs.token_logprobs += logprobs
        return ids, [NO_LOGPROB if value is None else value for value in logprobs]

    def response(self, request: TokenCompletionRequest, version: int | None = None) -> ChatResponse:
        """After the last event."""
        if self._joined.choices[0].finish_reason is None:
            raise RetryableError(f"{self._url} ended a stream before the completion was finished.")
        return _response_of(self._joined, request, version)


def _decoded(url: str, data: bytes) -> _Completion:
    try:
        return _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        shown = data[:200].decode("utf-8", "replace")
        raise ConfigError(f"{url} {NOT_VLLM}: {shown!r} ({error}).") from error


def _response_of(answer: _Completion, request: TokenCompletionRequest, version: int | None) -> ChatResponse:
    if len(answer.choices) != 1:
        raise EndpointError(
            f"One completion was requested, but {len(answer.choices)} came. Check that the overrides do not set n."
        )
    choice = answer.choices[0]
    if choice.finish_reason == "abort":
        raise Aborted("The server aborted the request (it is being paused or shut down).")
    if choice.token_ids is None:
        raise EndpointError(
            "The server returned no token ids, and text alone cannot be trained on. It needs vLLM 0.10.2 or newer."
        )
    _check_prompt(answer, choice, request)
    ids = np.array(choice.token_ids, dtype=np.int32)
    logprobs = None if choice.logprobs is None else _read_logprobs(choice.logprobs, len(ids))
    return ChatResponse(
        text=choice.text,
        prompt_token_ids=request.prompt_token_ids,
        completion_token_ids=ids,
        completion_logprobs=logprobs,
        finish_reason=choice.finish_reason,
        version_runs=_version_runs(choice, version),
        candidates=None if logprobs is None else _forced(request, ids, logprobs),
        experts=_experts(choice.routed_experts, len(request.prompt_token_ids) + len(ids)),
    )


def _experts(encoded: str | None, num_tokens: int) -> ExpertArray | None:
    """The server computes all tokens but the last, whose experts are not known."""
    if encoded is None:
        return None
    try:
        given = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False)
        experts = np.full((num_tokens, *given.shape[1:]), -1, dtype=np.int16)
        experts[: len(given)] = given[:num_tokens]
    except (ValueError, TypeError, EOFError) as error:
        raise EndpointError(f"The server's routed experts cannot be read: {error}.") from error
    if experts.ndim != 3 or len(given) < num_tokens - 1:
        raise EndpointError(
            f"The server returned experts of the shape {list(given.shape)} for {num_tokens} tokens; [tokens, layers, experts per "
            "token] was expected."
        )
    return experts


def check_not_cut(response: ChatResponse, max_tokens: int) -> None:
    """vLLM silently shortens a completion if prompt and max_tokens exceed the context; here that is an error."""
    prompt, sampled = len(response.prompt_token_ids), len(response.completion_token_ids)
    if response.finish_reason == "length" and sampled < max_tokens:
        raise too_long(prompt, max_tokens, prompt + sampled)


def too_long(num_prompt: int, max_tokens: int, limit: int) -> PromptTooLong:
    parts = f"That is {num_prompt} of the prompt and max_tokens={max_tokens}."
    return PromptTooLong(num_prompt + max_tokens, limit, f"{parts} {PromptTooLong.RAISE}")


def version_of(label: str) -> int:
    """The version of a weight label. A server without a push since its start says "default": version 0."""
    if label == "default":
        return 0
    if not label.isdecimal():
        raise EndpointError(
            f"The server labels its weights {label!r}; Ludic's publishers label them by version number. Check whether another "
            "program pushes weights to it."
        )
    return int(label)


def _check_prompt(answer: _Completion, choice: _Choice, request: TokenCompletionRequest) -> None:
    sent, seen = request.prompt_token_ids, choice.prompt_token_ids
    num_seen = answer.usage.prompt_tokens if answer.usage is not None else None
    if (num_seen is None or num_seen == len(sent)) and (seen is None or np.array_equal(seen, sent)):
        return
    raise TokenMismatch(
        f"The server saw a prompt of {num_seen} tokens that differs from the {len(sent)} tokens sent; it must take token ids "
        "unchanged."
    )


def _read_logprobs(logprobs: _Logprobs, num_tokens: int) -> LogprobArray:
    values = np.array(_chosen_logprobs(logprobs), dtype=np.float32)  # None becomes NaN
    if len(values) != num_tokens:
        raise EndpointError(f"The server returned {len(values)} log-probs for {num_tokens} tokens.")
    if num_tokens and not values.min() > NO_LOGPROB:
        raise EndpointError("The server returned no log-prob for a sampled token. Check that its weights are finite.")
    return values


def _chosen_logprobs(logprobs: _Logprobs) -> list[float | None]:
    given = logprobs.token_logprobs
    return given if given is not None else [entry.logprob for entry in logprobs.content or ()]


def _forced(request: TokenCompletionRequest, ids: TokenArray, logprobs: LogprobArray) -> CandidateSets | None:
    """`max_think` forces the closing tag once its limit is reached: each of these tokens was the only candidate.

    The server does not mark them, but they follow each other from the limit on and have log-prob 0.
    """
    limit = _extensions_of(request).max_think
    if limit is None or request.sampling.is_truncated or request.sampling.min_tokens:
        return None  # other exclusions are unknown, and the trainer must notice that
    free = np.flatnonzero(logprobs[limit:] != 0)
    end = limit + int(free[0]) if len(free) else len(ids)
    return CandidateSets.of([ids[i : i + 1] if limit <= i < end else () for i in range(len(ids))])


def _version_runs(choice: _Choice, version: int | None) -> tuple[VersionRun, ...]:
    if choice.weight_versions is not None:
        return tuple(VersionRun(version_of(span.version), span.end - span.start) for span in choice.weight_versions)
    return () if version is None or not choice.token_ids else (VersionRun(version, len(choice.token_ids)),)


# --- refusals ---


def refusal(url: str, answer: Answer, *, num_prompt: int = 0, max_tokens: int = 0) -> LudicError:
    """The error for a status other than 200."""
    message = error_of(answer.text)["message"]
    failed = f"{url} returned {answer.status}: {message}"
    if answer.status >= 500 and answer.status != 501:
        return RetryableError(failed, status=answer.status)
    limit = _CONTEXT.search(message)
    if answer.status == 400 and (limit or "max_tokens must be at least 1, got" in message):
        return too_long(num_prompt, max_tokens, int(limit[1]) if limit else num_prompt)
    if answer.status == 401:
        return ConfigError(f"{failed} Give VLLMChatClient the api_key that the server was started with.")
    if answer.status == 404:
        return ConfigError(f"{failed} Check the address, and that the model is the server's --served-model-name.")
    return EndpointError(failed, status=answer.status)


def lacks_generate(url: str, answer: Answer) -> bool:
    """Return True if the endpoint is off (403) or unknown (404), or returns neither text nor weight versions (vLLM 0.26).

    An unknown model also gives 404, but with a type."""
    if answer.status == 200:
        choices = _decoded(url, answer.data).choices
        return any(c.token_ids and c.finish_reason != "abort" and c.weight_versions is None for c in choices)
    return answer.status == 403 or (answer.status == 404 and error_of(answer.text).get("type") != "NotFoundError")
