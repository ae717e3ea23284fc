"""Reducers: one number from many records, declared as data.

A record is a mapping, such as a sample's meta or a line of an evaluation. A reducer declares the value to take from each, how to
combine the values, and what to divide by; a record without the value is skipped.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from ludic.types.errors import ConfigError
from ludic.types.steps import added

Record: TypeAlias = Mapping[str, Any]
ReducerKind: TypeAlias = Literal["mean", "sum", "count_true"]
NormalizeBy: TypeAlias = Literal["samples", "rollouts"]


@dataclass(frozen=True, slots=True)
class Reducer:
    """Computes one metric from records."""

    kind: ReducerKind
    """`mean` and `sum` of the values found, or how many of them are true."""
    source: str | Callable[[Record], Any]
    """A dotted path into the record ("info.correct"), or a function of it; None means that the value is missing."""
    transform: Callable[[Any], Any] | None = None
    """Applied to each value before it is combined."""
    normalize_by: NormalizeBy | None = None
    """Divide by the number of samples or rollouts, including those without a value."""
    as_percent: bool = False
    """For display; the number itself remains a fraction."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(ReducerKind):
            raise ConfigError(f"Reducer.kind={self.kind!r}; there are {', '.join(get_args(ReducerKind))}.")
        if self.normalize_by not in (None, *get_args(NormalizeBy)):
            raise ConfigError(
                f"Reducer.normalize_by={self.normalize_by!r}; there are None, {', '.join(get_args(NormalizeBy))}."
            )
        if self.kind == "mean" and self.normalize_by is not None:
            raise ConfigError(
                f"Reducer(kind='mean', normalize_by={self.normalize_by!r}) would divide twice: a mean is already per value. "
                "Use kind='sum' to divide by all samples or rollouts."
            )
        if isinstance(self.source, str) and not all(self.source.split(".")):
            raise ConfigError(
                f"Reducer.source={self.source!r} is not a dotted path, such as 'reward' or 'info.correct'."
            )

    def values(self, records: Sequence[Record]) -> list[Any]:
        """The values in the records, in order; missing ones are left out."""
        source = self.source
        read = source if callable(source) else lambda record: _follow(record, source)
        found = [value for record in records if (value := read(record)) is not None]
        return found if self.transform is None else [self.transform(value) for value in found]


def _follow(record: Record, path: str) -> Any:
    value: Any = record
    for key in path.split("."):
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value


def _was_cut_off(finish_reason: str) -> bool:
    """True for a completion that ran out of tokens."""
    return finish_reason == "length"


def default_reducers() -> dict[str, Reducer]:
    """The rates of samples cut by the server's token limit and by the trainer's `max_seq_len`."""
    return {
        "completion_truncated_rate": Reducer(
            kind="count_true", source="finish_reason", transform=_was_cut_off, normalize_by="samples", as_percent=True
        ),
        "seq_len_truncated_rate": Reducer(
            kind="count_true", source="seq_len_truncated", normalize_by="samples", as_percent=True
        ),
    }


GAME_RESULTS = ("win", "draw", "loss")
_MOST_RESULTS = 12


def result_rates(results: Sequence[str | None]) -> dict[str, float]:
    """`{result}_rate` of the episodes' info["result"]: the fraction of all episodes, including those without a result.

    A game has all three rates as soon as one occurs. More than a dozen different texts are no results and give no rates.
    """
    names = result_names(results)
    if len(names) > _MOST_RESULTS:
        return {}
    return {f"{name}_rate": sum(result == name for result in results) / len(results) for name in names}


def result_names(results: Sequence[str | None]) -> list[str]:
    """The results that occur; for a game all three."""
    seen = {result for result in results if result is not None}
    return [*GAME_RESULTS, *sorted(seen - set(GAME_RESULTS))] if seen & set(GAME_RESULTS) else sorted(seen)


def component_means(
    components: Sequence[Mapping[str, float]], scores: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """`reward/{component}`: what each adds to the mean total reward. `score/{component}`: its mean before the weight, if not 1.

    Both are given by rollout; one without a component counts as 0, as it does in the total.
    """
    rewards, before = added(components), added(scores)
    means = {f"reward/{name}": total / len(components) for name, total in rewards.items()}
    changed = {name: total for name, total in before.items() if total != rewards.get(name)}
    return means | {f"score/{name}": total / len(scores) for name, total in changed.items()}


def percent_keys(reducers: Mapping[str, Reducer]) -> frozenset[str]:
    """The metrics that a display shows in percent."""
    return frozenset(name for name, reducer in reducers.items() if reducer.as_percent)


def apply_reducers_to_records(
    records: Sequence[Record],
    reducers: Mapping[str, Reducer],
    *,
    sample_count: int | None = None,
    rollout_count: int | None = None,
) -> dict[str, float]:
    """One number per reducer; a mean or rate over nothing is left out.

    Without the counts, every record is a sample, and rollouts are distinguished by `rollout_id`.
    """
    counts: dict[NormalizeBy | None, int] = {None: 1, "samples": len(records) if sample_count is None else sample_count}
    if any(reducer.normalize_by == "rollouts" for reducer in reducers.values()):
        counts["rollouts"] = _count_rollouts(records) if rollout_count is None else rollout_count
    reduced = {}
    for name, reducer in reducers.items():
        total, denominator = _combine(name, reducer, records)
        denominator *= counts[reducer.normalize_by]
        if denominator > 0:
            reduced[name] = total / denominator
    return reduced


def _combine(name: str, reducer: Reducer, records: Sequence[Record]) -> tuple[float, int]:
    """(total, what a plain mean divides it by)."""
    values = reducer.values(records)
    if reducer.kind == "count_true":
        return float(sum(map(bool, values))), 1
    numbers = [_number(name, value) for value in values]
    return sum(numbers), (len(numbers) if reducer.kind == "mean" else 1)


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, int, float, np.number, np.bool_)):
        return float(value)
    raise ConfigError(
        f"The reducer {name!r} adds numbers, but a record holds {value!r} ({type(value).__name__}). Give it a transform "
        "that returns a number, or use kind='count_true'."
    )


def _count_rollouts(records: Sequence[Record]) -> int:
    ids = {record.get("rollout_id") for record in records}
    if None in ids:
        raise ConfigError(
            "A reducer divides by rollouts, but some records have no 'rollout_id'. Pass rollout_count, or normalise by samples."
        )
    return len(ids)
