"""`ludic plot`: the metrics of runs as curves in the terminal, or as a PNG (matplotlib, the extra `plot`)."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ludic.cli.args import Switch, parse
from ludic.cli.terminal.colour import make_console
from ludic.types import ConfigError, MissingExtra
from ludic.util.metrics_file import read_metrics
from ludic_view.command import find_runs

USUAL = ("train/avg_total_reward", "eval/accuracy")
MARKS = "•×+o#%@&"
HEIGHT = 12
Points = list[tuple[int, float]]
Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class PlotArgs:
    """Draw metrics of runs as curves: in the terminal, or as a picture."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, their names in runs/, or metrics.jsonl files."""
    metric: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME")] = ()
    """Metric to draw; may be repeated. Default: train/avg_total_reward, and eval/accuracy where there is one."""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write a picture (.png, .svg, .pdf) instead. Evaluations have their confidence intervals."""
    title: str = ""
    """Title of the picture."""
    x: Literal["updates", "seconds"] = "updates"
    """Against what: the number of updates, or the seconds spent in them (generation included, evaluations not)."""
    seeds: Switch = False
    """Runs whose names differ only in a number at their end (ttt_0, ttt_1) are one curve: their mean, in a picture with a band
    from the lowest to the highest."""

    def __post_init__(self) -> None:
        if not self.runs:
            raise ConfigError("Give at least one run, such as `ludic plot runs/my_run`.")


def plot(args: list[str]) -> int:
    given = parse(PlotArgs, args, prog="ludic plot")
    runs = {_name(place): _read(place) for place in given.runs}
    known = sorted({name for rows in runs.values() for row in rows for name in row} - {"step", "time"})
    # Of several policies each has its own: ann/train/avg_total_reward.
    names = given.metric or tuple(name for usual in USUAL for name in known if f"/{name}".endswith(f"/{usual}"))
    missing = [name for name in names if name not in known]
    if missing or not names:
        raise ConfigError(
            f"No run has {', '.join(missing) or ' or '.join(USUAL)}. There are: {', '.join(known) or 'no metrics yet'}."
        )
    curves = _by_seeds(runs) if given.seeds else {run: [rows] for run, rows in runs.items()}
    for run, several in curves.items():
        for name in names:
            if not _mean(several, name) and any(points_of(rows, name) for rows in several):
                raise ConfigError(
                    f"The runs of {run} have no step of {name} in common, so there is no mean to draw. Leave --seeds out, or name "
                    "runs that were logged at the same steps."
                )
    if given.out is not None:
        _draw(given.out, curves, names, given.title, given.x)
        print(f"Written: {given.out}")
        return 0
    width = min(max(shutil.get_terminal_size().columns, 40), 160)
    for name in names:
        series = {run: points for run, several in curves.items() if (points := _mean(several, name))}
        if given.x == "seconds":
            series = {run: _in_seconds(curves[run], points) for run, points in series.items()}
        make_console().print("\n".join(chart(name, series, width)), markup=False)
    return 0


def _name(place: Path) -> str:
    return place.resolve().parent.name if place.name == "metrics.jsonl" else place.stem if place.suffix else place.name


def _read(place: Path) -> list[dict[str, Any]]:
    path = place if place.is_file() else _metrics_in(place)
    rows = list(read_metrics(path))
    if not rows:
        raise ConfigError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def _metrics_in(place: Path) -> Path:
    runs = find_runs(place)
    if len(runs.ids()) != 1:
        raise ConfigError(f"{place} is not a run. Runs in it: {', '.join(runs.ids()[:20]) or 'none'}.")
    path = runs.root / runs.ids()[0] / "metrics.jsonl"
    if not path.is_file():
        raise ConfigError(f"There is no {path}: the run has not logged a step yet.")
    return path


def points_of(rows: Rows, name: str) -> Points:
    """(step, value) of the lines that have the metric; an evaluation belongs to the step that it evaluated."""
    where = "eval/step" if name.startswith("eval/") else "step"
    return [(int(row.get(where) or row["step"]), row[name]) for row in rows if row.get(name) is not None]


# --- several seeds ----------------------------------------------------------------------------------------------


def _by_seeds(runs: dict[str, list[dict[str, Any]]]) -> dict[str, list[Rows]]:
    """The runs under their names without the number at the end."""
    curves: dict[str, list[Rows]] = {}
    for run, rows in runs.items():
        curves.setdefault(run.rstrip("0123456789").rstrip("_-. ") or run, []).append(rows)
    return curves


def _values_by_step(several: Sequence[Rows], name: str) -> dict[int, list[float]]:
    """The values of every step that all runs have which have the metric at all."""
    found = [dict(points) for rows in several if (points := points_of(rows, name))]
    shared = set.intersection(*map(set, found)) if found else set()
    return {step: [values[step] for values in found] for step in sorted(shared)}


def _mean(several: Sequence[Rows], name: str) -> Points:
    return [(step, sum(values) / len(values)) for step, values in _values_by_step(several, name).items()]


def _in_seconds(several: Sequence[Rows], points: Points) -> Points:
    """The points at the seconds that their updates, and those before, took: of several runs the mean."""
    times: list[dict[int, float]] = []
    for rows in several:
        taken = {int(row["step"]): row["perf/step_s"] for row in rows if row.get("perf/step_s") is not None}
        times.append({0: 0.0} | dict(zip(taken, accumulate(taken.values()), strict=True)))
    if missing := [step for step, _ in points if any(step not in known for known in times)]:
        raise ConfigError(
            f"--x seconds needs perf/step_s of every update; there is none of update {missing[0]}. Leave --x out to draw against "
            "updates."
        )
    return [(round(sum(known[step] for known in times) / len(times)), value) for step, value in points]


# --- in the terminal --------------------------------------------------------------------------------------------


def chart(name: str, series: dict[str, Points], width: int, height: int = HEIGHT) -> list[str]:
    """The lines of one chart: a mark per run, a column per step, or the mean of several steps."""
    marks = {run: MARKS[number % len(MARKS)] for number, run in enumerate(series)}
    values = [value for points in series.values() for _, value in points]
    steps = [step for points in series.values() for step, _ in points]
    low, high, first, last = min(values), max(values), min(steps), max(steps)
    num_columns = min(width - 12, max(last - first + 1, 40))
    grid = [[" "] * num_columns for _ in range(height)]
    for run, points in series.items():
        buckets: dict[int, list[float]] = {}
        for step, value in points:
            column = 0 if last == first else (step - first) * (num_columns - 1) // (last - first)
            buckets.setdefault(column, []).append(value)
        for column, found in buckets.items():
            share = 0.5 if high == low else (sum(found) / len(found) - low) / (high - low)
            grid[height - 1 - min(int(share * height), height - 1)][column] = marks[run]
    labels = {0: f"{high:.4g}", height - 1: f"{low:.4g}"}
    lines = [f"{labels.get(row, ''):>10} │{''.join(grid[row]).rstrip()}" for row in range(height)]
    axis = f"{first}{str(last).rjust(max(num_columns - len(str(first)), 1))}" if last != first else str(first)
    legend = [
        f"           {marks[run]} {run}: {points[0][1]:.4g} → {points[-1][1]:.4g}" for run, points in series.items()
    ]
    return [name, *lines, f"{'':>10} └{'─' * num_columns}", f"{'':>12}{axis}", *legend, ""]


# --- as a picture -----------------------------------------------------------------------------------------------


def _draw(file: Path, curves: Mapping[str, Sequence[Rows]], names: Sequence[str], title: str, x: str) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plot", "ludic plot --out (without it, the curve is drawn in the terminal)") from error
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for number, (run, several) in enumerate(curves.items()):
        for metric, name in enumerate(names):
            if points := _mean(several, name):
                shown = points if x == "updates" else _in_seconds(several, points)
                colour = f"C{number if len(curves) > 1 else metric}"  # of a run, or of a metric where there is one run
                _draw_curve(axes, colour, f"{run}: {name}", several, name, shown)
    axes.set_xlabel("update" if x == "updates" else "seconds of updates")
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=110)
    except (OSError, ValueError) as error:  # another ending than matplotlib knows
        raise ConfigError(f"Cannot write {file}: {error}.") from error
    finally:
        pyplot.close(figure)


def _draw_curve(axes: Any, colour: str, label: str, several: Sequence[Rows], name: str, points: Points) -> None:
    """A run with its confidence intervals, if it has any; several as their mean and a band, with dots if they are few."""
    at = [step for step, _ in points], [value for _, value in points]
    if len(several) > 1:
        values = _values_by_step(several, name)
        label = f"{label} ({len(next(iter(values.values())))} runs)"
        axes.plot(*at, "o-" if len(points) <= 10 else "-", color=colour, label=label)
        axes.fill_between(
            at[0], [min(v) for v in values.values()], [max(v) for v in values.values()], color=colour, alpha=0.2
        )
    elif (interval := _interval(several[0], name, points)) is not None:
        axes.errorbar(*at, interval, fmt="o-", capsize=4, color=colour, label=f"{label} (95 %)")
    else:
        axes.plot(*at, alpha=0.6, color=colour, label=label)


def _interval(rows: Rows, name: str, points: Points) -> list[list[float]] | None:
    """Reach of the confidence interval below and above, for metrics that have one."""
    having = [row for row in rows if row.get(name) is not None]
    if not all(row.get(f"{name}_low") is not None and row.get(f"{name}_high") is not None for row in having):
        return None
    below = [max(value - row[f"{name}_low"], 0.0) for (_, value), row in zip(points, having, strict=True)]
    above = [max(row[f"{name}_high"] - value, 0.0) for (_, value), row in zip(points, having, strict=True)]
    return [below, above] if all(map(math.isfinite, [*below, *above])) else None
