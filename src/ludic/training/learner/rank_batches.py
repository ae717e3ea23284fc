"""One batch for all ranks: fetched by the first or by each, concatenated, and scattered in shares of equal length.

A rank that cannot go on (no more requests, a signal, an error) reports the reason in the place of a batch, so that all ranks
end at the same step, for the same reason.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from ludic.distributed.ranks import RankFailed, Ranks
from ludic.training.learner.gradients import batch_facts
from ludic.training.learner.packing import balanced_shares
from ludic.training.learner.stop import StopRequested
from ludic.training.losses import BatchFacts
from ludic.types import LudicError, RequestsExhausted, SAWItem


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
    """What one rank trains on, and what it must know of the others' shares."""

    items: list[SAWItem]
    facts: BatchFacts
    """Of the whole batch."""
    stats: dict[str, float]
    """Of the whole batch."""


class StopKind(StrEnum):
    """Why a rank has no batch; of several, the first of these is reported to all ranks."""

    FAILED = "failed"
    STOPPED = "stopped"
    EXHAUSTED = "exhausted"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class RankStop:
    """What a rank reports in the place of a batch."""

    kind: StopKind
    reason: str

    @classmethod
    def of(cls, error: Exception) -> "RankStop":
        if isinstance(error, StopRequested):
            return cls(StopKind.STOPPED, str(error))
        if isinstance(error, RequestsExhausted):
            return cls(StopKind.EXHAUSTED, str(error))
        if isinstance(error, NothingToTrainOn):
            return cls(StopKind.NOTHING, str(error))
        return cls(StopKind.FAILED, f"{type(error).__name__}: {error}")

    def error(self) -> Exception:
        kinds: dict[StopKind, type[Exception]] = {
            StopKind.FAILED: RankFailed,
            StopKind.STOPPED: StopRequested,
            StopKind.EXHAUSTED: RequestsExhausted,
            StopKind.NOTHING: NothingToTrainOn,
        }
        return kinds[self.kind](self.reason)


def scatter_batch(
    ranks: Ranks,
    report: PreparedBatch | RankStop,
    describe: Callable[[PreparedBatch], dict[str, float]],
    num_shares: int | None = None,
) -> RankBatch:
    """This rank's share of what all ranks have brought. `describe` is asked on the first, about the whole batch.

    `num_shares` is 1 where all ranks work on the same samples; None gives each its own.
    """
    reports = ranks.gather(report)
    received: RankBatch | RankStop = ranks.scatter(
        None if reports is None else _make_shares(reports, describe, num_shares or ranks.world_size)
    )
    if isinstance(received, RankStop):
        raise received.error()
    return received


def _make_shares(
    reports: Sequence[PreparedBatch | RankStop], describe: Callable[[PreparedBatch], dict[str, float]], num_shares: int
) -> Sequence[RankBatch | RankStop]:
    stop = _common_stop(reports)
    if stop is not None:
        return [stop] * len(reports)
    whole = _concatenate([report for report in reports if isinstance(report, PreparedBatch)])
    try:
        facts, stats = batch_facts(whole.items), describe(whole)
    except Exception as error:  # noqa: BLE001 - the other ranks wait for their shares, and get the error instead
        return [RankStop.of(error)] * len(reports)
    shares = balanced_shares(whole.items, num_shares)
    return [RankBatch(shares[rank % num_shares], facts, stats) for rank in range(len(reports))]


def _common_stop(reports: Sequence[PreparedBatch | RankStop]) -> RankStop | None:
    stops = [(rank, report) for rank, report in enumerate(reports) if isinstance(report, RankStop)]
    for kind in StopKind:
        for rank, stop in stops:
            has_others = kind is StopKind.NOTHING and any(isinstance(r, PreparedBatch) and r.items for r in reports)
            if stop.kind is kind and not has_others:
                said = f"failed: {stop.reason}" if kind is StopKind.FAILED else f"says: {stop.reason}"
                return RankStop(kind, f"Rank {rank} {said}")
    return None


def _concatenate(parts: Sequence[PreparedBatch]) -> PreparedBatch:
    """Samples one after the other, counts added up, numbers about them averaged by how many samples they speak of."""
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


def credit_over_ranks(
    ranks: Ranks, items: Sequence[SAWItem], credit: Callable[[list[SAWItem]], list[SAWItem]]
) -> tuple[list[SAWItem], BatchFacts]:
    """Samples of all ranks through `credit`, which sees the whole batch; each rank gets its own back, with the new facts."""
    gathered = ranks.gather(list(items))
    if gathered is None:
        returned: tuple[list[SAWItem], BatchFacts] = ranks.scatter(None)
        return returned
    credited = iter(credit([item for share in gathered for item in share]))
    shares = [[next(credited) for _ in share] for share in gathered]
    facts = batch_facts([item for share in shares for item in share])
    return ranks.scatter([(share, facts) for share in shares])
