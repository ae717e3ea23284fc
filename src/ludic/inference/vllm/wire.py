"""What goes over the wire to vLLM and comes back: request bodies and the reading of answers, for both token endpoints.

`/inference/v1/generate` takes and gives token ids and says which weights sampled which token; `/v1/completions` is the
older way, for servers without it. Pure functions: asking is `vllm_client`'s business.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ludic.inference.http import Answer, EndpointError, RetryableError, error_of
from ludic.types import (
    CandidateSets,
    ChatResponse,
    ConfigError,
    LogprobArray,
    LudicError,
    PromptTooLong,
    TokenArray,
    TokenCompletionRequest,
    TokenMismatch,
    VersionRun,
    VLLMExtensions,
)

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

_MAX_SEED = (1 << 63) - 1
_NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that is NaN or missing."""
_CONTEXT = re.compile(r"maximum (?:context length is|model length of) (\d+)")
"""How the two endpoints say that a prompt is too long."""
_BESIDE_SAMPLING = frozenset({"model", "request_id", "cache_salt", "priority", "reasoning_ended", "kv_transfer_params"})
"""Fields of a generate request itself; every other override belongs to its sampling parameters."""

Body = dict[str, Any]


class WrongExtensions(ConfigError, TypeError):
    """Settings for another kind of server."""


# --- requests ---


def generate_body(request: TokenCompletionRequest) -> Body:
    extensions = _extensions_of(request)
    sampling = _sampling_fields(request, extensions)
    if extensions.max_think is not None:
        sampling["extra_args"] = {"max_think": extensions.max_think}
    body: Body = {"model": request.model, "token_ids": request.prompt_token_ids.tolist(), "output_mode": "text"}
    for name, value in extensions.extra_body_overrides.items():
        if name == "vllm_xargs":
            sampling["extra_args"] = {**sampling.get("extra_args", {}), **value}
        else:
            (body if name in _BESIDE_SAMPLING else sampling)[name] = value
    return {**body, "sampling_params": sampling}


def completions_body(request: TokenCompletionRequest) -> Body:
    extensions = _extensions_of(request)
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
    """What was asked for in the end, overrides included."""
    return int(body.get("sampling_params", body)["max_tokens"])


def is_plain_sampling(request: TokenCompletionRequest) -> bool:
    """Whether tokens are drawn from the model's own distribution, so that raw log-probs are the right ones."""
    sampling = request.sampling
    penalties = (sampling.frequency_penalty, sampling.presence_penalty, _repetition_penalty(request) - 1.0)
    is_whole = sampling.top_p == 1 and not sampling.top_k and not sampling.min_p and not sampling.min_tokens
    return sampling.temperature in (0, 1) and is_whole and not any(penalties)


def _extensions_of(request: TokenCompletionRequest) -> VLLMExtensions:
    extensions = request.extensions
    if extensions is None:
        return VLLMExtensions()
    if not isinstance(extensions, VLLMExtensions):
        raise WrongExtensions(
            f"The request has {type(extensions).__name__} (kind {extensions.kind!r}); a vLLM server takes VLLMExtensions."
        )
    return extensions


def _repetition_penalty(request: TokenCompletionRequest) -> float:
    own = _extensions_of(request).repetition_penalty
    return own if own != 1.0 else request.sampling.repetition_penalty


def _sampling_fields(request: TokenCompletionRequest, extensions: VLLMExtensions) -> Body:
    """The fields that both endpoints spell alike."""
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
        fields["include_stop_str_in_output"] = True  # a stop token is part of the text, as with the local engine
    if sampling.stop_token_ids:
        fields["stop_token_ids"] = list(sampling.stop_token_ids)
    if request.seed is not None:
        fields["seed"] = request.seed & _MAX_SEED  # the server holds seeds as signed 64-bit integers
    if request.return_.return_chosen_logprobs:
        # 0 is the sampled token alone; anything more is that many of the likeliest beside it.
        wanted = request.return_.top_logprobs_k
        fields["logprobs"] = 0 if wanted == 1 else wanted
    return fields


# --- answers ---


class _Entry(msgspec.Struct, gc=False):
    logprob: float


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Entry] | None = None
    """Of /inference/v1/generate."""
    token_logprobs: list[float | None] | None = None
    """Of /v1/completions."""


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


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int | None = None


class _Completion(msgspec.Struct, gc=False):
    """What we read of an answer. Typed, since the rest is most of it: thousands of small dicts that nobody looks at."""

    choices: list[_Choice]
    usage: _Usage | None = None


_decoder = msgspec.json.Decoder(_Completion)


class Aborted(RetryableError):
    """Taken out of the batch by the server, which is well otherwise; what was sampled until then is no sample."""


def read_completion(url: str, data: bytes, request: TokenCompletionRequest, version: int | None = None) -> ChatResponse:
    """The answer of either endpoint. `version` is for the one that does not say: what was served when the request went out."""
    answer = _decoded(url, data)
    choice = _only_choice(answer)
    if choice.token_ids is None:
        raise EndpointError(
            "The server answered without token ids, and text alone cannot be trained on. It needs vLLM 0.10.2 or newer."
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
    )


def check_not_cut(response: ChatResponse, max_tokens: int) -> None:
    """vLLM shortens silently where prompt and max_tokens do not fit the context; to us that is a prompt that is too long."""
    prompt, sampled = len(response.prompt_token_ids), len(response.completion_token_ids)
    if response.finish_reason == "length" and sampled < max_tokens:
        raise too_long(prompt, max_tokens, prompt + sampled)


def too_long(num_prompt: int, max_tokens: int, limit: int) -> PromptTooLong:
    return PromptTooLong(
        num_prompt + max_tokens, limit, f"That is {num_prompt} of the prompt and max_tokens={max_tokens}."
    )


def version_of(label: str) -> int:
    """The version behind a label of weights. A server that nobody has pushed to says "default": version 0."""
    if label == "default":
        return 0
    if not label.isdecimal():
        raise EndpointError(
            f"The server calls its weights {label!r}; Ludic's publishers call them by the number of their version. Who else "
            "pushes weights to it?"
        )
    return int(label)


def _decoded(url: str, data: bytes) -> _Completion:
    try:
        return _decoder.decode(data)
    except msgspec.DecodeError as error:
        shown = data[:200].decode("utf-8", "replace")
        raise ConfigError(f"{url} does not answer as vLLM does: {shown!r} ({error}).") from error


def _only_choice(answer: _Completion) -> _Choice:
    if len(answer.choices) != 1:
        raise EndpointError(f"One completion was asked for, and {len(answer.choices)} came. Is n among the overrides?")
    choice = answer.choices[0]
    if choice.finish_reason == "abort":
        raise Aborted("The server aborted the request (it is being paused or shut down).")
    return choice


def _check_prompt(answer: _Completion, choice: _Choice, request: TokenCompletionRequest) -> None:
    sent, seen = request.prompt_token_ids, choice.prompt_token_ids
    num_seen = answer.usage.prompt_tokens if answer.usage is not None else None
    if (num_seen is None or num_seen == len(sent)) and (seen is None or np.array_equal(seen, sent)):
        return
    raise TokenMismatch(
        f"The server saw a prompt of {num_seen} tokens that differs from the {len(sent)} tokens sent; it must take token ids as "
        "they are."
    )


def _read_logprobs(logprobs: _Logprobs, num_tokens: int) -> LogprobArray:
    given = logprobs.token_logprobs
    chosen = given if given is not None else [entry.logprob for entry in logprobs.content or ()]
    values = np.array(chosen, dtype=np.float32)  # None becomes NaN
    if len(values) != num_tokens:
        raise EndpointError(f"The server gave {len(values)} log-probs for {num_tokens} tokens.")
    if num_tokens and not values.min() > _NO_LOGPROB:
        raise EndpointError("The server has no log-prob for a token that it sampled. Are its weights finite?")
    return values


def _forced(request: TokenCompletionRequest, ids: TokenArray, logprobs: LogprobArray) -> CandidateSets | None:
    """`max_think` forces the closing tag once its limit is reached: each of these tokens was the only candidate.

    Nobody says which they are, but they follow each other from the limit on, and are certain.
    """
    limit = _extensions_of(request).max_think
    if limit is None or request.sampling.is_truncated or request.sampling.min_tokens:
        return None  # what else was ruled out is not known; whoever trains must hear of that
    free = np.flatnonzero(logprobs[limit:] != 0)
    end = limit + int(free[0]) if len(free) else len(ids)
    return CandidateSets.of([ids[i : i + 1] if limit <= i < end else () for i in range(len(ids))])


def _version_runs(choice: _Choice, version: int | None) -> tuple[VersionRun, ...]:
    if choice.weight_versions is not None:
        return tuple(VersionRun(version_of(span.version), span.end - span.start) for span in choice.weight_versions)
    return () if version is None or not choice.token_ids else (VersionRun(version, len(choice.token_ids)),)


# --- refusals ---


def refusal(url: str, answer: Answer, *, num_prompt: int = 0, max_tokens: int = 0) -> LudicError:
    """What a status other than 200 means to whoever asked."""
    error = error_of(answer.text)
    message = error["message"]
    said = f"{url} answered {answer.status}: {message}"
    if answer.status >= 500 and answer.status != 501:
        return RetryableError(said, status=answer.status)
    if answer.status == 400 and _is_about_length(error):
        return too_long(num_prompt, max_tokens, _limit_in(message) or num_prompt)
    if answer.status == 401:
        return ConfigError(f"{said} Give VLLMChatClient the api_key that the server was started with.")
    if answer.status == 404:
        return ConfigError(f"{said} Is the address right, and is the model the server's --served-model-name?")
    return EndpointError(said, status=answer.status)


def lacks_generate(answer: Answer) -> bool:
    """Whether the endpoint is off (403) or unknown (404); a model that is unknown also gives 404, but is named."""
    return answer.status == 403 or (answer.status == 404 and error_of(answer.text).get("type") != "NotFoundError")


def _is_about_length(error: Mapping[str, Any]) -> bool:
    message = error["message"]
    return _CONTEXT.search(message) is not None or "max_tokens must be at least 1, got" in message


def _limit_in(message: str) -> int | None:
    found = _CONTEXT.search(message)
    return int(found.group(1)) if found else None
