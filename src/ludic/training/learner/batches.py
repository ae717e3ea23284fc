"""Turns a source's batch into one rank's share of it: leave out what cannot be trained on, gather all ranks' batches, scatter.

`TrainingLoop` fetches and prepares; learners share batches out. A rank that cannot continue (no more requests, a signal, an error)
reports the reason in the place of a batch, so that all ranks end at the same step, for the same reason. Also here: the metrics
of a batch before its update, and the state of the data for checkpoints.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, TypeAlias

from ludic.distributed.ranks import RankFailed, Ranks
from ludic.training.algorithms import RLAlgorithm
from ludic.training.config import TrainerConfig
from ludic.training.guards import check_masks
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.metrics import batch_stats
from ludic.training.learner.packing import balanced_shares, fit_length
from ludic.training.losses import BatchFacts, Loss
from ludic.types import BatchSource, ConfigError, LudicError, Reducer, RequestsExhausted, SAWBatch, SAWItem, Stateful
from ludic.types.interfaces import is_saved, own_parts
from ludic.util.stop import StopRequested

logger = logging.getLogger(__name__)

_OF_ROLLOUTS = ("num_rollouts_without_samples", "num_failed", "num_unscored")
"""Counts of the source that explain an empty batch."""
_FULL = "Turn that off: top_p=1, top_k=0, min_p=0, min_tokens=0, no penalties"


class NothingToTrainOn(LudicError, RuntimeError):
    """Batch after batch had no sample left."""


@dataclass(slots=True)
class PreparedBatch:
    """A batch that can be trained on, and what was left out of it."""

    items: list[SAWItem]
    meta: dict[str, Any] = field(default_factory=dict)
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankBatch:
    """The samples that one rank trains on, with facts and metrics of the whole batch."""

    items: list[SAWItem]
    facts: BatchFacts
    stats: dict[str, float]
    places: list[int] | None = None
    """Positions of the items in the whole batch, where it is shared."""


Describe: TypeAlias = Callable[[PreparedBatch], dict[str, float]]
"""The metrics of a whole batch before it is trained on."""


# --- prepare ---


def _warn_of_missing_scores(prepared: PreparedBatch) -> None:
    unscored, total = (float(prepared.meta.get(name, 0)) for name in ("num_unscored", "target_rollouts"))
    if unscored > total / 2 > 0:
        logger.warning(
            "A judge or reward function failed on %d of %d episodes: this update trains on the few that are left. The first "
            "failure is logged above.", unscored, total,
        )  # fmt: skip


async def fetch(source: BatchSource, algo: RLAlgorithm, cfg: TrainerConfig, step: int) -> PreparedBatch:
    """The next batch that has anything to train on."""
    left_out: dict[str, float] = {}
    for number in range(1, cfg.max_empty_batches + 1):
        prepared = prepare(await source.next_batch(), algo, cfg, step)
        if prepared.items:
            _warn_of_missing_scores(prepared)
            return prepared
        counts = prepared.counts | {name: float(prepared.meta.get(name, 0)) for name in _OF_ROLLOUTS}
        because = prepared.meta.get("unscored_because", "")
        if counts["num_unscored"]:
            if step == 0 and counts["num_unscored"] == prepared.meta.get("target_rollouts"):
                raise NothingToTrainOn(
                    f"A judge or reward function failed on all {counts['num_unscored']:.0f} episodes of the first batch: {because}"
                )
            logger.warning(
                "A judge or reward function failed on %d episodes, and the batch has nothing left to train on: it is "
                "skipped (%d of max_empty_batches=%d). The first failure is logged above.",
                counts["num_unscored"], number, cfg.max_empty_batches,
            )  # fmt: skip
        left_out = {name: left_out.get(name, 0) + count for name, count in counts.items()}
        await asyncio.sleep(0)  # an empty source must not block the event loop
    counted = ", ".join(f"{name} {count:.0f}" for name, count in left_out.items() if count) or "nothing"
    raise NothingToTrainOn(
        f"{cfg.max_empty_batches} batches in a row had nothing to train on at step {step}; left out: {counted}. "
        "Are all rewards of each group equal (zero weights), is everything older than max_lag, too long, or filtered? Were any "
        f"tokens sampled?{f' A judge or reward function failed, last with {because}' if because else ''}"
    )


def prepare(batch: SAWBatch, algo: RLAlgorithm, cfg: TrainerConfig, step: int) -> PreparedBatch:
    """Leave out samples that are too old, that the algorithm's hooks drop, or that are too long."""
    num_received = len(batch.items)
    fresh = [item for item in batch.items if cfg.max_lag is None or (_lag(item, step) or 0) <= cfg.max_lag]
    kept = SAWBatch(items=fresh, meta=dict(batch.meta))
    if algo.preprocess is not None and fresh:
        kept = algo.preprocess(kept)
    require_trainable_sampling(kept.items, algo.loss)
    fitted = fit_length(kept.items, cfg.max_seq_len, cfg.too_long)
    items = [item for item in fitted.items if item.num_action_tokens]
    if len(items) < len(kept.items):
        items = _whole_comparisons(items, kept.items)
    counts = {
        "num_stale": float(num_received - len(fresh)),
        "num_filtered": float(len(fresh) - len(kept.items)),
        "num_too_long": float(fitted.num_dropped),
        "num_cut": float(fitted.num_truncated),
        "num_without_action": float(len(fitted.items) - len(items)),
    }
    return PreparedBatch(items, kept.meta, counts)


def _whole_comparisons(items: list[SAWItem], all_items: Sequence[SAWItem]) -> list[SAWItem]:
    """Without what is left of comparisons that have lost a sample."""
    whole = Counter(item.origin.comparison for item in all_items)
    left = Counter(item.origin.comparison for item in items)
    return [i for i in items if (name := i.origin.comparison) is None or left[name] == whole[name]]


def _lag(item: SAWItem, step: int) -> int | None:
    """Number of versions that its oldest token is behind; None if the sample does not say."""
    return None if item.oldest_version is None else step - item.oldest_version


def describe(
    whole: PreparedBatch, step: int, reducers: Mapping[str, Reducer] | None, tokenizer: Any = None
) -> dict[str, float]:
    """The metrics of a batch before it is trained on."""
    if step == 0:
        check_masks(whole.items, tokenizer)
    lags = [lag for item in whole.items if (lag := _lag(item, step)) is not None]
    stats = {**batch_stats(whole.items, whole.meta, reducers), **whole.counts}
    return stats | ({"lag_mean": sum(lags) / len(lags), "lag_max": float(max(lags))} if lags else {})


def require_trainable_sampling(items: Sequence[SAWItem], loss: Loss) -> None:
    """ConfigError for the first sample whose probabilities the trainer cannot compute as the sampler did: ratios would be wrong."""
    if not loss.needs.old_logps:
        return
    for item in items:
        attached, name = item.attachments, f"A sample (rollout {item.origin.rollout_id})"
        if attached.untrainable_sampling is not None and attached.actor_logps is not None:
            raise ConfigError(
                f"{name} was sampled with {attached.untrainable_sampling}, and the remaining candidates were not recorded: "
                f"its log-probs are of a distribution that the trainer cannot repeat. {_FULL}. The embedded engine records it "
                "for top_p, top_k and min_p, if log-probs are asked for: ReturnSpec.for_rl()."
            )
        has_candidates = attached.candidates is not None and len(attached.candidates.ids) > 0
        if has_candidates and attached.teacher_logps is not None:
            raise ConfigError(
                f"{name} was drawn from a part of the vocabulary, but its teacher's log-probs are over all of it; their "
                f"difference means nothing. {_FULL}, no max_think."
            )


def data_states(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in _parts(algo, source).items()}


def load_data_states(algo: RLAlgorithm, source: BatchSource | None, state: Mapping[str, Any]) -> None:
    for name, part in _parts(algo, source).items():
        if name in state:
            part.load_state_dict(state[name])


def _parts(algo: RLAlgorithm, source: BatchSource | None) -> dict[str, Stateful]:
    # The source last: one that works ahead restores the credit rule's state from before the batches that it makes again.
    parts: dict[str, Any] = {
        "credit_assigner": algo.credit_assigner,
        **own_parts(algo.loss, "loss"),
        "batch_source": source,
    }
    return {name: part for name, part in parts.items() if is_saved(part)}


# --- over ranks ---


class StopKind(StrEnum):
    """Why a rank has no batch. Of several reasons the first in this order is reported to all ranks."""

    FAILED = "failed"
    STOPPED = "stopped"
    EXHAUSTED = "exhausted"
    NOTHING = "nothing"


_ERRORS: dict[StopKind, type[Exception]] = {
    StopKind.FAILED: RankFailed,
    StopKind.STOPPED: StopRequested,
    StopKind.EXHAUSTED: RequestsExhausted,
    StopKind.NOTHING: NothingToTrainOn,
}


@dataclass(frozen=True, slots=True)
class RankStop:
    """The report of a rank that has no batch."""

    kind: StopKind
    reason: str

    @classmethod
    def of(cls, error: Exception) -> "RankStop":
        kind = next((kind for kind, known in _ERRORS.items() if isinstance(error, known)), StopKind.FAILED)
        return cls(kind, f"{type(error).__name__}: {error}" if kind is StopKind.FAILED else str(error))

    def error(self) -> Exception:
        return _ERRORS[self.kind](self.reason)


def scatter_batch(
    ranks: Ranks,
    report: PreparedBatch | RankStop,
    describe: Describe,
    num_shares: int | None = None,
    *,
    share_prefixes: bool = False,
) -> RankBatch:
    """This rank's share of all ranks' batches. `describe` is called on the first rank, for the whole batch.

    `num_shares` is 1 if all ranks compute the same samples, and less than the ranks if neighbours do; None gives each its own.
    """
    reports = ranks.gather(report)
    received: RankBatch | RankStop = ranks.scatter(
        None if reports is None else _make_shares(reports, describe, num_shares or ranks.world_size, share_prefixes)
    )
    if isinstance(received, RankStop):
        raise received.error()
    return received


def _make_shares(
    reports: Sequence[PreparedBatch | RankStop], describe: Describe, num_shares: int, share_prefixes: bool
) -> Sequence[RankBatch | RankStop]:
    stop = _common_stop(reports)
    if stop is not None:
        return [stop] * len(reports)
    whole = _concatenate([report for report in reports if isinstance(report, PreparedBatch)])
    try:
        facts, stats = batch_facts(whole.items), describe(whole)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for their shares, and get the error instead
        return [RankStop.of(error)] * len(reports)
    shares = balanced_shares(whole.items, num_shares, share_prefixes=share_prefixes)
    place_of = {id(item): place for place, item in enumerate(whole.items)}
    places = [[place_of[id(item)] for item in share] for share in shares]
    own = [rank * num_shares // len(reports) for rank in range(len(reports))]  # neighbours compute the same samples
    return [RankBatch(shares[n], facts, stats, places[n]) for n in own]


def _common_stop(reports: Sequence[PreparedBatch | RankStop]) -> RankStop | None:
    """Why all ranks stop, or None. Those with nothing to train on take their share of the others' batches."""
    has_items = any(isinstance(report, PreparedBatch) and report.items for report in reports)
    for kind in StopKind:
        for rank, stop in enumerate(reports):
            if isinstance(stop, RankStop) and stop.kind is kind and not (kind is StopKind.NOTHING and has_items):
                said = "failed" if kind is StopKind.FAILED else "says"
                return RankStop(kind, f"Rank {rank} {said}: {stop.reason}")
    return None


def _concatenate(parts: Sequence[PreparedBatch]) -> PreparedBatch:
    """Samples one after the other, counts added up, numbers in `meta` averaged by the number of samples."""
    full = [part for part in parts if part.items]
    return PreparedBatch(
        items=[item for part in full for item in part.items],
        meta=_average_numbers([(part.meta, len(part.items)) for part in full]),
        counts={name: sum(p.counts.get(name, 0.0) for p in parts) for part in parts for name in part.counts},
    )


def _average_numbers(metas: Sequence[tuple[Mapping[str, Any], int]]) -> dict[str, Any]:
    together: dict[str, Any] = {}
    for name in {name: None for meta, _ in metas for name in meta}:
        given = [(meta[name], weight) for meta, weight in metas if name in meta]
        if len(given) > 1 and all(type(value) in (int, float) for value, _ in given):
            together[name] = sum(value * weight for value, weight in given) / sum(weight for _, weight in given)
        else:
            together[name] = given[0][0]
    return together


def part_of_batch(share: list[SAWItem], items: Sequence[SAWItem]) -> RankBatch:
    """A rank's share of `items`, which one optimizer step trains on."""
    return RankBatch(share, batch_facts(items), {"num_tokens": float(sum(len(item.input_ids) for item in items))})


def collect_items(ranks: Ranks, batch: RankBatch, num_shares: int) -> list[SAWItem]:
    """All samples of a batch, in its order, on the first rank; none on the others."""
    gathered = ranks.gather((batch.places or [], batch.items))
    shares = [] if gathered is None else gathered[:: len(gathered) // num_shares]
    found = [pair for share in shares for pair in zip(*share, strict=True)]
    return [item for _, item in sorted(found, key=lambda pair: pair[0])]


def scatter_part(ranks: Ranks, items: Sequence[SAWItem], num_shares: int, *, share_prefixes: bool = False) -> RankBatch:
    """This rank's share of `items`, which the first rank has."""
    parts: list[RankBatch] | None = None
    if ranks.is_first:
        shares = balanced_shares(items, num_shares, share_prefixes=share_prefixes)
        whole = part_of_batch([], items)
        parts = [replace(whole, items=shares[n * num_shares // ranks.world_size]) for n in range(ranks.world_size)]
    received: RankBatch = ranks.scatter(parts)
    return received


def credit_over_ranks(
    ranks: Ranks, items: Sequence[SAWItem], credit: Callable[[list[SAWItem]], list[SAWItem]]
) -> tuple[list[SAWItem], BatchFacts]:
    """Apply `credit` to the samples of all ranks at once; each rank gets its own back, with the new facts."""
    gathered = ranks.gather(list(items))
    if gathered is None:
        returned: tuple[list[SAWItem], BatchFacts] = ranks.scatter(None)
        return returned
    credited = iter(credit([item for share in gathered for item in share]))
    shares = [[next(credited) for _ in share] for share in gathered]
    facts = batch_facts([item for share in shares for item in share])
    return ranks.scatter([(share, facts) for share in shares])
