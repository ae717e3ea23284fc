"""One request inside the engine: its limits, its tokens, how many are computed, its stop rule, and the way of its answer out."""

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ludic.inference.templates.conversation import find_stop
from ludic.models.adapters.forward import PackedAdapter
from ludic.types import (
    CandidateSets,
    ChatResponse,
    ConfigError,
    ExpertArray,
    LudicError,
    NotFinite,
    PromptTooLong,
    SamplingParams,
    TokenArray,
    TokenCompletionRequest,
    VersionRun,
)


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and its completion so far."""

    number: int
    """Order of arrival, by which the scheduler is fair."""
    request: TokenCompletionRequest
    deliver: Callable[["Sequence", BaseException | None], None]
    """Called once, from the worker thread, when the sequence finishes or fails."""
    seed: int
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end it."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and completion."""
    logprobs: list[float] = field(default_factory=list)
    candidates: list[TokenArray] = field(default_factory=list)
    """Candidates of each completion token if `keeps_candidates`; empty for the whole vocabulary."""
    runs: list[list[int]] = field(default_factory=list)
    """[version, number of tokens] of the completion."""
    blocks: list[int] = field(default_factory=list)
    chain: int = 0
    """The block pool's id for the published part of this sequence."""
    num_published: int = 0
    num_computed: int = 0
    """Tokens whose keys and values are in the cache."""
    num_pooled: int = 0
    """The number of these in the pool's blocks; the runner may hold the rest in rows."""
    finish_reason: str | None = None
    row: int = -1
    """Row in the runner's decode batch; -1 without one."""
    num_shared: int = 0
    """Tokens at the start that are not in that row, but in one for all sequences with this prompt."""
    is_cancelled: bool = False
    abort_reason: BaseException | None = None
    """The error for a caller that still waits for a cancelled sequence."""
    text: str | None = None
    """Set when a stop string ended the completion: the text before it."""
    experts: np.ndarray[Any, Any] | None = None
    """The experts of the computed tokens of a mixture, if they are recorded; set when the sequence finishes."""
    on_token: Callable[["Sequence"], None] | None = None
    adapter: PackedAdapter | None = None
    """None is the model itself."""

    # The scheduler reads these for every sequence in every step, so they are plain numbers.
    length: int = 0
    """Prompt and completion, with the tokens that launched steps sample and the host has not read yet."""
    num_left: int = 0
    """Tokens that may still be sampled."""
    is_decoding: bool = False
    """The prompt is computed, and a sampled token is the next input."""
    num_prompt: int = 0
    max_tokens: int = 0
    has_stop_strings: bool = False
    is_plain: bool = True
    """Sampled by temperature alone, which the device does without the host."""

    def __post_init__(self) -> None:
        self.tokens = self.request.prompt_token_ids.tolist()
        p = self.request.sampling
        self.length = self.num_prompt = len(self.tokens)
        self.num_left = self.max_tokens = p.max_tokens
        self.has_stop_strings = bool(p.stop)
        is_filtered = p.top_k or p.top_p < 1 or p.min_p or p.min_tokens
        is_penalised = p.repetition_penalty != 1 or p.frequency_penalty or p.presence_penalty
        self.is_plain = not (is_filtered or is_penalised)

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def adapter_number(self) -> int:
        """Part of the key of everything that is computed for it; 0 is the model itself."""
        return 0 if self.adapter is None else self.adapter.number

    @property
    def keeps_candidates(self) -> bool:
        """True if to record candidates, so that the client can recompute log-probs over the same tokens."""
        wanted = self.request.return_
        return self.sampling.is_truncated and wanted.return_chosen_logprobs and wanted.return_candidates

    @property
    def completion(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_ahead(self) -> int:
        """Tokens that launched steps sample and the host has not read yet."""
        return self.length - len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens without computed keys and values: the (rest of the) prompt, or the token just sampled."""
        return self.length - self.num_computed

    @property
    def num_in_row(self) -> int:
        return self.num_computed - self.num_shared

    def drop_unread(self) -> None:
        """Forget the tokens that the host has not read."""
        self.length = len(self.tokens)
        self.num_left = self.max_tokens - len(self.logprobs)

    def append(self, token: int, logprob: float, version: int) -> None:
        self.extend([token], [logprob], version)

    def extend(self, tokens: list[int], logprobs: list[float], version: int) -> None:
        self.tokens.extend(tokens)
        self.logprobs.extend(logprobs)
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1][1] += len(tokens)
        else:
            self.runs.append([version, len(tokens)])

    def forget_computed(self) -> None:
        """Reset, so that everything is recomputed (preempted, or the weights have changed)."""
        self.blocks, self.chain, self.num_published, self.num_computed, self.is_decoding = [], 0, 0, 0, False
        self.drop_unread()

    def response(self, decode: Callable[[list[int]], str]) -> ChatResponse:
        completion = self.completion
        return ChatResponse(
            text=self.text if self.text is not None else decode(completion),
            prompt_token_ids=self.request.prompt_token_ids,
            completion_token_ids=np.array(completion, dtype=np.int32),
            completion_logprobs=np.array(self.logprobs, dtype=np.float32),
            finish_reason=self.finish_reason,
            version_runs=tuple(VersionRun(version, length) for version, length in self.runs),
            candidates=CandidateSets.of(self.candidates) if self.keeps_candidates else None,
            experts=None if self.experts is None else self._all_experts(self.experts),
        )

    def _all_experts(self, computed: np.ndarray[Any, Any]) -> ExpertArray:
        """One row per token: the last token is sampled, but no input yet."""
        experts = np.full((len(self.tokens), *computed.shape[1:]), -1, dtype=np.int16)
        experts[: len(computed)] = computed
        return experts


@dataclass(slots=True)
class Chunk:
    """The part of a sequence that one engine step computes."""

    sequence: Sequence
    start: int
    length: int
    source: Sequence | None = None
    """A sequence with the same tokens that the same step computes to the end: this one gets copies instead."""

    @property
    def end(self) -> int:
        return self.start + self.length

    @property
    def reaches_the_end(self) -> bool:
        """True if the model's output after this chunk predicts the next token."""
        return self.end == len(self.sequence.tokens)


def tokens_as_bytes(tokens: list[int]) -> bytes:
    return np.array(tokens, dtype=np.int32).tobytes()


TOKEN_BYTES = 4

Sampled = tuple[Sequence, list[int], list[float]]
"""A sequence, its newly sampled tokens, and their log-probabilities."""


class StopRule:
    """Ends a completion: by stop tokens, stop strings, then the token limit."""

    def __init__(self, decode: Callable[[list[int]], str], max_length: int) -> None:
        self._decode = decode
        self._max_length = max_length

    def absorb(self, sequence: Sequence, tokens: list[int], logprobs: list[float], version: int) -> None:
        """Append sampled tokens up to the end of the sequence; drop those after it."""
        num_new = len(tokens)
        is_below_limits = num_new < sequence.max_tokens - len(sequence.logprobs) and num_new < self._max_length - len(
            sequence.tokens
        )
        if is_below_limits and not sequence.has_stop_strings and sequence.stop_ids.isdisjoint(tokens):
            sequence.extend(tokens, logprobs, version)
            return
        for token, logprob in zip(tokens, logprobs, strict=True):
            sequence.append(token, logprob, version)
            self.apply(sequence)
            if sequence.finish_reason is not None:
                return

    def apply(self, sequence: Sequence) -> None:
        """Set the finish reason if the newest token ends the sequence; the first `min_tokens` tokens cannot."""
        params = sequence.sampling
        if len(sequence.logprobs) > params.min_tokens and (
            sequence.tokens[-1] in sequence.stop_ids or (params.stop and self._ends_in_stop_string(sequence))
        ):
            sequence.finish_reason = "stop"
        elif len(sequence.logprobs) >= params.max_tokens or len(sequence.tokens) >= self._max_length:
            sequence.finish_reason = "length"

    def _ends_in_stop_string(self, sequence: Sequence) -> bool:
        stop = sequence.sampling.stop
        stops = [stop] if isinstance(stop, str) else list(stop or ())
        # A stop string can only end in the newest token, and a token has at least one byte, so this tail is long enough.
        tail = self._decode(sequence.completion[-(max(len(s.encode()) for s in stops) + 4) :])
        if not any(s in tail for s in stops):
            return False
        text = self._decode(sequence.completion)
        exempt = sequence.completion[: sequence.sampling.min_tokens]
        cut = find_stop(text, sequence.sampling, len(self._decode(exempt)) if exempt else 0)
        if cut is None:
            return False
        sequence.text = text[:cut]
        return True


class RequestAborted(LudicError, RuntimeError):
    """`abort` removed the request from the batch."""


class LogitsNotFinite(NotFinite):
    """The model's logits for one request allow no sampling: they hold NaN or +inf, or are all -inf."""

    def __init__(self, version: int, num_tokens: int) -> None:
        super().__init__(
            f"The model's logits after {num_tokens} tokens are not finite (policy version {version}). The weights have "
            "diverged (lower the learning rate and start from an earlier checkpoint), the loaded weights are damaged, or the "
            "numbers are too large for the model's dtype (load it in bfloat16 or float32)."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """The limits of requests to one model and its cache. Every `check` raises ConfigError or PromptTooLong."""

    name: str
    vocab_size: int
    eos_ids: frozenset[int]
    max_model_len: int
    max_total_tokens: int
    """Maximum tokens of one request, prompt and completion: the model's limit or the cache's, whichever is less."""
    takes_images: bool
    has_tokenizer: bool

    def stop_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset(params.stop_token_ids)
        return own if params.ignore_eos else own | self.eos_ids

    def check(self, request: TokenCompletionRequest) -> None:
        ids, params = request.prompt_token_ids, request.sampling
        if not len(ids):
            raise ConfigError("The prompt is empty; a model needs at least one token to continue.")
        self._check_ids(ids)
        if request.images and not self.takes_images:
            raise ConfigError(f"The prompt holds {len(request.images)} pictures, but {self.name} takes text only.")
        self._check_stops(params)
        wanted = len(ids) + params.max_tokens
        if wanted > self.max_model_len:
            parts = f"That is {len(ids)} of the prompt and max_tokens={params.max_tokens}."
            raise PromptTooLong(wanted, self.max_model_len, f"{parts} {PromptTooLong.RAISE}")
        if wanted > self.max_total_tokens:
            how = "The KV cache holds no more; raise kv_tokens or kv_memory_fraction."
            raise PromptTooLong(wanted, self.max_total_tokens, how)

    def _check_stops(self, params: SamplingParams) -> None:
        if unknown := [i for i in params.stop_token_ids if not 0 <= i < self.vocab_size]:
            more = f" and {len(unknown) - 3} more" if len(unknown) > 3 else ""
            raise ConfigError(
                f"stop_token_ids {unknown[:3]}{more} are not in the vocabulary of {self.vocab_size} tokens."
            )
        if params.min_tokens and len(self.stop_ids(params)) == self.vocab_size:
            raise ConfigError(
                f"min_tokens={params.min_tokens} forbids stop tokens at first, but all {self.vocab_size} tokens of the "
                "vocabulary are stop tokens; drop min_tokens, or some of stop_token_ids."
            )
        if params.stop and not self.has_tokenizer:
            raise ConfigError(f"stop={params.stop!r} needs a tokenizer; give LocalEngine one, or use stop_token_ids.")

    def check_text(self, tokens: np.ndarray[Any, Any]) -> None:
        """Check a text to score, which takes no place in the cache."""
        self._check_ids(tokens)
        if len(tokens) > self.max_model_len:
            raise PromptTooLong(len(tokens), self.max_model_len)

    def check_targets(self, num_tokens: int, top_k: int, targets: np.ndarray[Any, Any] | None) -> None:
        """Check the `top_k` and the targets of `score_prompt`."""
        num_scored = num_tokens - 1
        if not 0 <= top_k <= self.vocab_size:
            raise ConfigError(f"score_prompt(top_k={top_k}): the vocabulary has {self.vocab_size} tokens.")
        if targets is not None and (targets.ndim != 2 or len(targets) != max(num_scored, 0)):
            raise ConfigError(
                f"score_prompt got {num_tokens} tokens and targets of shape {targets.shape}; it takes ({num_scored}, K), one row "
                "for each token after the first."
            )
        if targets is not None and targets.size and not -1 <= targets.min() <= targets.max() < self.vocab_size:
            raise ConfigError(
                f"score_prompt got targets from {targets.min()} to {targets.max()}; the model knows 0 to {self.vocab_size - 1}, "
                "and -1 is none."
            )
        if num_scored < 1:
            raise ConfigError("score_prompt needs two tokens at least: the first token has no log-probability.")

    def _check_ids(self, ids: np.ndarray[Any, Any]) -> None:
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            raise ConfigError(
                f"The prompt has token ids from {ids.min()} to {ids.max()}, but the model knows 0 to {self.vocab_size - 1}. "
                "Check that the tokenizer belongs to this model."
            )


# --- answers, from the worker thread to event loops ------------------------------------------------------------

_Answer: TypeAlias = "tuple[asyncio.Future[None], BaseException | None]"


class Answers:
    """Finished requests whose event loops the worker has not woken. To wake one takes a system call during which a busy loop
    takes Python's lock for milliseconds, so each loop is woken once for all sequences that finish together."""

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, list[_Answer]] = {}

    def add(self, loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[None]", error: BaseException | None) -> None:
        self._by_loop.setdefault(loop, []).append((answer, error))

    def send(self) -> None:
        ready, self._by_loop = self._by_loop, {}
        for loop, answers in ready.items():
            with contextlib.suppress(RuntimeError):  # the loop and its waiting tasks are gone
                loop.call_soon_threadsafe(self._settle, answers)

    @staticmethod
    def _settle(answers: list[_Answer]) -> None:
        for answer, error in answers:
            if not answer.done():
                answer.set_exception(error) if error is not None else answer.set_result(None)


class TokenStream:
    """The tokens of one request as the worker samples them, for a task of the loop that it is made in."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[tuple[list[int], list[float], bool, BaseException | None]] = asyncio.Queue()
        self._num_sent = 0

    def on_token(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:  # the last token comes with the response
            self._post(sequence, False, None)

    def deliver(self, sequence: Sequence, error: BaseException | None) -> None:
        self._post(sequence, True, error)

    def _post(self, sequence: Sequence, is_last: bool, error: BaseException | None) -> None:
        logprobs = sequence.logprobs[self._num_sent :]
        ids = sequence.tokens[sequence.num_prompt + self._num_sent :]
        self._num_sent += len(logprobs)
        with contextlib.suppress(RuntimeError):  # the loop and its waiting task are gone
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, (ids, logprobs, is_last, error))

    async def next(self) -> tuple[list[int], list[float], bool]:
        """New tokens, their log-probabilities, and whether they are the last; raises the request's error."""
        ids, logprobs, is_last, error = await self._arrived.get()
        if error is not None:
            raise error
        return ids, logprobs, is_last
