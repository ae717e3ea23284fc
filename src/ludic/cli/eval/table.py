"""The results table of an evaluation: a column per model, a row per metric, with intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.markup import escape
from rich.table import Table

from ludic.eval import Estimate, EvalReport, paired_difference

_PLAIN = {"mean_reward": "reward"}
_COUNTED = (
    # A cut-off reply counts as truncated and not as unreadable.
    ("unreadable replies", "unreadable_rate"),
    ("truncated", "over_limit_rate"),
    ("failed", "failed_rate"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One model's evaluation."""

    label: str
    report: EvalReport
    seconds: float


def make_table(columns: Sequence[Column]) -> Table:
    table = Table("", *(escape(column.label) for column in columns), box=None, pad_edge=False, title_justify="left")
    names = list(dict.fromkeys(name for column in columns for name in column.report.estimates))
    for name in names:
        cells = [column.report.estimates.get(name) for column in columns]
        table.add_row(_title(name), *(_cell(name, cell) for cell in cells), style="bold" if name == names[0] else "")
    if len(columns) > 1:
        table.add_row("better than the first by", "", *(_difference(columns[0], column) for column in columns[1:]))
    for title, name in _COUNTED:
        table.add_row(title, *(f"{column.report.metrics[name]:.1%}" for column in columns))
    table.add_row(
        "tokens per episode", *(f"{column.report.metrics['mean_completion_tokens']:.1f}" for column in columns)
    )
    table.add_row("tasks × samples", *map(_size, columns))
    table.add_row("time", *(f"{column.seconds:.1f} s" for column in columns))
    return table


def _title(name: str) -> str:
    return _PLAIN.get(name, name.removesuffix("_rate").replace("_", " "))


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if name in _PLAIN:
        return f"{estimate.mean:.3f}" + (
            "" if math.isinf(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
        )
    return f"{estimate.mean:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _difference(first: Column, other: Column) -> str:
    difference = paired_difference(first.report.outcomes, other.report.outcomes)
    in_percent = "accuracy" in first.report.estimates and "accuracy" in other.report.estimates
    mean, low, high = (
        f"{100 * x:+.1f}" if in_percent else f"{x:+.3f}" for x in (difference.mean, difference.low, difference.high)
    )
    unit = " points" if in_percent else ""
    return f"{mean}{unit}" if math.isinf(difference.low) else f"{mean}{unit} [{low}, {high}]"


def _size(column: Column) -> str:
    num_tasks, num_samples = column.report.metrics["num_tasks"], column.report.metrics["num_samples"]
    return f"{num_tasks:.0f} × {num_samples / num_tasks:g}"
