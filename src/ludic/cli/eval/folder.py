"""The folder of an evaluation.

    runs/eval/<name>/  config.toml  metrics.json  rollouts/<model>-<hash of its path>.jsonl.gz  samples/<model>.jsonl

Rollouts are written as episodes finish; `--resume` continues from them, and the other files are derived from them.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ludic import __version__
from ludic.cli.eval.config import MAY_CHANGE_ON_RESUME, EvalConfig
from ludic.cli.eval.table import Column
from ludic.run.resolve import slug
from ludic.run.settings import differences, read_toml, to_toml, with_values
from ludic.types import ConfigError
from ludic.types.rollout import json_number

CONFIG = "config.toml"


def choose_folder(config: EvalConfig, labels: Sequence[str], *, resume: bool) -> Path:
    """The folder to write to; raises ConfigError if it holds another evaluation. Writes nothing."""
    folder = _find(config, labels, resume=resume)
    if resume:
        _require_same(folder, config)
    return folder


def prepare_folder(folder: Path, config: EvalConfig) -> None:
    """Create the folder with its config."""
    named = with_values(config, {"name": folder.name})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(f"# ludic {__version__}\n\n{to_toml(named)}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"Cannot write {folder}: {error.strerror}. Choose another place with --out.") from error


def _find(config: EvalConfig, labels: Sequence[str], *, resume: bool) -> Path:
    out, name = config.output.out, config.output.name
    if name is not None:
        folder = out / name
        if not resume and folder.exists():
            raise ConfigError(f"{folder} is there already. --resume goes on with it; another --name starts a new one.")
        return folder
    base = slug(f"{config.env.id.rpartition(':')[2].rpartition('/')[2]}-{'-'.join(labels)}")[:100]
    taken = [number for number in range(1, 10_000) if _numbered(out, base, number).exists()]
    if resume:
        return _numbered(out, base, taken[-1] if taken else 1)
    return _numbered(out, base, taken[-1] + 1 if taken else 1)


def _numbered(out: Path, base: str, number: int) -> Path:
    return out / (base if number == 1 else f"{base}-{number}")


def _require_same(folder: Path, config: EvalConfig) -> None:
    if not (folder / CONFIG).is_file():
        there = ", ".join(sorted(path.parent.name for path in folder.parent.glob(f"*/{CONFIG}"))) or "none"
        raise ConfigError(
            f"There is nothing to resume: {folder} holds no evaluation. In {folder.parent}: {there}. Without --resume it starts."
        )
    changed = differences(read_toml(EvalConfig, folder / CONFIG), config)
    refused = [difference for difference in changed if difference.name not in MAY_CHANGE_ON_RESUME]
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
        lines = [json.dumps(asdict(outcome), default=json_number) for outcome in column.report.outcomes]
        (folder / "samples" / f"{slug(column.label)}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    metrics = {column.label: column.report.metrics for column in columns}
    (folder / "metrics.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
