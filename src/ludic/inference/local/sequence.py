"""One request inside the engine: its tokens, how many are computed, and its stop rule."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ludic.inference.templates.conversation import find_stop
from ludic.models.adapters.forward import PackedAdapter
from ludic.types import (
    CandidateSets,
    ChatResponse,
    ExpertArray,
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
    """Of these, how many are in the pool's blocks; the runner may hold the rest in rows."""
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
    """Of the computed tokens of a mixture, if they are recorded; set when the sequence finishes."""
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
        """Whether to record candidates, so that the client can recompute log-probs over the same tokens."""
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
        """Whether the model's output after this chunk predicts the next token."""
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
