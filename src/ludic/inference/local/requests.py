"""A request on its way in and out: what the engine refuses, and how answers reach the event loops that wait for them."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ludic.inference.local.sequence import Sequence
from ludic.types import (
    ConfigError,
    LudicError,
    NotFinite,
    PromptTooLong,
    SamplingParams,
    TokenCompletionRequest,
)


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
    """What one model and its cache can be asked for. Every `check` raises ConfigError or PromptTooLong."""

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
        """Of a text to score, which takes no place in the cache."""
        self._check_ids(tokens)
        if len(tokens) > self.max_model_len:
            raise PromptTooLong(len(tokens), self.max_model_len)

    def check_targets(self, num_tokens: int, top_k: int, targets: np.ndarray[Any, Any] | None) -> None:
        """Of `score_prompt`: what is asked of every token after the first."""
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
