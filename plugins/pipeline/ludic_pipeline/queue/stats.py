"""`PipelineStats`: counts of the queue and its learner, whether every item is accounted for, and what actors' scorers report."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ludic.util.files import parse_json

_MAX_REPORT = 65_536
"""Bytes of a report of scorers; a larger one is of another program."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineStats:
    """The queue at one moment, and the lags that this learner has seen."""

    produced: int = 0
    """Items pushed. This and the next four counts cover the queue's whole lifetime and all learners."""
    trained: int = 0
    """Items trained on and acknowledged (after the update or after a checkpoint, by the learner's setting)."""
    stale: int = 0
    """Items older than max_lag, or of a policy that was not resumed."""
    filtered: int = 0
    """Items dropped by the trainer's filters or length limit."""
    dead: int = 0
    """Items of dead letters: unreadable, untrainable, or learners died on them."""
    unacknowledged_groups: int = 0
    """Groups fetched and not acknowledged yet: in training, or waiting for a checkpoint."""
    unacknowledged_items: int = 0
    """Their items."""
    queue_groups: int = 0
    """Groups that no learner has fetched."""
    queue_items: int = 0
    """Their items."""
    num_foreign: int = 0
    """Entries not written by an actor; a learner moves them to the dead letters when it reads them."""
    oldest_waiting_s: float = 0.0
    """Age of the oldest group that no learner has fetched."""
    num_actors: int = 0
    """Live actors."""
    in_progress_items: int = 0
    """Items in progress at the actors."""
    num_dead_letters: int = 0
    """Dead letters kept for inspection."""
    version: int | None = None
    """The learner's policy version."""
    lags: Mapping[int, int] = field(default_factory=dict)
    """Lag → items that this learner trained on."""
    dropped_lags: Mapping[int, int] = field(default_factory=dict)
    """Lag → items that this learner dropped."""
    scorers: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the actors' scorers, such as what judges have cost: of all actors together, ended ones included."""

    @classmethod
    def read(cls, reply: Sequence[Any]) -> "PipelineStats":
        """Read a reply of the script COUNT_ITEMS: the fields from `produced` to `version`, the age in milliseconds; then the
        reports of scorers."""
        *counts, reports = reply
        told = dict(zip((field.name for field in fields(cls)), counts, strict=False))
        told["scorers"] = _combined_reports(reports)
        told["oldest_waiting_s"] /= 1000
        told["version"] = int(told["version"]) if told["version"].isdigit() else None
        return cls(**told)

    @property
    def in_queue(self) -> int:
        """Items of all entries in the queue, summed over the entries: waiting or not acknowledged yet."""
        return self.unacknowledged_items + self.queue_items

    @property
    def balance(self) -> int:
        """0 if every produced item is accounted for."""
        return self.produced - (self.trained + self.stale + self.filtered + self.dead + self.in_queue)

    def identity(self) -> str:
        """The account in one line, with the number of missing items, if any."""
        line = (
            f"produced {self.produced} = {self.trained} acknowledged + {self.stale} stale + {self.filtered} filtered + "
            f"{self.dead} dead + {self.unacknowledged_items} fetched + {self.queue_items} waiting"
        )
        return line if self.balance == 0 else f"{line} + {self.balance} UNACCOUNTED FOR"

    def metrics(self) -> dict[str, float]:
        """The numbers for a logger."""
        return {
            "queue_groups": float(self.queue_groups),
            "queue_items": float(self.queue_items),
            "queue_oldest_s": self.oldest_waiting_s,
            "queue_unacknowledged": float(self.unacknowledged_items),
            "queue_stale": float(self.stale),
            "queue_filtered": float(self.filtered),
            "queue_dead": float(self.dead),
            "queue_balance": float(self.balance),
            "num_actors": float(self.num_actors),
            **self.scorers,
        }


def scorer_report(metrics: Mapping[str, float], mean_weights: Mapping[str, float]) -> str:
    """Metrics of an actor's scorers as JSON: the value of each and, of a mean, its weight. Empty without scorers."""
    if not metrics:
        return ""
    return json.dumps({name: [float(value), mean_weights.get(name)] for name, value in metrics.items()})


def _combined_reports(reports: Iterable[bytes]) -> dict[str, float]:
    """Counts added up, means averaged by their weights. What no actor has written is left out."""
    sums: dict[str, float] = {}
    weights: dict[str, float] = {}
    for name, value, weight in (row for report in reports for row in _rows(report)):
        sums[name] = sums.get(name, 0.0) + value * (1.0 if weight is None else weight)
        if weight is not None:
            weights[name] = weights.get(name, 0.0) + weight
    return {name: total / weights[name] if weights.get(name) else total for name, total in sums.items()}


def _rows(report: bytes) -> list[tuple[str, float, float | None]]:
    """(metric, value, weight) of a report; empty if it is none."""
    try:
        found: Any = parse_json(report) if len(report) <= _MAX_REPORT else {}
        rows = [
            (name, float(value), None if weight is None else float(weight)) for name, (value, weight) in found.items()
        ]
    except (ValueError, TypeError, AttributeError):
        return []
    return [row for row in rows if math.isfinite(row[1]) and math.isfinite(row[2] or 0.0)]
