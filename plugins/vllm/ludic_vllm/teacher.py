"""A teacher behind a vLLM server: its prompt log-probs score what a student has sampled."""

import msgspec
import numpy as np

from ludic.http.client import EndpointError
from ludic.inference.teachers import HasVocabulary, tokenizer_fingerprint
from ludic.types import (
    ConfigError,
    LogprobArray,
    SamplingParams,
    TokenArray,
    TokenCompletionRequest,
    TokenIds,
    VLLMExtensions,
    token_array,
)
from ludic_vllm.client import VLLMChatClient
from ludic_vllm.wire import NO_LOGPROB, LogprobEntry


class VLLMTeacher:
    """A model behind a vLLM server. Its context needs room for one token more than is scored."""

    def __init__(self, client: VLLMChatClient, model: str, tokenizer: HasVocabulary) -> None:
        """`tokenizer` is that of `model`: the server does not say what its ids mean."""
        self._client, self._model = client, model
        self.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        if temperature != 1:
            raise ConfigError(
                f"A vLLM server scores prompts at temperature 1, but these tokens were sampled at {temperature:g}. Sample at 1, "
                "or use a LocalTeacher, which scores at any temperature."
            )
        prompt, completion = token_array(prompt_token_ids), token_array(completion_token_ids)
        if not len(prompt):
            raise ConfigError("score_tokens needs at least one prompt token: the first token has no log-probability.")
        tokens = np.concatenate([prompt, completion])
        request = TokenCompletionRequest(
            model=self._model,
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=1.0, max_tokens=1),  # the one token that must be sampled is discarded
            # 1 rather than 0: some servers take 0 for "not requested".
            extensions=VLLMExtensions(extra_body_overrides={"prompt_logprobs": 1}),
        )
        _, info = await self._client.complete_tokens(request)
        return _read_prompt_logprobs(info["raw_response"], tokens)[len(prompt) :]


_PromptLogprobs = list[dict[int, LogprobEntry] | None]


class _Choice(msgspec.Struct, gc=False):
    prompt_logprobs: _PromptLogprobs | None = None
    """Field of /v1/completions."""


class _Scored(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_logprobs: _PromptLogprobs | None = None
    """Field of /inference/v1/generate."""


_decoder = msgspec.json.Decoder(_Scored)


def _read_prompt_logprobs(data: bytes, tokens: TokenArray) -> LogprobArray:
    """Log-prob of every prompt token; 0 for the first, which has none."""
    try:
        answer = _decoder.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise EndpointError(f"The server's prompt log-probs are not in vLLM's format: {error}.") from error
    given = answer.prompt_logprobs if answer.prompt_logprobs is not None else answer.choices[0].prompt_logprobs
    if given is None or len(given) != len(tokens):
        found = "none" if given is None else f"{len(given)}"
        raise EndpointError(f"Log-probs of {len(tokens)} prompt tokens were requested, but {found} came.")
    values = [_logprob_of(entries, token) for entries, token in zip(given[1:], tokens[1:].tolist(), strict=True)]
    return np.array([0.0, *values], dtype=np.float32)


def _logprob_of(entries: dict[int, LogprobEntry] | None, token: int) -> float:
    if entries is None or token not in entries:
        raise EndpointError(f"The server returned no log-prob for prompt token {token}.")
    logprob = entries[token].logprob
    if not logprob > NO_LOGPROB:
        raise EndpointError(
            f"The teacher's log-prob of token {token} is not finite. Check that its weights are finite and its token ids match."
        )
    return logprob
