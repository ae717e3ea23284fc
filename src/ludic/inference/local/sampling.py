"""From logits to tokens, with the log-probability of what was drawn under the distribution it was drawn from.

Every request draws with its own numbers: one uniform per token, derived from the request's seed and the token's
position. So the same request gives the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ludic.inference.local.sequence import Sequence
from ludic.types import derive_seed

_SEED_RANGE = float(1 << 48)
_MINUS_INFINITY = float("-inf")


# Letters: N sequences, V vocabulary.
@torch.inference_mode()
def sample(logits_NV: Tensor, sequences: Seq[Sequence]) -> tuple[list[int], list[float]]:
    """One token per sequence, and its log-probability."""
    logits_NV = logits_NV.float()
    _forbid_early_stops(logits_NV, sequences)
    _apply_penalties(logits_NV, sequences)
    greedy_N = torch.tensor([s.sampling.temperature == 0 for s in sequences])
    if bool(greedy_N.all()):
        tokens_N = logits_NV.argmax(dim=-1)
        return _with_logprobs(logits_NV, tokens_N)
    # A greedy request keeps temperature 1: its log-prob is that of the model's own distribution.
    temperatures_N = torch.tensor([s.sampling.temperature or 1.0 for s in sequences])
    if bool((temperatures_N != 1).any()):
        logits_NV /= temperatures_N[:, None]
    _filter(logits_NV, sequences)
    drawn_N = _draw(logits_NV, sequences)
    if bool(greedy_N.any()):
        drawn_N = torch.where(greedy_N, logits_NV.argmax(dim=-1), drawn_N)
    return _with_logprobs(logits_NV, drawn_N)


def _draw(logits_NV: Tensor, sequences: Seq[Sequence]) -> Tensor:
    """Inverse transform sampling: the first token whose cumulative probability passes a uniform number."""
    uniforms = [derive_seed(s.seed, len(s.tokens)) / _SEED_RANGE for s in sequences]
    weights_NV = torch.exp(logits_NV - logits_NV.amax(dim=-1, keepdim=True))
    # Doubles: over a large vocabulary a float sum loses the rare tokens.
    cumulative_NV = weights_NV.cumsum(dim=-1, dtype=torch.float64)
    targets_N1 = torch.tensor(uniforms, dtype=torch.float64)[:, None] * cumulative_NV[:, -1:]
    drawn_N = torch.searchsorted(cumulative_NV, targets_N1, right=True)[:, 0]
    return drawn_N.clamp_(max=logits_NV.shape[-1] - 1)


def _with_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> tuple[list[int], list[float]]:
    chosen_N = logits_NV.gather(-1, tokens_N[:, None])[:, 0]
    return tokens_N.tolist(), (chosen_N - logits_NV.logsumexp(dim=-1)).tolist()


def _filter(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    """Top-k, then top-p, then min-p, in place, for the rows that ask for any of them."""
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if params.temperature == 0 or (not params.top_k and params.top_p >= 1 and params.min_p <= 0):
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
            logits_V[order[before >= params.top_p]] = _MINUS_INFINITY
        if params.min_p > 0:
            threshold = logits_V.max() + torch.log(torch.tensor(params.min_p))
            logits_V[logits_V < threshold] = _MINUS_INFINITY


def _apply_penalties(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        params = sequence.sampling
        if params.repetition_penalty != 1.0:
            seen = torch.tensor(sorted(set(sequence.tokens)))
            scores = logits_NV[row, seen]
            penalty = params.repetition_penalty
            logits_NV[row, seen] = torch.where(scores > 0, scores / penalty, scores * penalty)
        if (params.frequency_penalty or params.presence_penalty) and sequence.logprobs:
            written, counts = torch.tensor(sequence.completion).unique(return_counts=True)
            logits_NV[row, written] -= params.frequency_penalty * counts + params.presence_penalty


def _forbid_early_stops(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    for row, sequence in enumerate(sequences):
        if len(sequence.logprobs) < sequence.sampling.min_tokens:
            logits_NV[row, list(sequence.stop_ids)] = _MINUS_INFINITY
