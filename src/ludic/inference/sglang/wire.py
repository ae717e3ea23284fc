"""The body of a request to SGLang's `/generate`, and its response. Pure functions; names and shapes as in SGLang 0.5.23.

By default SGLang's log-probs are those after the temperature, before top-p, top-k and min-p, which a trainer reproduces.
"""

import re
from typing import Any

import msgspec
import numpy as np

from ludic.inference.http import Answer, EndpointError, RetryableError, error_of
from ludic.inference.vllm.routing import Aborted
from ludic.inference.vllm.wire import too_long, version_of
from ludic.types import (
    ChatResponse,
    ConfigError,
    LudicError,
    TokenCompletionRequest,
    TokenMismatch,
    VersionRun,
    VLLMExtensions,
    token_array,
)

GENERATE = "/generate"
NOT_SGLANG = "does not respond like SGLang"
_CONTEXT = re.compile(r"(?:context length \(|maximum context length of )(\d+)")
"""SGLang's two messages about a prompt that is too long."""

Body = dict[str, Any]


def generate_body(request: TokenCompletionRequest) -> Body:
    """The body for one completion; ConfigError for what SGLang does not take."""
    if request.images:
        raise ConfigError("The SGLang client sends tokens alone; pictures need engine = 'vllm' or 'local'.")
    if isinstance(request.extensions, VLLMExtensions):
        raise ConfigError("VLLMExtensions are for vLLM servers; leave extensions out for SGLang.")
    sampling = request.sampling
    params: Body = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_new_tokens": sampling.min_tokens,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": True,
    }
    if sampling.stop:
        params["stop"] = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop)
    if len(sampling.stop_token_ids):
        params["stop_token_ids"] = [int(token) for token in sampling.stop_token_ids]
    if request.seed is not None:
        params["sampling_seed"] = int(request.seed) & (2**63 - 1)
    return {
        "input_ids": request.prompt_token_ids.tolist(),
        "sampling_params": params,
        "return_logprob": request.return_.return_chosen_logprobs,
        "stream": False,
    }


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class _Meta(msgspec.Struct, gc=False):
    finish_reason: dict[str, Any] | None
    prompt_tokens: int
    weight_version: str = "default"
    weight_versions: list[_Span] | None = None
    output_token_logprobs: list[tuple[float | None, int, str | None]] | None = None


class _Generated(msgspec.Struct, gc=False):
    text: str
    output_ids: list[int]
    meta_info: _Meta


_decoder = msgspec.json.Decoder(_Generated)


def read_generated(url: str, data: bytes, request: TokenCompletionRequest) -> ChatResponse:
    """The response of `/generate`; an aborted one is an `Aborted`, which can be sent again."""
    try:
        answer = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{url} {NOT_SGLANG}: {error}. It returned {data[:200]!r}.") from error
    meta, reason = answer.meta_info, answer.meta_info.finish_reason or {}
    if reason.get("type") == "abort":
        raise Aborted(f"{url} aborted the request: {reason.get('message')}.")
    if meta.prompt_tokens != len(request.prompt_token_ids):
        raise TokenMismatch(
            f"{url} saw a prompt of {meta.prompt_tokens} tokens, not the {len(request.prompt_token_ids)} tokens sent; it must "
            "take token ids unchanged."
        )
    ids, logprobs = token_array(answer.output_ids), None
    if request.return_.return_chosen_logprobs:
        logprobs = _logprobs(url, meta, ids.tolist())
    finished = str(reason["type"]) if "type" in reason else None
    if finished == "length" and len(ids) < request.sampling.max_tokens:  # the server shortened it to its context
        num_prompt = len(request.prompt_token_ids)
        raise too_long(num_prompt, request.sampling.max_tokens, num_prompt + len(ids))
    return ChatResponse(
        text=answer.text,
        prompt_token_ids=request.prompt_token_ids,
        completion_token_ids=ids,
        completion_logprobs=logprobs,
        finish_reason=finished,
        version_runs=_version_runs(url, meta, len(ids)),
    )


def _logprobs(url: str, meta: _Meta, ids: list[int]) -> Any:
    entries = meta.output_token_logprobs
    if entries is None or [token for _, token, _ in entries] != ids:
        raise EndpointError(f"{url} returned log-probs that are not those of its {len(ids)} tokens.")
    values = np.array([value for value, _, _ in entries], dtype=np.float32)  # None becomes NaN
    if not np.isfinite(values).all():
        raise EndpointError(f"{url} returned log-probs that are not finite.")
    return values


def _version_runs(url: str, meta: _Meta, num_tokens: int) -> tuple[VersionRun, ...]:
    """Which weights sampled which tokens; SGLang says it where an update came in between."""
    if meta.weight_versions is None:
        return (VersionRun(version_of(meta.weight_version), num_tokens),) if num_tokens else ()
    runs = tuple(VersionRun(version_of(span.version), span.end - span.start) for span in meta.weight_versions)
    runs = tuple(run for run in runs if run.length)
    if sum(run.length for run in runs) != num_tokens:
        raise EndpointError(f"{url} returned weight versions that do not cover its {num_tokens} tokens.")
    return runs


def refusal(url: str, answer: Answer, request: TokenCompletionRequest | None = None) -> LudicError:
    """The error for a status other than 200."""
    message = str(error_of(answer.text)["message"])
    failed = f"{url} returned {answer.status}: {message}"
    if answer.status >= 500 and answer.status != 501:
        return RetryableError(failed, status=answer.status)
    limit = _CONTEXT.search(message)
    if answer.status == 400 and limit and request is not None:
        return too_long(len(request.prompt_token_ids), request.sampling.max_tokens, int(limit[1]))
    if answer.status == 401:
        return ConfigError(f"{failed} Give SGLangChatClient the api_key that the server was started with.")
    if answer.status == 404:
        return ConfigError(f"{failed} Check the address: {url} {NOT_SGLANG}.")
    return EndpointError(failed, status=answer.status)
