"""Draws tokens from logits, with their log-probability under the distribution they were drawn from; scores given tokens.

A token is drawn by a race: candidate i of weight w_i arrives at time E_i / w_i, E_i an exponential variable, and the first to
arrive is drawn. That is candidate i with probability w_i / Σw (Gumbel-max in the log domain). First chunks of the
vocabulary race, weighted by their sums, then the tokens of the winning chunk: noise for some hundred candidates, not for all.

The noise is a function of the request's seed, the token's position and the candidate, on every device. Equal logits give
equal tokens. If rounding moves the logits (over temperature) by at most ε, another token is drawn with probability at
most ε: one race changes its result with probability ½ Σ p_i p_j |δ_i - δ_j| ≤ ε/2, since only candidates that arrive within a
factor exp(δ_j - δ_i) of each other change places, and there are two races.
"""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.sequence import Sequence
from ludic.models.adapters.forward import PackedAdapter
from ludic.types import TokenArray
from ludic.types.requests import MIX_CONSTANTS, MIX_SHIFTS, SEED_BITS, STEP_FACTOR

CHUNK = 128
"""Tokens per candidate of the first stage. Part of what a seed means: another value draws other tokens."""
_MINUS_INFINITY = float("-inf")


# Letters: N sequences, V vocabulary, C candidates of a race (chunks, or tokens of one chunk).
@torch.inference_mode()
def sample(logits_NV: Tensor, sequences: Seq[Sequence]) -> tuple[list[int], list[float]]:
    """One token per sequence and its log-probability, NaN if the logits of a row are not finite.

    The engine reads the NaN together with the tokens: a separate check would synchronise with the device once more per step. So
    everything before must tolerate such a row: the race takes the argmin, which is a valid index even if all candidates are NaN,
    and no index is computed from a logit.
    """
    logits_NV = logits_NV.float()
    _forbid_early_stops(logits_NV, sequences)
    _apply_penalties(logits_NV, sequences)
    greedy = [row for row, s in enumerate(sequences) if s.sampling.temperature == 0]
    if len(greedy) == len(sequences):
        return _with_logprobs(logits_NV, logits_NV.max(dim=-1).indices)  # on a CPU faster than argmax
    # A greedy request keeps temperature 1: its log-prob is under the model's own distribution.
    temperatures_N = torch.tensor([s.sampling.temperature or 1.0 for s in sequences], device=logits_NV.device)
    if bool((temperatures_N != 1).any()):
        logits_NV /= temperatures_N[:, None]
    _filter_logits(logits_NV, sequences)
    return _draw(logits_NV, greedy, sequences)


def _draw(logits_NV: Tensor, greedy: list[int], sequences: Seq[Sequence]) -> tuple[list[int], list[float]]:
    """Run the race, except for greedy rows, then compute the log-probability of the token."""
    highest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    weights_NV = (logits_NV - highest_N1).exp_()
    places_N2 = torch.tensor([[s.seed, len(s.tokens)] for s in sequences], device=logits_NV.device)
    drawn_N1, total_N1 = race(weights_NV, places_N2)
    if greedy:
        drawn_N1[greedy] = logits_NV[greedy].max(dim=-1, keepdim=True).indices
    logprobs_N1 = (logits_NV.gather(-1, drawn_N1) - highest_N1).double() - total_N1.log()
    return drawn_N1[:, 0].tolist(), logprobs_N1[:, 0].tolist()


def race(weights_NV: Tensor, places_N2: Tensor) -> tuple[Tensor, Tensor]:
    """The token drawn in each row, and the sum of the row's weights; `places_N2` holds (seed, position)."""
    vocab = weights_NV.shape[1]
    keys_N1 = derive_bits(places_N2[:, :1], places_N2[:, 1:])
    if vocab <= CHUNK:
        tokens_NC, weights_NC = torch.arange(vocab, device=weights_NV.device)[None], weights_NV.double()
        total_N1 = weights_NC.sum(dim=-1, keepdim=True)
    else:
        sums_NC = _chunk_sums(weights_NV)
        total_N1 = sums_NC.sum(dim=-1, keepdim=True)
        # Chunk c draws the noise of token -1 - c: no two candidates of a position share a number.
        chunks_C = torch.arange(sums_NC.shape[1], device=weights_NV.device)
        chunk_N1 = (exponentials(derive_bits(keys_N1, -1 - chunks_C)) / sums_NC).argmin(dim=-1, keepdim=True)
        tokens_NC = chunk_N1 * CHUNK + torch.arange(CHUNK, device=weights_NV.device)
        is_token_NC = tokens_NC < vocab
        tokens_NC = tokens_NC.clamp_(max=vocab - 1)
        weights_NC = weights_NV.gather(1, tokens_NC).double() * is_token_NC
    first_N1 = (exponentials(derive_bits(keys_N1, tokens_NC)) / weights_NC).argmin(dim=-1, keepdim=True)
    return tokens_NC.expand_as(weights_NC).gather(1, first_N1), total_N1


def _chunk_sums(weights_NV: Tensor) -> Tensor:
    """In double precision: over a large vocabulary a float sum loses the rare tokens."""
    num_whole = weights_NV.shape[1] // CHUNK
    whole_NCW = weights_NV[:, : num_whole * CHUNK].unflatten(1, (num_whole, CHUNK))
    sums_NC = whole_NCW.sum(dim=-1, dtype=torch.float64)
    if weights_NV.shape[1] % CHUNK:
        rest_N1 = weights_NV[:, num_whole * CHUNK :].sum(dim=-1, keepdim=True, dtype=torch.float64)
        sums_NC = torch.cat([sums_NC, rest_N1], dim=1)
    return sums_NC


def exponentials(bits: Tensor) -> Tensor:
    """Exponential variables from random int64, between 2^-49 and 34, in double precision.

    The uniform number below is (k + 1/2) / 2^48, which a double holds exactly: its logarithm is neither 0 nor infinite, and
    has full resolution near 0, so tokens keep their probability down to about 2^-48.
    """
    k = bits >> (64 - SEED_BITS) & ((1 << SEED_BITS) - 1)
    return (k.double().add_(0.5) * 2.0**-SEED_BITS).log_().neg_()


def derive_bits(states: Tensor, indices: Tensor) -> Tensor:
    """One step of `derive_seed` from `states` on int64 tensors, with all 64 bits, before it is cut to a seed."""
    (increment, *factors), bits = MIX_CONSTANTS, states * _signed(STEP_FACTOR) + indices
    bits += _signed(increment)
    for shift, factor in zip(MIX_SHIFTS, [*factors, 1], strict=True):
        bits ^= (bits >> shift) & ((1 << (64 - shift)) - 1)  # an int64 shift copies the sign bit
        bits *= _signed(factor)
    return bits


def _signed(constant: int) -> int:
    """The same 64 bits as a signed integer: torch multiplies no others."""
    return constant - (1 << 64) if constant >> 63 else constant


def _with_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> tuple[list[int], list[float]]:
    """With the sums of the race: a greedy row's log-prob does not depend on whether its neighbours are greedy."""
    highest_N1 = logits_NV.amax(dim=-1, keepdim=True)
    weights_NV = (logits_NV - highest_N1).exp_()
    sums_NC = weights_NV.double() if weights_NV.shape[1] <= CHUNK else _chunk_sums(weights_NV)
    chosen_N1 = (logits_NV.gather(-1, tokens_N[:, None]) - highest_N1).double()
    return tokens_N.tolist(), (chosen_N1 - sums_NC.sum(dim=-1, keepdim=True).log())[:, 0].tolist()


def _filter_logits(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    """Apply top-k, then top-p, then min-p in place to the rows that use them; record the remaining candidates if requested."""
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if not params.is_truncated:
            continue
        logits_V = logits_NV[row]
        if params.top_k and params.top_k < len(logits_V):
            kept = logits_V.topk(params.top_k)
            logits_V.fill_(_MINUS_INFINITY)
            logits_V[kept.indices] = kept.values
        if params.top_p < 1:
            ordered, order = logits_V.sort(descending=True)
            # The token that passes the threshold is kept, as is everything before it.
            before = torch.softmax(ordered, dim=-1).cumsum(dim=-1) - torch.softmax(ordered, dim=-1)
            is_left_out = before >= params.top_p
            is_left_out[0] = False  # float32 rounds a top_p of 1e-50 to 0, which would exclude every token
            logits_V[order[is_left_out]] = _MINUS_INFINITY
        if params.min_p > 0:
            threshold = logits_V.max() + torch.log(torch.tensor(params.min_p))
            logits_V[logits_V < threshold] = _MINUS_INFINITY
        if sequence.keeps_candidates:
            sequence.candidates.append(_candidates(logits_V))


def _candidates(logits_V: Tensor) -> TokenArray:
    """The tokens that can still be drawn; empty if all can."""
    left = (logits_V > _MINUS_INFINITY).nonzero()[:, 0]
    return left[: 0 if len(left) == len(logits_V) else None].to(torch.int32).cpu().numpy()


def _apply_penalties(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if params.repetition_penalty != 1.0:
            # Some models have more input ids than output logits.
            seen = torch.tensor(sorted(token for token in set(sequence.tokens) if token < logits_NV.shape[1]))
            scores = logits_NV[row, seen]
            penalty = params.repetition_penalty
            logits_NV[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if (params.frequency_penalty or params.presence_penalty) and sequence.logprobs:
            written, counts = torch.tensor(sequence.completion).unique(return_counts=True)
            logits_NV[row, written] -= params.frequency_penalty * counts + params.presence_penalty


def _forbid_early_stops(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        if len(sequence.logprobs) < sequence.sampling.min_tokens:
            stop_ids = [token for token in sequence.stop_ids if token < logits_NV.shape[1]]
            logits_NV[row, stop_ids] = _MINUS_INFINITY


# --- scores of given tokens ---


@dataclass(frozen=True, slots=True, eq=False)
class PromptScores:
    """The model's log-probabilities of each scored token of a text, given all tokens before it."""

    logprobs: np.ndarray[Any, Any]
    """[N] of the text's own tokens."""
    top_ids: np.ndarray[Any, Any]
    """[N, k], most probable first."""
    top_logprobs: np.ndarray[Any, Any]
    target_logprobs: np.ndarray[Any, Any]
    """[N, K] of the requested tokens; 0 where none was requested."""


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """A text to score from `num_prompt` on, and the future of its result."""

    tokens: np.ndarray[Any, Any]
    num_prompt: int
    """Tokens at the start that are not scored."""
    temperature: float
    top_k: int = 0
    targets: np.ndarray[Any, Any] | None = None
    """[N, K]: tokens in place of each scored one whose log-probabilities are requested; -1 is none."""
    adapter: PackedAdapter | None = None
    answer: "Future[PromptScores]" = field(default_factory=Future)

    @property
    def num_scored(self) -> int:
        return len(self.tokens) - self.num_prompt

    def predictors(self, start: int) -> np.ndarray[Any, Any]:
        """Positions of the logits that predict the scored tokens, for a text at flat position `start`."""
        return np.arange(start + self.num_prompt - 1, start + len(self.tokens) - 1)


class ScoringQueue:
    """Texts that wait to be scored; `changed` guards it, and is notified of new ones."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._waiting: list[Scoring] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, scoring: Scoring) -> None:
        with self._changed:
            self._waiting.append(scoring)
            self._changed.notify_all()

    def take(self, *, max_tokens: int, max_logits: int) -> list[Scoring]:
        """Remove the first text and those of the same temperature that still fit; one alone always fits. Returns those whose caller
        still waits."""
        batch: list[Scoring] = []
        num_tokens = num_logits = 0
        with self._changed:
            for scoring in list(self._waiting):
                if batch and scoring.temperature != batch[0].temperature:
                    continue
                num_tokens, num_logits = num_tokens + len(scoring.tokens), num_logits + scoring.num_scored
                if batch and (num_tokens > max_tokens or num_logits > max_logits):
                    break
                batch.append(scoring)
                self._waiting.remove(scoring)
        return [scoring for scoring in batch if scoring.answer.set_running_or_notify_cancel()]

    def fail(self, error: Callable[[], BaseException | None]) -> None:
        """All that wait, each with a new error."""
        with self._changed:
            waiting, self._waiting = self._waiting, []
        for scoring in waiting:
            if scoring.answer.set_running_or_notify_cancel():
                scoring.answer.set_exception(error())


class FlatTexts(NamedTuple):
    """Texts end to end, for one pass."""

    tokens: np.ndarray[Any, Any]
    positions: np.ndarray[Any, Any]
    lengths: list[int]
    where: np.ndarray[Any, Any]
    """Flat positions of the logits that predict the scored tokens."""

    @classmethod
    def of(cls, texts: Seq[Scoring]) -> "FlatTexts":
        lengths = [len(text.tokens) for text in texts]
        starts = np.cumsum([0, *lengths[:-1]]).tolist()
        return cls(
            np.concatenate([text.tokens for text in texts]),
            np.concatenate([np.arange(length) for length in lengths]),
            lengths,
            np.concatenate([text.predictors(start) for text, start in zip(texts, starts, strict=True)]),
        )


def scores_of(
    texts: Seq[Scoring],
    logits_of: Callable[[slice], Tensor],
    *,
    rows: int = 1024,
) -> list[PromptScores]:
    """Scores of the texts, whose predicting positions lie one after the other; `rows` of them are read at a time.

    `logits_of` returns the logits of a slice of these positions in fp32, over the temperature.
    """
    found, start = [], 0
    for text in texts:
        parts = []
        for first in range(0, text.num_scored, rows):
            here = slice(first, min(first + rows, text.num_scored))
            logits_NV = logits_of(slice(start + here.start, start + here.stop))
            own = text.tokens[text.num_prompt :][here].astype(np.int64)
            own_N1 = torch.from_numpy(own).to(logits_NV.device)[:, None]
            normaliser_N = logits_NV.logsumexp(dim=-1)
            chosen_N = logits_NV.gather(-1, own_N1)[:, 0] - normaliser_N
            top = logits_NV.topk(text.top_k, dim=-1) if text.top_k else None
            wanted = text.targets[here] if text.targets is not None else np.zeros((len(own), 0))
            targets_NK = torch.from_numpy(wanted.astype(np.int64)).to(logits_NV.device)
            at_targets_NK = logits_NV.gather(-1, targets_NK.clamp(min=0)) - normaliser_N[:, None]
            parts.append(
                (
                    chosen_N,
                    targets_NK[:, :0] if top is None else top.indices,
                    at_targets_NK[:, :0] if top is None else top.values - normaliser_N[:, None],
                    at_targets_NK.masked_fill_(targets_NK < 0, 0.0),
                )
            )
        found.append(PromptScores(*(torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))))
        start += text.num_scored
    return found
