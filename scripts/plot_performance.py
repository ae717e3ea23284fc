"""Draw tokens per second against batch size, the embedded engine and vLLM, from records of benchmarks/engine.py, as a PNG.

    python benchmarks/engine.py --vllm --json engine.jsonl
    python scripts/plot_performance.py engine.jsonl --out research/results/engine.png

One panel per model shape on which all engines were measured, on the workloads fixed1, fixed128 …; both engines return
log-probs. Of several records of one row the last counts. Needs matplotlib (the extra plot).
"""
# ruff: noqa: T201 - a script prints

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import tyro

from ludic.types import ConfigError, LudicError, MissingExtra

NAMES = {"ludic": "Ludic", "vllm": "vLLM"}
SHAPES = {"tiny": "tiny", "135m": "135M shape", "1.5b": "1.5B shape", "7b": "7B shape"}

Curve: TypeAlias = dict[int, float]
"""Batch size → tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the plot."""

    records: tyro.conf.Positional[tuple[Path, ...]]
    """Files that `benchmarks/engine.py --json` has written."""
    out: Path = Path("engine.png")
    """The picture to write."""
    hardware: str = ""
    """Only records of hardware whose name contains this."""


def main(settings: Settings) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plot", "Drawing a curve") from error
    rows = read(settings)
    found = {shape: curves(rows, shape) for shape in SHAPES}
    most = max(map(len, found.values()))  # engines: a shape without vLLM has no panel beside one with it
    shapes = [shape for shape, engines in found.items() if len(engines) == most]
    figure, panels = pyplot.subplots(1, len(shapes), figsize=(5.5 * len(shapes), 4), squeeze=False)
    for panel, shape in zip(panels[0], shapes, strict=True):
        draw(panel, shape, found[shape])
    panels[0][0].set_ylabel("tokens per second")
    figure.suptitle(textwrap.fill(source(rows), 70 * len(shapes)), fontsize=9)
    figure.tight_layout()
    figure.savefig(settings.out, dpi=110)
    print(f"Written: {settings.out}")


def read(settings: Settings) -> list[dict[str, Any]]:
    """The records of requests of a fixed length, with log-probs, from one kind of hardware."""
    lines = [line for path in settings.records for line in path.read_text().splitlines() if line.strip()]
    rows = [
        row
        for row in map(json.loads, lines)
        if row.get("benchmark") == "engine" and row["workload"].startswith("fixed") and row["logprobs"]
        and settings.hardware in row["hardware"]
    ]  # fmt: skip
    if not rows:
        raise ConfigError(
            f"{', '.join(map(str, settings.records))} has no record of a fixed workload"
            f"{f' on {settings.hardware}' if settings.hardware else ''}. Run benchmarks/engine.py --only fixed --json FILE."
        )
    found = sorted({row["hardware"] for row in rows})
    if len(found) > 1:
        raise ConfigError(f"The records are of {' and '.join(found)}. Choose one with --hardware.")
    return rows


def curves(rows: list[dict[str, Any]], shape: str) -> dict[str, Curve]:
    """Engine → its curve; the last record of a batch size counts."""
    found: dict[str, Curve] = {}
    for row in rows:
        if row["shape"] == shape:
            found.setdefault(row["engine"], {})[row["batch"]] = row["tokens_per_s"]
    return {engine: dict(sorted(found[engine].items())) for engine in NAMES if engine in found}


def draw(axes: Any, shape: str, found: dict[str, Curve]) -> None:
    batches = sorted({batch for curve in found.values() for batch in curve})
    for number, (engine, curve) in enumerate(found.items()):
        places = [batches.index(batch) for batch in curve]
        axes.plot(places, list(curve.values()), "os"[number] + "-", color=f"C{number}", label=NAMES[engine])
        for place, speed in zip(places, curve.values(), strict=True):
            axes.annotate(
                f"{speed:,.0f}", (place, speed), textcoords="offset points", xytext=(0, 7 - 20 * number),
                ha="center", fontsize=7, color=f"C{number}",
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_xticks(range(len(batches)), [str(batch) for batch in batches])
    axes.margins(x=0.15, y=0.15)
    axes.set_xlabel("requests at once")
    axes.set_title(SHAPES[shape], fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left")


def source(rows: list[dict[str, Any]]) -> str:
    """Where the numbers come from: hardware, versions and commits."""
    versions: dict[str, set[str]] = {}
    for row in rows:
        for name, shown in (("torch", "torch"), ("vllm", "vLLM")):
            if name in row["versions"]:
                versions.setdefault(shown, set()).add(row["versions"][name])
    parts = [f"{name} {', '.join(sorted(found))}" for name, found in versions.items()]
    commits = sorted({row["commit"] for row in rows if row["engine"] == "ludic"})
    return "; ".join([rows[0]["hardware"], *parts, f"Ludic {', '.join(commits)}", "log-probs returned"])


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as mistake:
        sys.exit(f"plot_performance: {mistake}")
