"""Compare settings over seeds: a table with intervals, a PNG of the means with their spread, and the curves as one small JSONL.

    python scripts/plot_seeds.py runs/key_door-*-[0-9] --out results/turn_credit.png --records results/turn_credit.jsonl
    python scripts/plot_seeds.py research/results/turn_credit.jsonl --baseline grpo --reach 0.5

Run folders are named GAME-SETTING-SEED. The picture has the training reward, a mean over seeds of means of five updates, with the
range of the seeds. The table has the last evaluation: the mean over seeds, the lowest seed, and what each setting gains on the
baseline's runs of the same seeds, with 95 % intervals (Student's t over seeds). Needs matplotlib (the extra plot) for the picture.
"""
# ruff: noqa: T201 - a script prints

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from ludic.eval.statistics import mean_estimate
from ludic.training.loggers import read_metrics
from ludic.types import ConfigError, LudicError, MissingExtra

KEPT = {
    "reward": "train/avg_total_reward", "turns": "train/avg_turns", "eval": "eval/mean_reward", "eval_turns": "eval/mean_turns",
}  # fmt: skip
SMOOTH, REACH_OVER = 5, 10

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of the comparison."""

    sources: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders, or a file that --records wrote."""
    out: Path | None = None
    """The picture to write."""
    records: Path | None = None
    """The JSONL file to write."""
    baseline: str = "grpo"
    """The setting that others are compared with."""
    reach: float | None = None
    """A training reward: the table says after how many updates the mean over seeds and the last ten updates first had it."""
    keep: tuple[str, ...] = ()
    """Further metrics of the runs, as NAME=METRIC; the table has their means over the first five updates and the last."""


def main(settings: Settings) -> None:
    extra = dict(_pair(given) for given in settings.keep)
    rows = [row for source in settings.sources for row in read(source, KEPT | extra)]
    if not rows:
        raise ConfigError("There is nothing to compare; give run folders that are named GAME-SETTING-SEED.")
    if settings.records is not None:
        settings.records.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for game in dict.fromkeys(row["game"] for row in rows):
        print(f"\n{game}")
        own = [row for row in rows if row["game"] == game]
        print("\n".join(table(own, settings.baseline, reach=settings.reach, extra=tuple(extra))))
    if settings.out is not None:
        draw(rows, settings.out)


def _pair(given: str) -> tuple[str, str]:
    name, _, metric = given.partition("=")
    if not metric or name in KEPT:
        raise ConfigError(f"--keep {given}: write NAME=METRIC, with another name than {', '.join(KEPT)}.")
    return name, metric


def read(source: Path, kept: Mapping[str, str] = KEPT) -> Iterable[Row]:
    """What is kept of each update and evaluation of a run."""
    if source.is_file():
        yield from map(json.loads, source.read_text().splitlines())
        return
    name = source.name.rsplit("-", 2)
    if len(name) != 3 or not name[2].isdigit():
        raise ConfigError(f"{source} is not the folder of a run that is named GAME-SETTING-SEED.")
    where = {"game": name[0], "setting": name[1], "seed": int(name[2])}
    for row in read_metrics(source / "metrics.jsonl"):
        found = {short: round(row[full], 4) for short, full in kept.items() if row.get(full) is not None}
        if found:
            yield {**where, "step": int(row.get("eval/step", row["step"])), **found}


def table(rows: list[Row], baseline: str, *, reach: float | None = None, extra: tuple[str, ...] = ()) -> list[str]:
    """A line for each setting: evaluations before and after, and the gain on the baseline, over seeds."""
    lines = []
    last = {
        (row["setting"], row["seed"]): row for row in rows if "eval" in row
    }  # of several evaluations the last counts
    first = {(row["setting"], row["seed"]): row for row in reversed(rows) if "eval" in row and row["step"] == 0}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        seeds = sorted(seed for own, seed in last if own == setting)
        after, turns = ([last[setting, seed][key] for seed in seeds] for key in ("eval", "eval_turns"))
        before = [first[setting, seed]["eval"] for seed in seeds if (setting, seed) in first]
        line = f"{setting:12} {len(seeds)} seeds  " + (f"before {np.mean(before):.3f}  " if before else "")
        line += f"after {shown(after)}  lowest {min(after):.3f}"
        line += f"  turns {shown(turns)}"
        shared = [seed for seed in seeds if (baseline, seed) in last]
        if setting != baseline and shared:
            line += f"  gain {shown([last[setting, s]['eval'] - last[baseline, s]['eval'] for s in shared])}"
        own = [[row for row in rows if (row["setting"], row["seed"]) == (setting, seed)] for seed in seeds]
        if reach is not None:
            found = updates_to(reach, [[row["reward"] for row in run if "reward" in row] for run in own])
            line += f"  to {reach:g} after {found or 'never'}"
        for name in extra:
            curves = [curve for run in own if (curve := [row[name] for row in run if name in row])]
            if curves:
                num = SMOOTH if min(map(len, curves)) >= 2 * SMOOTH else 1  # of evaluations there are two
                ends = [[np.mean(curve[:num]) for curve in curves], [np.mean(curve[-num:]) for curve in curves]]
                line += f"  {name} {np.mean(ends[0]):.3f} → {np.mean(ends[1]):.3f}"
        lines.append(line)
    return lines


def updates_to(reward: float, curves: list[list[float]]) -> int | None:
    """After how many updates the mean over the curves and the last ten updates first was that high; None if it never was."""
    curve = np.mean([each[: min(map(len, curves))] for each in curves], axis=0)
    ends = range(REACH_OVER, len(curve) + 1)
    return next((end for end in ends if np.mean(curve[end - REACH_OVER : end]) >= reward), None)


def shown(values: list[float]) -> str:
    """The mean over seeds with its interval."""
    found = mean_estimate(values)
    reach = found.high - found.mean
    return f"{found.mean:.3f} ± {reach:.3f}" if math.isfinite(reach) else f"{found.mean:.3f}"


def draw(rows: list[Row], out: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("plot", "Drawing a curve") from error
    games = list(dict.fromkeys(row["game"] for row in rows))
    figure, panels = pyplot.subplots(1, len(games), figsize=(6.5 * len(games), 4), squeeze=False)
    for panel, game in zip(panels[0], games, strict=True):
        own = [row for row in rows if row["game"] == game and "reward" in row]
        for setting in dict.fromkeys(row["setting"] for row in own):
            seeds = sorted({row["seed"] for row in own if row["setting"] == setting})
            curves = [[r["reward"] for r in own if r["setting"] == setting and r["seed"] == seed] for seed in seeds]
            num_steps = min(map(len, curves)) // SMOOTH * SMOOTH
            means_SB = np.array([curve[:num_steps] for curve in curves]).reshape(len(seeds), -1, SMOOTH).mean(2)
            at = np.arange(means_SB.shape[1]) * SMOOTH + (SMOOTH + 1) / 2
            (line,) = panel.plot(at, means_SB.mean(0), label=f"{setting} ({len(seeds)} seeds)")
            panel.fill_between(at, means_SB.min(0), means_SB.max(0), color=line.get_color(), alpha=0.15)
        panel.set(title=game, xlabel="update", ylabel="training reward")
        panel.grid(alpha=0.3)
        panel.legend()
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(f"Written: {out}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Settings, description=__doc__))
    except LudicError as error:
        sys.exit(f"plot_seeds: {error}")
