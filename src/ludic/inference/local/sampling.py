"""From logits to tokens, with the log-probability of what was drawn under the distribution it was drawn from.

Every request draws with its own numbers: one uniform per token, derived from the request's seed and the token's
position. So the same request gives the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from ludic.inference.local.sequence import Sequence
from ludic.types import TokenArray, derive_seed

_SEED_RANGE = float(1 << 48)
_MINUS_INFINITY = float("-inf")
_MAX_CHUNK = 512


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
    return _draw(logits_NV, greedy_N, sequences)


def _draw(logits_NV: Tensor, greedy_N: Tensor, sequences: Seq[Sequence]) -> tuple[list[int], list[float]]:
    """Inverse transform sampling, then the log-probability of what was drawn."""
    highest_N1, best_N1 = logits_NV.max(dim=-1, keepdim=True)
    weights_NV = (logits_NV - highest_N1).exp_()
    weights_NV[~highest_N1[:, 0].isfinite()] = 1.0  # any token: its log-prob is not finite, and the engine refuses it
    uniforms_N1 = torch.tensor(
        [[derive_seed(s.seed, len(s.tokens)) / _SEED_RANGE] for s in sequences], dtype=torch.float64
    )
    drawn_N1, total_N1 = _invert(weights_NV, uniforms_N1)
    drawn_N1 = torch.where(greedy_N[:, None], best_N1, drawn_N1)
    logprobs_N1 = (logits_NV.gather(-1, drawn_N1) - highest_N1).double() - total_N1.log()
    return drawn_N1[:, 0].tolist(), logprobs_N1[:, 0].tolist()


def _invert(weights_NV: Tensor, uniforms_N1: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative weight passes its uniform share of the total; and the total.

    In two steps, over chunks and within one, so that sums are taken in double precision (over a large vocabulary a
    float sum loses the rare tokens) without a second array of that size.
    """
    num_rows, vocab = weights_NV.shape
    width = min(vocab & -vocab, _MAX_CHUNK)  # the largest power of two that divides it
    chunks_NCW = weights_NV.view(num_rows, -1, width)
    until_NC = chunks_NCW.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total_N1 = until_NC[:, -1:]
    chunk_N1 = _first_above(until_NC, uniforms_N1 * total_N1)
    within_NW = chunks_NCW[torch.arange(num_rows), chunk_N1[:, 0]].double()
    before_N1 = until_NC.gather(-1, chunk_N1) - within_NW.sum(dim=-1, keepdim=True)
    place_N1 = _first_above(within_NW.cumsum(dim=-1), uniforms_N1 * total_N1 - before_N1)
    return chunk_N1 * width + place_N1, total_N1


def _first_above(cumulative_NX: Tensor, targets_N1: Tensor) -> Tensor:
    """Index of the first value above the target; one below the last is always found, so no empty place is drawn."""
    below_last = torch.nextafter(cumulative_NX[:, -1:], torch.zeros(1, dtype=torch.float64))
    targets_N1 = torch.minimum(targets_N1, below_last)
    return torch.searchsorted(cumulative_NX, targets_N1, right=True)


def _with_logprobs(logits_NV: Tensor, tokens_N: Tensor) -> tuple[list[int], list[float]]:
    chosen_N = logits_NV.gather(-1, tokens_N[:, None])[:, 0]
    return tokens_N.tolist(), (chosen_N - logits_NV.logsumexp(dim=-1)).tolist()


def _filter(logits_NV: Tensor, sequences: Seq[Sequence]) -> None:
    """Top-k, then top-p, then min-p, in place, for the rows that ask for any of them; what is left is noted where it is wanted."""
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
            logits_V[order[before >= params.top_p]] = _MINUS_INFINITY
        if params.min_p > 0:
            threshold = logits_V.max() + torch.log(torch.tensor(params.min_p))
            logits_V[logits_V < threshold] = _MINUS_INFINITY
        if sequence.keeps_supports:
            sequence.supports.append(_support(logits_V))


def _support(logits_V: Tensor) -> TokenArray:
    """The tokens that can still be drawn; none if that is all of them."""
    left = (logits_V > _MINUS_INFINITY).nonzero()[:, 0]
    return left[: 0 if len(left) == len(logits_V) else None].to(torch.int32).numpy()


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
