"""Loggers: where the numbers of a step go. Every logger has `log(step, stats)` and `close()`.

`run` makes them by name; the trainer calls them. base.py has the optional interfaces, TeeLogger and the JSONL record.
"""

from ludic.training.loggers.base import (
    Closable,
    JSONLLogger,
    KeepsRecord,
    Resumable,
    ShowsActivity,
    TeeLogger,
    newest_step_of,
    read_metrics,
)
from ludic.training.loggers.print import PrintLogger
from ludic.training.loggers.rich_live import RichLiveLogger
from ludic.training.loggers.trackers import TensorBoardLogger, TrackioLogger, WandbLogger

__all__ = [
    "PrintLogger", "JSONLLogger", "TensorBoardLogger", "WandbLogger", "TrackioLogger", "TeeLogger", "RichLiveLogger",
    "Closable", "KeepsRecord", "Resumable", "ShowsActivity", "newest_step_of", "read_metrics",
]  # fmt: skip
