"""Requests to a policy server, and its answers.

Requests are token ids in, responses token ids out. Tool schemas never travel: the chat template writes them
into the prompt.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ludic.types.errors import ConfigError
from ludic.types.messages import JSON, ImageSpan, MessageSpan
from ludic.types.tokens import CandidateSets, ExpertArray, TokenArray, TokenTrace, VersionRun, token_array

logger = logging.getLogger(__name__)

MAX_COUNT = 2**31 - 1
"""The largest `max_tokens`, `min_tokens` and `top_k`: GPUs hold them in 32 bits."""
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_TOKEN_IDS = 32, 256, 1024
"""Stop strings are searched after each token of each sequence: many long ones would slow down the whole batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings of sampling. No accepted value turns finite logits into NaN, infinity or an empty choice."""

    temperature: float = 0.7
    """Logits are divided by it while sampling; 0 is greedy."""
    max_tokens: int = 256
    top_p: float = 1.0
    """Draw only from the likeliest tokens that together have this probability."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    stop: str | Sequence[str] | None = None
    """Texts that end the completion; its tokens include them, its text does not."""
    top_k: int = 0
    """Draw only from the k most likely tokens; 0 = all."""
    min_p: float = 0.0
    """Draw only from tokens at least this fraction as likely as the likeliest."""
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    """No end-of-sequence or stop token before this many."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the completion, besides the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Continue to max_tokens after an end-of-sequence token (for benchmarks)."""

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
            self._require(isinstance(getattr(self, name), (int, float, np.integer, np.floating)), name, "a number")
        for name in ("max_tokens", "min_tokens", "top_k"):
            self._require(isinstance(getattr(self, name), (int, np.integer)), name, "a whole number")
        # Written so that NaN, which compares false with everything, is refused.
        is_temperature = self.temperature == 0 or 1e-3 <= self.temperature <= 1e6
        self._require(is_temperature, "temperature", "0 (greedy), or at least 0.001 and at most 1e6")
        self._require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        self._require(0 <= self.min_p < 1, "min_p", "at least 0 and below 1")
        self._require(0 <= self.top_k <= MAX_COUNT, "top_k", f"0 (off) or more, and at most {MAX_COUNT}")
        for name in ("frequency_penalty", "presence_penalty"):
            self._require(-2 <= getattr(self, name) <= 2, name, "between -2 and 2")
        self._require(0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "between 0.01 and 100 (1 is off)")
        self._require(1 <= self.max_tokens <= MAX_COUNT, "max_tokens", f"at least 1 and at most {MAX_COUNT}")
        is_min = 0 <= self.min_tokens <= self.max_tokens
        self._require(is_min, "min_tokens", f"between 0 and max_tokens={self.max_tokens}")
        self._check_stops()

    def _check_stops(self) -> None:
        wanted = f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARS} characters that can be encoded"
        self._require(self.stop is None or isinstance(self.stop, (str, Sequence)), "stop", wanted)
        stops = [self.stop] if isinstance(self.stop, str) else list(self.stop or ())
        self._require(len(stops) <= MAX_STOPS, "stop", wanted)
        for stop in stops:
            self._require(isinstance(stop, str) and 1 <= len(stop) <= MAX_STOP_CHARS, "stop", wanted)
            # Half a surrogate pair equals no text.
            self._require(stop.encode("utf-8", "ignore").decode() == stop, "stop", wanted)
        ids, wanted = self.stop_token_ids, f"at most {MAX_STOP_TOKEN_IDS} token ids"
        self._require(isinstance(ids, Sequence) and len(ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", wanted)
        self._require(all(isinstance(i, (int, np.integer)) for i in ids), "stop_token_ids", wanted)

    def _require(self, is_fitting: bool, name: str, wanted: str) -> None:
        if not is_fitting:
            raise ConfigError(f"SamplingParams.{name}={getattr(self, name)!r:.80}; it must be {wanted}.")

    @property
    def is_truncated(self) -> bool:
        """True if tokens are drawn from a part of the vocabulary only."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def to_openai_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "top_p": self.top_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
        }
        if self.stop is not None:
            kwargs["stop"] = self.stop if isinstance(self.stop, str) else list(self.stop)
        return kwargs


SamplingConfig = SamplingParams


@dataclass(frozen=True, kw_only=True, slots=True)
class ReturnSpec:
    """Data that the server returns besides the text."""

    return_token_ids: bool = True
    return_chosen_logprobs: bool = False
    top_logprobs_k: int = 1
    return_candidates: bool = True
    """If the request truncates the distribution, return with the log-probs the tokens that each one was drawn from (up to the
    vocabulary's size per token). A trainer needs them; a client that only shows log-probs does not."""

    def __post_init__(self) -> None:
        if self.top_logprobs_k <= 0:
            raise ConfigError(f"ReturnSpec.top_logprobs_k={self.top_logprobs_k}; it must be at least 1.")

    @classmethod
    def for_eval(cls, return_token_ids: bool = True) -> "ReturnSpec":
        return cls(return_token_ids=return_token_ids)

    @classmethod
    def for_rl(cls, top_logprobs_k: int = 1) -> "ReturnSpec":
        return cls(return_token_ids=True, return_chosen_logprobs=True, top_logprobs_k=top_logprobs_k)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """Tool schemas that the chat template writes into the prompt; they are never sent to the server."""

    tools: Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class BackendExtensions:
    """Base of settings for one kind of server."""

    kind: str

    def to_dict(self) -> dict[str, JSON]:
        return {"kind": self.kind}


@dataclass(frozen=True, kw_only=True, slots=True)
class VLLMExtensions(BackendExtensions):
    """Settings of vLLM."""

    max_think: int | None = None
    """Close the think block by force after this many generated tokens."""
    repetition_penalty: float = 1.0
    extra_body_overrides: Mapping[str, Any] = field(default_factory=dict)
    """Merged last into the request body, for instance {"stop_token_ids": [...]}."""
    kind: str = "vllm"

    def __post_init__(self) -> None:
        if self.max_think is not None and (isinstance(self.max_think, bool) or self.max_think < 1):
            raise ConfigError(f"VLLMExtensions.max_think={self.max_think!r}; it must be a positive int or None.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError(
                f"VLLMExtensions.repetition_penalty={self.repetition_penalty}; it must be between 0.01 and 100 (1 is off)."
            )

    def to_dict(self) -> dict[str, JSON]:
        return {
            "kind": self.kind,
            "max_think": self.max_think,
            "repetition_penalty": self.repetition_penalty,
            "extra_body_overrides": dict(self.extra_body_overrides),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceSpec:
    """Settings of a run's requests to its policy; carried by a RolloutRequest."""

    sampling: SamplingParams = SamplingParams()
    return_: ReturnSpec = ReturnSpec()
    extensions: BackendExtensions | None = None
    message_spans: bool = False
    """Keep which message each token of a prompt came from (`TokenTrace.message_spans`), for training on chosen roles."""


@dataclass(slots=True, eq=False)
class TokenCompletionRequest:
    """One model call: token ids in."""

    model: str
    prompt_token_ids: TokenArray
    """Sent as they are; a client must not re-tokenise."""
    prompt_text: str | None = None
    """For display and logs; None for continuations, which do not decode their prompt."""
    sampling: SamplingParams = SamplingParams()
    return_: ReturnSpec = ReturnSpec()
    seed: int | None = None
    extensions: BackendExtensions | None = None
    images: tuple[ImageSpan, ...] = ()
    """The pictures of the prompt, in order, and the tokens that stand for them."""
    adapter: str | None = None
    """Name of the LoRA adapter that answers, of an embedded engine with adapters; None is the model itself."""

    def __post_init__(self) -> None:
        self.prompt_token_ids = token_array(self.prompt_token_ids, "prompt_token_ids")
        if self.seed is not None and type(self.seed) is not int and not isinstance(self.seed, (int, np.integer)):
            raise ConfigError(f"TokenCompletionRequest.seed={self.seed!r:.80}; it must be a whole number or None.")


@dataclass(kw_only=True, slots=True, eq=False)
class ChatResponse:
    """One answer of a policy server, normalised: token ids out."""

    text: str
    prompt_token_ids: TokenArray
    completion_token_ids: TokenArray
    completion_logprobs: Sequence[float] | Any | None = None
    finish_reason: str | None = None
    version_runs: tuple[VersionRun, ...] = ()
    candidates: CandidateSets | None = None
    """The candidates of each completion token, if the request truncates the distribution and the server reports it."""
    experts: ExpertArray | None = None
    """Experts of a mixture for each token of prompt and completion, if the server records them."""

    def __post_init__(self) -> None:
        logprobs = self.completion_logprobs
        if logprobs is not None and len(logprobs) != len(self.completion_token_ids):
            logger.warning(
                "ChatResponse has %d completion tokens but %d logprobs; no trace can be made of it.",
                len(self.completion_token_ids),
                len(logprobs),
            )

    def to_info(self) -> dict[str, Any]:
        info: dict[str, Any] = {"completion": self.text}
        if self.finish_reason is not None:
            info["finish_reason"] = self.finish_reason
        return info

    def merge_into_info(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return {**info, **self.to_info()}

    def to_trace(
        self,
        *,
        prompt_token_ids: TokenArray | None = None,
        temperature: float | None = None,
        untrainable_sampling: str | None = None,
        images: tuple[ImageSpan, ...] = (),
        message_spans: tuple[MessageSpan, ...] = (),
    ) -> TokenTrace:
        """The call in token space, with facts of its request."""
        return TokenTrace(
            self.prompt_token_ids if prompt_token_ids is None else prompt_token_ids,
            self.completion_token_ids,
            completion_logprobs=self.completion_logprobs,
            finish_reason=self.finish_reason,
            version_runs=self.version_runs,
            temperature=temperature,
            candidates=self.candidates,
            untrainable_sampling=untrainable_sampling,
            images=images,
            experts=self.experts,
            message_spans=message_spans,
        )


# Which sampling settings a trainer can reproduce. A ratio compares the probability of a token now and when it was drawn, under
# distributions of the same kind. The trainer applies the temperature, and top-p, top-k and min-p if the sampler recorded the
# remaining tokens (`CandidateSets`). It does not reproduce penalties, which change with every written token.

_TRUNCATION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Values that rule nothing out."""
_PENALTIES = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
_OVERRIDES = frozenset(
    {*_TRUNCATION, *_PENALTIES, "min_tokens", "temperature", "logit_bias", "allowed_token_ids", "bad_words"}
)


def untrainable_settings(
    sampling: SamplingParams, extensions: BackendExtensions | None = None, candidates: CandidateSets | None = None
) -> str | None:
    """The settings that prevent a correct ratio for these tokens, such as "top_p=0.9, top_k=50"; None if there are none."""
    if extensions is None and _is_plain(sampling):  # the usual case, on the path of every model call
        return None
    found = {name: getattr(sampling, name) for name in _PENALTIES if getattr(sampling, name) != _PENALTIES[name]}
    if candidates is None and sampling.temperature > 0:
        found |= {name: getattr(sampling, name) for name in _TRUNCATION if getattr(sampling, name) != _TRUNCATION[name]}
    if candidates is None and sampling.min_tokens:
        found["min_tokens"] = sampling.min_tokens
    if isinstance(extensions, VLLMExtensions):
        if extensions.repetition_penalty != 1.0:
            found["repetition_penalty"] = extensions.repetition_penalty
        found |= {name: value for name, value in extensions.extra_body_overrides.items() if name in _OVERRIDES}
    return ", ".join(f"{name}={value}" for name, value in found.items()) or None


def _is_plain(sampling: SamplingParams) -> bool:
    """True if only the temperature shapes the distribution."""
    return (
        sampling.top_p == 1.0
        and not (sampling.top_k or sampling.min_p or sampling.min_tokens)
        and not (sampling.frequency_penalty or sampling.presence_penalty)
        and sampling.repetition_penalty == 1.0
    )


def require_trainable_reply(request: TokenCompletionRequest, response: ChatResponse) -> str | None:
    """`untrainable_settings` of a reply; raises ConfigError if its log-probs were requested, which means training.

    So the run fails at the first reply and not at the first batch.
    """
    found = untrainable_settings(request.sampling, request.extensions, response.candidates)
    if found is not None and request.return_.return_chosen_logprobs:
        raise ConfigError(
            f"Log-probs of the sampled tokens were requested for training, but with {found} a trainer cannot reproduce their "
            "distribution, and ratios would be wrong. Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no penalties. Only "
            "the embedded inference engine (LocalEngine) records the tokens that top_p, top_k and min_p leave; with it they can "
            "stay. If no ratio is taken (evaluation, SFT, RFT), use ReturnSpec.for_eval()."
        )
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunk:
    """Tokens that a stream has sampled since its last chunk."""

    token_ids: list[int]
    logprobs: list[float]
    response: ChatResponse | None = None
    """The whole completion; on the last chunk only."""
