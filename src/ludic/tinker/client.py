"""`TinkerChatClient`: weights at Tinker as a policy. Token ids in; token ids, log-probs and the version out.

It samples from the sampling client it was handed last; the learner hands it a new one with every version. A request
that is under way when that happens stays with the weights it began with, so a completion has one version throughout.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ludic.inference.http import EndpointError, ResponseTimeout
from ludic.tinker.service import TinkerConfig, connect, context_length, sdk, tinker_errors
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LogprobArray,
    PromptTooLong,
    SamplingParams,
    TokenArray,
    TokenCompletionRequest,
    VersionRun,
    float_array,
    token_array,
)

if TYPE_CHECKING:
    import tinker

_UNKNOWN_TO_TINKER = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "min_tokens")
_USUAL = SamplingParams()


class _Served(NamedTuple):
    """What is sampled from; replaced as a whole."""

    sampler: "tinker.SamplingClient"
    version: int


class TinkerChatClient:
    """Completions from one set of weights after another."""

    def __init__(
        self,
        sampler: "tinker.SamplingClient",
        tokenizer: Any,
        *,
        version: int = 0,
        max_context: int | None = None,
        request_timeout_s: float | None = 1800.0,
        service: "tinker.ServiceClient | None" = None,
    ) -> None:
        """`tokenizer` is the model's: it makes text of tokens, and knows which token ends a reply.

        Prompts that leave no room in `max_context` are refused here. `request_timeout_s` bounds a completion with all the
        retries of the SDK. `service` is ended by `close`, where this client is the only one that uses it.
        """
        self.tokenizer, self.max_context = tokenizer, max_context
        self._request_timeout_s, self._service = request_timeout_s, service
        self._served = _Served(sampler, version)

    @classmethod
    def connect(
        cls, config: TinkerConfig, *, model_path: str | None = None, tokenizer: Any = None
    ) -> "TinkerChatClient":
        """To sample only: from saved sampler weights (tinker://…), or else from the base model. Blocks until it is there."""
        service = connect(config)
        max_context = context_length(service, config)
        with tinker_errors(f"sample from {model_path or config.base_model}", config):
            base_model = config.base_model if model_path is None else None
            sampler = service.create_sampling_client(model_path=model_path, base_model=base_model)
        return cls(sampler, tokenizer or sampler.get_tokenizer(), max_context=max_context, service=service)

    # --- completions ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task abandons it; whether the service goes on is the service's choice."""
        self._check(request)
        sampler, version = self._served
        types = sdk().types
        params = types.SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k or -1,
            # 63 bits: what is signed somewhere on the way must not overflow.
            seed=None if request.seed is None else request.seed & ((1 << 63) - 1),
            stop=self._stops(request.sampling),
        )
        prompt = types.ModelInput.from_ints(request.prompt_token_ids.tolist())
        try:
            with tinker_errors("sample"):
                async with asyncio.timeout(self._request_timeout_s) as deadline:
                    answer = await sampler.sample_async(prompt=prompt, num_samples=1, sampling_params=params)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ResponseTimeout(
                f"Tinker was asked to sample, and there was no completion within request_timeout_s="
                f"{self._request_timeout_s:g}."
            ) from error
        return self._read(request, answer.sequences[0], version), {}

    def _read(self, request: TokenCompletionRequest, sequence: Any, version: int) -> ChatResponse:
        tokens, logprobs = token_array(sequence.tokens), sequence.logprobs
        if logprobs is None or len(logprobs) != len(tokens):
            found = "none" if logprobs is None else str(len(logprobs))
            raise EndpointError(f"Tinker sampled {len(tokens)} tokens and gave {found} log-probs for them.")
        length, text = self._end_of(tokens, request.sampling)
        is_over = length < len(tokens) or sequence.stop_reason == "stop" or text is not None
        kept: LogprobArray = float_array(logprobs, "logprobs")[:length]
        return ChatResponse(
            text=text if text is not None else self._decode(tokens[:length]),
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=tokens[:length],
            completion_logprobs=kept if request.return_.return_chosen_logprobs else None,
            finish_reason="stop" if is_over or self._ends(tokens[:length], request.sampling) else "length",
            version_runs=(VersionRun(version, length),) if length else (),
        )

    def _decode(self, tokens: TokenArray) -> str:
        text: str = self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
        return text

    # --- ends ---

    def _stops(self, sampling: SamplingParams) -> list[str] | list[int] | None:
        """Tinker takes texts or tokens but not both, and what is given takes the place of the model's own end."""
        ends = sorted(self._end_ids(sampling))
        if sampling.stop:
            # A special token without text is found in the tokens afterwards.
            marks = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ends]
            return [*_stop_texts(sampling), *(mark for mark in marks if mark)]
        return ends if sampling.ignore_eos or sampling.stop_token_ids else None

    def _end_ids(self, sampling: SamplingParams) -> set[int]:
        own = self.tokenizer.eos_token_id
        given = set(sampling.stop_token_ids)
        return given if sampling.ignore_eos or own is None else given | {int(own)}

    def _end_of(self, tokens: TokenArray, sampling: SamplingParams) -> tuple[int, str | None]:
        """(how many tokens belong to the completion, its text if a stop string ended it).

        What lies behind the end was sampled after it, and dropping it leaves exactly what stopping there would have given.
        """
        ends = np.flatnonzero(np.isin(tokens, list(self._end_ids(sampling))))
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        stops = _stop_texts(sampling)
        if not any(stop in self._decode(tokens[:length]) for stop in stops):
            return length, None
        for count in range(1, length + 1):
            text = self._decode(tokens[:count])
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                return count, text[: min(found)]
        raise AssertionError("the whole of it has a stop string")

    def _ends(self, tokens: TokenArray, sampling: SamplingParams) -> bool:
        return len(tokens) > 0 and int(tokens[-1]) in self._end_ids(sampling)

    # --- checks ---

    def _check(self, request: TokenCompletionRequest) -> None:
        sampling, num_prompt = request.sampling, len(request.prompt_token_ids)
        if not num_prompt:
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        if self.max_context is not None and num_prompt + sampling.max_tokens > self.max_context:
            advice = f"That is {num_prompt} of the prompt and max_tokens={sampling.max_tokens}."
            raise PromptTooLong(num_prompt + sampling.max_tokens, self.max_context, advice)
        unknown = [name for name in _UNKNOWN_TO_TINKER if getattr(sampling, name) != getattr(_USUAL, name)]
        if unknown or request.extensions is not None:
            what = ", ".join(unknown) or type(request.extensions).__name__
            raise ConfigError(f"Tinker's sampler does not know {what}. Leave it out.")
        is_plain = sampling.temperature == 1 and sampling.top_p == 1 and sampling.top_k == 0
        if request.return_.return_chosen_logprobs and not is_plain:
            raise ConfigError(
                f"temperature={sampling.temperature:g}, top_p={sampling.top_p:g}, top_k={sampling.top_k}: Tinker trains at "
                "temperature 1 on the whole vocabulary, so the log-probs of tokens sampled otherwise are not those of the policy "
                "that it trains. Sample with temperature=1 and nothing cut off, or without log-probs (ReturnSpec.for_eval())."
            )

    # --- versions and weights ---

    @property
    def version(self) -> int:
        return self._served.version

    async def get_policy_version(self) -> int:
        return self.version

    def use(self, sampler: "tinker.SamplingClient", version: int) -> None:
        """Sample from these weights from now on."""
        self._served = _Served(sampler, version)

    def sync_weights(
        self, params: Mapping[str, Any], *, timeout_s: float = 600.0, version: str | int | None = None
    ) -> str:
        raise ConfigError(
            "Tinker's weights are trained where they are served and cannot be sent there. Train with TinkerTrainer(model="
            "TinkerPolicy(…)), which publishes each version to this client."
        )

    def close(self) -> None:
        """End the session of a client that `connect` made; a policy's ends with the policy."""
        if self._service is not None:
            with tinker_errors("end the session"):
                self._service.close("success").result()


def _stop_texts(sampling: SamplingParams) -> Sequence[str]:
    return [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
