"""Metrics of a run: lines of metrics.jsonl, TensorBoard events, a few on the screen."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ludic.training.loggers import JSONLLogger, PrintLogger, TeeLogger, TensorBoardLogger
from ludic.types import ConfigError

__all__ = ["MetricsLogger", "TensorBoardLogger", "run_logger"]


class MetricsLogger(Protocol):
    def log(self, step: int, metrics: Mapping[str, float], /) -> None: ...


def run_logger(run_dir: Path, *shown: str, tensorboard: bool = True) -> TeeLogger:
    """run_dir/metrics.jsonl, TensorBoard events in the same folder, and the metrics named in `shown` on the screen."""
    if any(file.stat().st_size for file in run_dir.glob("metrics.jsonl")):  # an empty file is a run without a step
        raise ConfigError(f"There is a run in {run_dir} already. Choose another run_dir.")
    events = [TensorBoardLogger(run_dir)] if tensorboard else []
    return TeeLogger(JSONLLogger(run_dir / "metrics.jsonl"), *events, PrintLogger(prefix=run_dir.name, keys=shown))
