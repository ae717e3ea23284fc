"""Loggers: where the numbers of a step go. Every logger has `log(step, stats)` and `close()`.

`run` makes them by name; the trainer calls them. Start with interface.py.
"""

from ludic.training.loggers.interface import Closable, Resumable, ShowsActivity
from ludic.training.loggers.jsonl import JSONLLogger, read_metrics
from ludic.training.loggers.print import PrintLogger
from ludic.training.loggers.rich_live import RichLiveLogger
from ludic.training.loggers.tee import TeeLogger
from ludic.training.loggers.tensorboard import TensorBoardLogger
from ludic.training.loggers.wandb import WandbLogger

__all__ = [
    "PrintLogger", "JSONLLogger", "TensorBoardLogger", "WandbLogger", "TeeLogger", "RichLiveLogger",
    "Closable", "Resumable", "ShowsActivity", "read_metrics",
]  # fmt: skip
