"""Runs a model through transformers' own cache, for models whose state is not (only) keys and values of routed attention.

Exact and slower: sequences of one length share a forward pass, others take turns, and no prefix is reused except by equal
prompts. A model whose cache does not repeat its plain forward pass is computed in full for every token (`recompute`).
"""

import copy
import inspect
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.inference.local.runner import Backend, EngineNeeds, Read, Runner, RunnerSettings, sampled_from
from ludic.inference.local.sampling import PromptScores, Scoring, scores_of
from ludic.inference.local.sequence import Chunk, Sequence
from ludic.models.head import plain_model
from ludic.models.kinds import is_vision_model
from ludic.models.weights import shared_view

_PROBED, _PROBED_PROMPT = 12, 4
"""Tokens of the probe that compares the cache with a plain forward pass, and how many of them are its prompt."""
_TOLERANCE, _TOLERANCE_HALF = 1e-4, 5e-2
"""Difference relative to the largest logit, in fp32 and in half precision."""


class CachedBackend(Backend):
    """The model's own cache, or none where a probe finds that it is not exact. The size of states in it is not known."""

    shares_prefixes = False
    recompute: bool

    def suits(self, model: Any, needs: EngineNeeds) -> str | None:
        if needs.records_experts or needs.has_adapters:
            return "transformers' own cache has neither recorded experts nor adapters of requests"
        if is_vision_model(plain_model(model)):
            return "transformers' own cache is used for texts only"
        self.use(shared_view(model), needs)
        return None

    def use(self, view: Any, needs: EngineNeeds) -> None:
        """Probe `view`, which has the model's own attention function."""
        self.max_length = needs.max_length
        self.recompute = needs.changed_rope(view) is not None or not _cache_is_exact(view)
        self.bytes_per_token = 0 if self.recompute else _bytes_per_token(view)

    @property
    def how(self) -> str:
        """For a sentence about a model that "runs …"."""
        return "without a cache, every token in full" if self.recompute else "through transformers' own cache"

    def runner(self, view: Any, settings: RunnerSettings) -> Runner:
        return CachedRunner(view, recompute=self.recompute)


# Letters: B sequences, L their length, V vocabulary.
@dataclass(slots=True, eq=False)
class _Cohort:
    """Sequences of one length that share a cache, row by row."""

    members: list[Sequence | None]
    """None where a sequence has left."""
    cache: Any

    def close_gaps(self) -> None:
        kept = [row for row, member in enumerate(self.members) if member is not None]
        if len(kept) < len(self.members):
            self.take(kept)

    def take(self, rows: list[int]) -> None:
        """Keep these rows, in this order; a row may be taken several times."""
        self.members = [self.members[row] for row in rows]
        if self.cache is not None:
            self.cache.reorder_cache(torch.tensor(rows))


class CachedRunner:
    """A `Runner` with one cache object for the sequences of one length."""

    runs_ahead = False

    def __init__(self, view: Any, *, recompute: bool = False) -> None:
        self._model = view
        self._device = view.get_input_embeddings().weight.device
        self._recompute = recompute
        self._cohorts: list[_Cohort] = []

    def weights_changed(self) -> None:
        """The model reads its parameters in place; the engine restarts all sequences."""

    @torch.inference_mode()
    def prefill(self, chunks: Seq[Chunk]) -> Read:
        """Compute the sequences whose last chunk this is, from their first token; sample one token for each."""
        ended = [chunk for chunk in chunks if chunk.reaches_the_end]
        copies: dict[int, list[Sequence]] = {}
        for chunk in ended:
            if chunk.source is not None:
                copies.setdefault(chunk.source.number, []).append(chunk.sequence)
        by_length: dict[int, list[Sequence]] = {}
        for chunk in ended:
            if chunk.source is None:
                by_length.setdefault(len(chunk.sequence.tokens), []).append(chunk.sequence)
        members: list[Sequence] = []
        logits: list[Tensor] = []
        for alike in by_length.values():
            own_BV, cache = self._forward(alike, None)
            rows = [row for row, sequence in enumerate(alike) for _ in range(1 + len(copies.get(sequence.number, ())))]
            cohort = _Cohort(list(alike), cache)
            if len(rows) > len(alike):
                cohort.take(rows)
                own_BV = own_BV[rows]
            cohort.members = [s for sequence in alike for s in (sequence, *copies.get(sequence.number, ()))]
            self._cohorts.append(cohort)
            members += [member for member in cohort.members if member is not None]
            logits.append(own_BV)
        return sampled_from(torch.cat(logits).cpu(), members) if logits else list

    @torch.inference_mode()
    def decode(self, sequences: Seq[Sequence], num_rounds: int = 1) -> Read:
        """One token for every sequence."""
        assert num_rounds == 1, "the host samples every token"
        self._arrange()
        members: list[Sequence] = []
        logits: list[Tensor] = []
        for cohort in self._cohorts:
            alive = [member for member in cohort.members if member is not None]
            own_BV, cohort.cache = self._forward(alive, cohort.cache)
            members += alive
            logits.append(own_BV)
        assert {s.number for s in members} == {s.number for s in sequences}, "every row belongs to a decoding sequence"
        return sampled_from(torch.cat(logits).cpu(), members)

    @torch.inference_mode()
    def score(self, texts: Seq[Scoring]) -> list[PromptScores]:
        """Log-probabilities of the scored tokens of texts with one temperature, each by a plain forward pass."""
        scores: list[PromptScores] = []
        for text in texts:
            ids = torch.from_numpy(text.tokens.astype(np.int64)).to(self._device)
            logits_LV = self._model(input_ids=ids[None], use_cache=False).logits[0]
            logits_NV = logits_LV[text.num_prompt - 1 : -1].float() / text.temperature
            scores += scores_of([text], logits_NV.__getitem__)
        return scores

    def keep(self, sequence: Sequence) -> None:
        """Nothing is kept for others."""

    def leave(self, sequence: Sequence) -> None:
        """Drop its row before the next step."""
        for cohort in self._cohorts:
            cohort.members = [None if member is sequence else member for member in cohort.members]

    def _arrange(self) -> None:
        """Drop the rows of sequences that left; join cohorts of one length."""
        by_length: dict[int, list[_Cohort]] = {}
        for cohort in self._cohorts:
            first = next((member for member in cohort.members if member is not None), None)
            if first is not None:
                cohort.close_gaps()
                by_length.setdefault(len(first.tokens), []).append(cohort)
        self._cohorts = [
            _Cohort([m for cohort in alike for m in cohort.members], _joined([cohort.cache for cohort in alike]))
            for alike in by_length.values()
        ]

    def _forward(self, sequences: Seq[Sequence], cache: Any) -> tuple[Tensor, Any]:
        """Logits [B, V] after the last token of sequences of one length, and the cache with all of their tokens. `cache` holds all
        but the last; None: nothing is computed yet."""
        ids_BL = self.new_ids(sequences, cache)
        if self._recompute:
            return self._model(input_ids=ids_BL, use_cache=False).logits[:, -1], None
        return _continued(self._model, ids_BL, cache, len(sequences[0].tokens) - ids_BL.shape[1])

    def new_ids(self, sequences: Seq[Sequence], cache: Any) -> Tensor:
        """The tokens [B, L] that are not in the cache."""
        return torch.tensor([s.tokens if cache is None else s.tokens[-1:] for s in sequences], device=self._device)


def _continued(model: Any, ids_BL: Tensor, cache: Any, num_before: int = 0) -> tuple[Tensor, Any]:
    """Last logits [B, V] and the cache, which the model makes at first; it holds `num_before` tokens."""
    takes = inspect.signature(model.forward).parameters
    name = "cache_params" if "cache_params" in takes else "past_key_values"
    options = {} if cache is None else {name: cache}
    if "position_ids" in takes:  # some models count from zero where none are given
        positions_L = torch.arange(num_before, num_before + ids_BL.shape[1], device=ids_BL.device)
        options["position_ids"] = positions_L.expand_as(ids_BL)
    out = model(input_ids=ids_BL, use_cache=True, **options)
    return out.logits[:, -1], getattr(out, name)


def _joined(caches: list[Any]) -> Any:
    """One cache with the rows of all, which hold the same number of tokens."""
    if len(caches) == 1 or caches[0] is None:
        return caches[0]
    joined = copy.copy(caches[0])
    joined.layers = []
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        layer = copy.copy(layers[0])
        for name, value in vars(layers[0]).items():
            parts = [vars(other)[name] for other in layers]
            if isinstance(value, dict):
                setattr(layer, name, {key: _rows_of([part[key] for part in parts]) for key in value})
            else:
                setattr(layer, name, _rows_of(parts))
        joined.layers.append(layer)
    return joined


def _rows_of(parts: list[Any]) -> Any:
    """Tensors with a batch dimension one after the other; anything else is the same in all."""
    is_batched = isinstance(parts[0], Tensor) and parts[0].dim() > 1
    return torch.cat(parts) if is_batched else parts[0]


@torch.inference_mode()
def _cache_is_exact(view: Any) -> bool:
    """True if a prompt and single tokens after it, through the cache, give the logits of a plain forward pass; in two rows, which
    are exchanged and joined in between."""
    device = view.get_input_embeddings().weight.device
    vocab_size = view.get_input_embeddings().weight.shape[0]
    ids_BL = ((torch.arange(2 * _PROBED, device=device) * 7 + 1) % vocab_size).view(2, _PROBED)
    plain_BV = view(input_ids=ids_BL, use_cache=False).logits[:, -1]
    try:
        cache = _joined([_continued(view, ids_BL[row : row + 1, :_PROBED_PROMPT], None)[1] for row in (1, 0)])
        cache.reorder_cache(torch.tensor([1, 0], device=device))
        for place in range(_PROBED_PROMPT, _PROBED):
            logits_BV, cache = _continued(view, ids_BL[:, place : place + 1], cache, place)
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return False
    tolerance = _TOLERANCE if plain_BV.dtype is torch.float32 else _TOLERANCE_HALF
    scale = float(plain_BV.abs().nan_to_num().max()) + 1e-6
    return bool(torch.allclose(logits_BV.float(), plain_BV.float(), rtol=0, atol=tolerance * scale, equal_nan=True))


@torch.inference_mode()
def _bytes_per_token(view: Any) -> int:
    """Bytes by which the cache grows with a token."""
    device = view.get_input_embeddings().weight.device
    sizes = [
        _num_bytes(_continued(view, torch.zeros(1, length, dtype=torch.long, device=device), None)[1])
        for length in (1, 1 + _PROBED)
    ]
    return max(sizes[1] - sizes[0], 0) // _PROBED


def _num_bytes(cache: Any) -> int:
    values = [value for layer in cache.layers for value in vars(layer).values()]
    tensors = [t for value in values for t in (value.values() if isinstance(value, dict) else [value])]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
