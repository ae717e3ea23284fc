"""Draw the reward curve of runs, and their evaluations with confidence intervals, as a PNG.

    python scripts/plot_run.py runs/my_run runs/another --out curve.png

A run is its folder, or a metrics.jsonl. Needs matplotlib (the extra plot).
"""
# ruff: noqa: T201 - a script prints

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, LudicError, MissingExtra


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the plot."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or metrics.jsonl files."""
    out: Path = Path("curve.png")
    """The picture to write."""
    train_key: str = "train/avg_total_reward"
    eval_key: str = "eval/accuracy"
    """Drawn with its `_low` and `_high` if they exist."""
    title: str = ""


def main(settings: Settings) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plot", "Drawing a curve") from error
    figure, left = pyplot.subplots(figsize=(8, 4.5))
    for number, run in enumerate(settings.runs):
        draw(left, read(run), settings, run.stem if run.suffix else run.name, f"C{number}")
    left.set_xlabel("update")
    left.set_title(settings.title)
    left.grid(alpha=0.3)
    left.legend()
    figure.tight_layout()
    figure.savefig(settings.out, dpi=110)
    print(f"Written: {settings.out}")


def read(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.exists():
        raise ConfigError(f"There is no {path}. Give the folder of a run, or its metrics.jsonl.")
    rows = list(read_metrics(path))
    if not rows:
        raise ConfigError(f"{path} is empty: the run has not logged a step yet.")
    return rows


def draw(axes: Any, rows: list[dict[str, Any]], settings: Settings, name: str, colour: str) -> None:
    train = [(row["step"], row[settings.train_key]) for row in rows if settings.train_key in row]
    if train:
        axes.plot(*zip(*train, strict=True), color=colour, alpha=0.6, label=f"{name}: {settings.train_key}")
    evals = [row for row in rows if row.get(settings.eval_key) is not None]
    if evals:
        steps = [row["eval/step"] for row in evals]
        means = [row[settings.eval_key] for row in evals]
        below = [mean - row.get(f"{settings.eval_key}_low", mean) for mean, row in zip(means, evals, strict=True)]
        above = [row.get(f"{settings.eval_key}_high", mean) - mean for mean, row in zip(means, evals, strict=True)]
        axes.errorbar(
            steps, means, [below, above], fmt="o-", color=colour, capsize=4, label=f"{name}: {settings.eval_key} (95 %)"
        )
    if not train and not evals:
        known = sorted({key for row in rows for key in row})
        raise ConfigError(
            f"{name} has neither {settings.train_key} nor {settings.eval_key}. It has: {', '.join(known)}."
        )


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"plot_run: {mistake}")
