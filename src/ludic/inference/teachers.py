"""Teachers: models that score tokens which a student has sampled.

Both take the ids as they are and give one log-prob per completion token (`ludic.types.TeacherScorer`). `LocalTeacher` asks
an embedded engine, `VLLMTeacher` a vLLM server, which has log-probs of prompts.
"""

from typing import Any, Protocol

import msgspec
import numpy as np

from ludic.inference.http import EndpointError
from ludic.inference.templates.fingerprint import HasVocabulary, tokenizer_fingerprint
from ludic.inference.vllm.client import VLLMChatClient
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


class ScoringEngine(Protocol):
    """What a local teacher needs; `LocalEngine` has it."""

    tokenizer: Any

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray: ...


class LocalTeacher:
    """The model of an embedded engine."""

    def __init__(self, engine: ScoringEngine) -> None:
        self._engine = engine
        self._fingerprint = tokenizer_fingerprint(engine.tokenizer)

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._fingerprint

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        return await self._engine.score_tokens(prompt_token_ids, completion_token_ids, temperature=temperature)


class VLLMTeacher:
    """A model behind a vLLM server. The context must have room for one token more than is scored."""

    def __init__(self, client: VLLMChatClient, model: str, tokenizer: HasVocabulary) -> None:
        """`tokenizer` is the one that belongs to `model`: the server does not say what its ids mean."""
        self._client, self._model = client, model
        self._fingerprint = tokenizer_fingerprint(tokenizer)

    @property
    def tokenizer_fingerprint(self) -> str:
        return self._fingerprint

    async def score_tokens(
        self, prompt_token_ids: TokenIds, completion_token_ids: TokenIds, *, temperature: float = 1.0
    ) -> LogprobArray:
        if temperature != 1:
            raise ConfigError(
                f"A vLLM server scores prompts at temperature 1, but these tokens were sampled at {temperature:g}. Sample at 1, "
                "or use a LocalTeacher, which scores at any."
            )
        prompt, completion = token_array(prompt_token_ids), token_array(completion_token_ids)
        if not len(prompt):
            raise ConfigError("score_tokens needs at least one prompt token: the first token has no log-probability.")
        tokens = np.concatenate([prompt, completion])
        _, info = await self._client.complete_tokens(self._request(tokens))
        return read_prompt_logprobs(info["raw_response"], tokens)[len(prompt) :]

    def _request(self, tokens: TokenArray) -> TokenCompletionRequest:
        """All of it is prompt; the one token that has to be sampled is thrown away."""
        return TokenCompletionRequest(
            model=self._model,
            prompt_token_ids=tokens,
            sampling=SamplingParams(temperature=1.0, max_tokens=1),
            # One beside the token itself: whoever takes 0 for "not asked" still answers.
            extensions=VLLMExtensions(extra_body_overrides={"prompt_logprobs": 1}),
        )


# --- vLLM's answer ---

_NO_LOGPROB = -9999.0
"""What vLLM writes for a log-prob that is NaN or −∞."""


class _Entry(msgspec.Struct, gc=False):
    logprob: float


_PromptLogprobs = list[dict[int, _Entry] | None]


class _Choice(msgspec.Struct, gc=False):
    prompt_logprobs: _PromptLogprobs | None = None
    """Of /v1/completions."""


class _Scored(msgspec.Struct, gc=False):
    choices: list[_Choice]
    prompt_logprobs: _PromptLogprobs | None = None
    """Of /inference/v1/generate."""


_decoder = msgspec.json.Decoder(_Scored)


def read_prompt_logprobs(data: bytes, tokens: TokenArray) -> LogprobArray:
    """Log-prob of every token of the prompt; the first has none, and says 0."""
    try:
        answer = _decoder.decode(data)
    except msgspec.DecodeError as error:
        raise EndpointError(f"The server does not give log-probs of a prompt as vLLM does: {error}.") from error
    given = answer.prompt_logprobs if answer.prompt_logprobs is not None else answer.choices[0].prompt_logprobs
    if given is None or len(given) != len(tokens):
        found = "none" if given is None else f"{len(given)}"
        raise EndpointError(f"Log-probs of a prompt of {len(tokens)} tokens were asked for, and {found} came.")
    values = [_logprob_of(entries, token) for entries, token in zip(given[1:], tokens[1:].tolist(), strict=True)]
    return np.array([0.0, *values], dtype=np.float32)


def _logprob_of(entries: dict[int, _Entry] | None, token: int) -> float:
    if entries is None or token not in entries:
        raise EndpointError(f"The server gave no log-prob for token {token} of the prompt.")
    logprob = entries[token].logprob
    if not logprob > _NO_LOGPROB:
        raise EndpointError(
            f"The teacher gives token {token} no finite log-prob. Are its weights finite, and its ids ours?"
        )
    return logprob
