"""The results of an evaluation: its folder, and the printed table with a column per model and a row per metric.

    runs/eval/<name>/  config.toml  metrics.json  rollouts/<model>-<hash of its path>.jsonl.gz  samples/<model>.jsonl  page.html

Rollouts are written as episodes finish; `--resume` continues from them, and the other files are derived from them.
"""

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from ludic import __version__, plugins
from ludic.cli.eval.config import EvalConfig
from ludic.eval import Estimate, EvalReport, paired_difference
from ludic.run.names import CONFIG
from ludic.run.resolve import slug
from ludic.run.settings import differences, read_toml, settings_of, to_toml, with_values
from ludic.types import ConfigError, LudicError
from ludic.types.rollout import json_number, plain_fields

logger = logging.getLogger(__name__)
PAGE = "page.html"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One model's evaluation."""

    label: str
    report: EvalReport = field(repr=False)
    """Not in the repr, which asyncio.run makes of every result (through signal.getsignal)."""
    seconds: float


# --- the folder ---


def choose_folder(config: EvalConfig, labels: Sequence[str], *, resume: bool) -> Path:
    """The folder to write to; raises ConfigError if it holds another evaluation. Writes nothing."""
    out, name = config.output.out, config.output.name
    if name is not None:
        folder = out / name
    else:
        base = slug(f"{config.env.id.rpartition(':')[2].rpartition('/')[2]}-{'-'.join(labels)}")[:100]
        numbered = [out / base, *(out / f"{base}-{number}" for number in range(2, 10_000))]
        num_taken = max((number for number, place in enumerate(numbered, 1) if place.exists()), default=0)
        folder = numbered[max(num_taken, 1) - 1 if resume else num_taken]
    if resume:
        _require_same(folder, config)
    elif folder.exists():
        raise ConfigError(f"{folder} is there already. --resume goes on with it; another --name starts a new one.")
    return folder


def prepare_folder(folder: Path, config: EvalConfig) -> None:
    """Create the folder with its config."""
    named = with_values(config, {"name": folder.name})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(f"# ludic {__version__}\n\n{to_toml(named)}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {folder}: {error.strerror}. Choose another place with --out.") from error


def _require_same(folder: Path, config: EvalConfig) -> None:
    if not (folder / CONFIG).is_file():
        there = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))) or "none"
        raise ConfigError(
            f"There is nothing to resume: {folder} holds no evaluation. In {folder.parent}: {there}. Without --resume it starts."
        )
    changed = differences(read_toml(EvalConfig, folder / CONFIG), config)
    may_change = {setting.name for setting in settings_of(EvalConfig) if setting.may_change}  # finished episodes stay
    refused = [difference for difference in changed if difference.name not in may_change]
    if refused:
        raise ConfigError(
            f"{folder} is an evaluation with other settings: {'; '.join(map(str, refused))}. Its episodes cannot be counted with "
            "these; give another --name, or the same settings."
        )


def rollouts_file(folder: Path, stem: str) -> Path:
    plain = folder / "rollouts" / f"{stem}.jsonl"  # written by older versions
    return plain if plain.exists() else plain.with_name(f"{stem}.jsonl.gz")


def write_results(folder: Path, columns: Sequence[Column]) -> None:
    """Write one line per sample and model, and all metrics in one file."""
    (folder / "samples").mkdir(exist_ok=True)
    for column in columns:
        lines = [json.dumps(plain_fields(outcome), default=json_number) for outcome in column.report.outcomes]
        (folder / "samples" / f"{slug(column.label)}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    metrics = {column.label: column.report.metrics for column in columns}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")


def write_page(folder: Path) -> Path | None:
    """One HTML file with the worst and some of the best rollouts, by the plug-in that shows runs; None if it cannot be made."""
    point = plugins.find("reports", "page")
    if point is None:
        return None
    try:
        page = folder / PAGE
        page.write_text(point.load()(folder), encoding="utf-8")
        return page
    except (LudicError, OSError, ValueError, LookupError) as error:  # the results are written already
        logger.warning("%s was not written: %s", folder / PAGE, error)
        return None


# --- the table ---

_REWARD = "mean_reward"
_COUNTED = (
    # A cut-off reply counts as truncated and not as unreadable.
    ("unreadable replies", "unreadable_rate"),
    ("truncated", "over_limit_rate"),
    ("failed", "failed_rate"),
)


def make_table(columns: Sequence[Column]) -> Table:
    table = Table("", *(escape(column.label) for column in columns), box=None, pad_edge=False, title_justify="left")
    names = list(dict.fromkeys(name for column in columns for name in column.report.estimates))
    for name in names:
        cells = [column.report.estimates.get(name) for column in columns]
        role, slash, plain = name.rpartition("/")
        title = f"{role}{slash}{'reward' if plain == _REWARD else plain.removesuffix('_rate').replace('_', ' ')}"
        table.add_row(title, *(_cell(name, cell) for cell in cells), style="bold" if name == names[0] else "")
    if len(columns) > 1:
        table.add_row("better than the first by", "", *(_difference(columns[0], column) for column in columns[1:]))
    numbers = [column.report.metrics for column in columns]
    for title, name in _COUNTED:
        table.add_row(title, *(f"{each[name]:.1%}" for each in numbers))
    table.add_row("tokens per episode", *(f"{each['mean_completion_tokens']:.1f}" for each in numbers))
    sizes = (f"{each['num_tasks']:.0f} × {each['num_samples'] / each['num_tasks']:g}" for each in numbers)
    table.add_row("tasks × samples", *sizes)
    table.add_row("time", *(f"{column.seconds:.1f} s" for column in columns))
    return table


def _cell(name: str, estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    if name.endswith(_REWARD):
        interval = "" if math.isinf(estimate.low) else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
        return f"{estimate.mean:.3f}{interval}"
    return f"{estimate.mean:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def _difference(first: Column, other: Column) -> str:
    difference = paired_difference(first.report.outcomes, other.report.outcomes)
    in_percent = "accuracy" in first.report.estimates and "accuracy" in other.report.estimates
    mean, low, high = (
        f"{100 * x:+.1f}" if in_percent else f"{x:+.3f}" for x in (difference.mean, difference.low, difference.high)
    )
    unit = " points" if in_percent else ""
    return f"{mean}{unit}" if math.isinf(difference.low) else f"{mean}{unit} [{low}, {high}]"
