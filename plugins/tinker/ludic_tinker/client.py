"""The connection to Tinker (remote LoRA training and sampling), and `TinkerChatClient`, which samples from the weights there.

The client takes token ids and returns token ids, log-probs and the version. It samples from the newest sampling client that the
learner gave it; a running request keeps the weights it began with, so a completion has one version throughout. The official SDK
is an extra. It imports torch if that is installed, so it is imported on the first connection.
"""

import asyncio
import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ludic.http.client import EndpointError, ResponseTimeout, Unreachable
from ludic.inference.templates.conversation import decode_reply, find_stop
from ludic.types import (
    ChatResponse,
    ConfigError,
    Info,
    LogprobArray,
    LudicError,
    MissingExtra,
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


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """The model that is trained, the account, and the address of the service."""

    base_model: str
    """Tinker's name of it, such as "Qwen/Qwen3-8B"."""
    lora_rank: int = 32
    lora_seed: int | None = None
    """Seed of the adapter's initial weights; None leaves it to the service."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    project_id: str | None = None
    """An existing project; None is $TINKER_PROJECT_ID, or else the account's default."""
    base_url: str | None = None
    """None is $TINKER_BASE_URL, or else the SDK's default."""
    api_key: str | None = field(default=None, repr=False)
    """None is $TINKER_API_KEY, or else the key stored by `tinker auth login`."""
    max_context: int | None = None
    """Maximum tokens of a conversation; None is the service's limit."""
    checkpoint_ttl_s: int | None = None
    """Lifetime of saved states at the service, at least an hour; None is unlimited."""

    def __post_init__(self) -> None:
        if self.lora_rank < 1:
            raise ConfigError(f"TinkerConfig.lora_rank={self.lora_rank}; it must be at least 1.")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ConfigError("TinkerConfig trains nothing: one of train_attn, train_mlp, train_unembed must be True.")
        if self.checkpoint_ttl_s is not None and self.checkpoint_ttl_s < 3600:
            raise ConfigError(f"TinkerConfig.checkpoint_ttl_s={self.checkpoint_ttl_s}; the least is 3600, an hour.")


def sdk() -> Any:
    """The module `tinker`."""
    try:
        return importlib.import_module("tinker")
    except ImportError as error:
        raise MissingExtra("tinker", f"Tinker ({error})") from error


def connect(config: TinkerConfig) -> "tinker.ServiceClient":
    """A client of the service. Its session begins with the first training or sampling client it creates."""
    with tinker_errors("make a client"):
        client: tinker.ServiceClient = sdk().ServiceClient(
            project_id=config.project_id, base_url=config.base_url, api_key=config.api_key
        )
        return client


@contextlib.contextmanager
def opening(config: TinkerConfig) -> Iterator["tinker.ServiceClient"]:
    """A client whose session ends if the block fails: the SDK would send its heartbeats for as long as the program runs."""
    service = connect(config)
    try:
        yield service
    except BaseException:
        with contextlib.suppress(Exception):  # the first error says more
            service.close("errored").result()
        raise


def context_length(service: "tinker.ServiceClient", config: TinkerConfig) -> int | None:
    """Maximum tokens of a conversation, if the service states it. Also the quickest check of the key."""
    with tinker_errors("ask what it offers"):
        offered = service.get_server_capabilities().supported_models
    limits = [model.max_context_length for model in offered if model.model_name == config.base_model]
    return min((limit for limit in (*limits, config.max_context) if limit is not None), default=None)


@contextlib.contextmanager
def tinker_errors(purpose: str, config: TinkerConfig | None = None) -> Iterator[None]:
    """Converts the SDK's errors into Ludic's; the SDK has already retried.

    `purpose` completes "Tinker was asked to …"; `config` is given if its settings may be the reason of a refusal.
    """
    tinker = sdk()
    try:
        yield
    except tinker.APIStatusError as error:
        raise _refusal(purpose, error.status_code, error.message, config) from error
    except tinker.APIConnectionError as error:
        raise Unreachable(f"Tinker was asked to {purpose}, and cannot be reached: {error}") from error
    except tinker.RequestFailedError as error:
        raise EndpointError(f"Tinker was asked to {purpose}, and failed: {error.message}") from error
    except tinker.TinkerError as error:
        if "api_key" not in str(error):
            raise EndpointError(f"Tinker was asked to {purpose}: {error}") from error
        raise ConfigError(
            f"There is no key for Tinker ({error}). Set $TINKER_API_KEY, store one with `tinker auth login`, or give "
            "TinkerConfig an api_key."
        ) from error


def _refusal(purpose: str, status: int, message: str, config: TinkerConfig | None) -> LudicError:
    said = f"Tinker was asked to {purpose}, and answered {status}: {message}."
    if status == 401:
        return ConfigError(f"{said} Is $TINKER_API_KEY (or TinkerConfig.api_key) right?")
    if config is None or not 400 <= status < 500:
        return EndpointError(said, status=status)
    asked = f"base_model={config.base_model!r}, lora_rank={config.lora_rank}, project_id={config.project_id!r}"
    return ConfigError(f"{said} Asked for were {asked}; a project must exist before it is used.")


class _Served(NamedTuple):
    """The weights that are sampled; replaced as a whole."""

    sampler: "tinker.SamplingClient"
    version: int


class TinkerChatClient:
    """Completions from the newest weights."""

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
        """`tokenizer` is the model's: it decodes tokens, and knows which token ends a reply.

        Prompts that leave no room in `max_context` are refused here. `request_timeout_s` bounds a completion with all retries
        of the SDK. `close` ends `service`, if only this client uses it.
        """
        self.tokenizer, self.max_context = tokenizer, max_context
        self._request_timeout_s, self._service = request_timeout_s, service
        self._served = _Served(sampler, version)

    @classmethod
    def connect(
        cls, config: TinkerConfig, *, model_path: str | None = None, tokenizer: Any = None
    ) -> "TinkerChatClient":
        """For sampling only: from saved sampler weights (tinker://…), or else from the base model. Blocks until it is ready."""
        with opening(config) as service:
            max_context = context_length(service, config)
            with tinker_errors(f"sample from {model_path or config.base_model}", config):
                base_model = config.base_model if model_path is None else None
                sampler = service.create_sampling_client(model_path=model_path, base_model=base_model).result()
            return cls(sampler, tokenizer or sampler.get_tokenizer(), max_context=max_context, service=service)

    # --- completions ---

    async def complete_tokens(self, request: TokenCompletionRequest) -> tuple[ChatResponse, Info]:
        """One completion. Cancelling the awaiting task abandons it; the service may continue."""
        self._check(request)
        sampler, version = self._served
        types = sdk().types
        params = types.SamplingParams(
            max_tokens=request.sampling.max_tokens,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=request.sampling.top_k or -1,
            # 63 bits: a signed type on the way must not overflow.
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
                f"Tinker was asked to sample, but there was no completion within request_timeout_s={self._request_timeout_s:g}."
            ) from error
        return self._read(request, answer.sequences[0], version), {}

    def _read(self, request: TokenCompletionRequest, sequence: Any, version: int) -> ChatResponse:
        tokens, logprobs = token_array(sequence.tokens), sequence.logprobs
        if logprobs is None or len(logprobs) != len(tokens):
            found = "none" if logprobs is None else str(len(logprobs))
            raise EndpointError(f"Tinker sampled {len(tokens)} tokens and gave {found} log-probs for them.")
        length, text = self._end_of(tokens, request.sampling)
        ends = self._end_ids(request.sampling)
        is_over = length < len(tokens) or sequence.stop_reason == "stop" or text is not None
        is_over = is_over or (length > 0 and int(tokens[length - 1]) in ends)
        kept: LogprobArray = float_array(logprobs, "logprobs")[:length]
        return ChatResponse(
            text=text if text is not None else self._decode(tokens[:length]),
            prompt_token_ids=request.prompt_token_ids,
            completion_token_ids=tokens[:length],
            completion_logprobs=kept if request.return_.return_chosen_logprobs else None,
            finish_reason="stop" if is_over else "length",
            version_runs=(VersionRun(version, length),) if length else (),
        )

    def _decode(self, tokens: TokenArray) -> str:
        return decode_reply(self.tokenizer, tokens.tolist())

    # --- end of a reply ---

    def _stops(self, sampling: SamplingParams) -> list[str] | list[int] | None:
        """Tinker takes texts or tokens but not both, and they replace the model's own end-of-sequence token."""
        ends = sorted(self._end_ids(sampling))
        if sampling.stop:
            # A special token without text is searched in the tokens afterwards.
            marks = [self.tokenizer.decode([token], skip_special_tokens=False) for token in ends]
            texts = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop
            return [*texts, *(mark for mark in marks if mark)]
        return ends if sampling.ignore_eos or sampling.stop_token_ids else None

    def _end_ids(self, sampling: SamplingParams) -> set[int]:
        own = self.tokenizer.eos_token_id
        given = set(sampling.stop_token_ids)
        return given if sampling.ignore_eos or own is None else given | {int(own)}

    def _end_of(self, tokens: TokenArray, sampling: SamplingParams) -> tuple[int, str | None]:
        """(number of tokens of the completion, its text if a stop string ended it).

        Tokens after the end are dropped, which gives exactly the completion that stopping there would have given.
        """
        ends = np.flatnonzero(np.isin(tokens, list(self._end_ids(sampling))))
        length = int(ends[0]) + 1 if len(ends) else len(tokens)
        if find_stop(self._decode(tokens[:length]), sampling) is None:
            return length, None
        for count in range(1, length + 1):
            text = self._decode(tokens[:count])
            if (start := find_stop(text, sampling)) is not None:
                return count, text[:start]
        raise AssertionError("the whole text has a stop string")

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
            raise ConfigError(f"Tinker's sampler does not support {what}. Leave it out.")
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
        """End the session of a client from `connect`; a policy ends its own session."""
        if self._service is not None:
            with tinker_errors("end the session"):
                self._service.close("success").result()
