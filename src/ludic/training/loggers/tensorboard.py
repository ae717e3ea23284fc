"""Stats as TensorBoard scalars."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.types import MissingExtra


class TensorBoardLogger:
    """Writes event files into a folder: `tensorboard --logdir FOLDER`."""

    def __init__(self, log_dir: str | Path, *, flush_secs: float = 10.0) -> None:
        """`flush_secs`: how long a number may wait before it can be seen."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "TensorBoardLogger") from error
        self._make_writer = SummaryWriter
        self._settings: dict[str, Any] = {"log_dir": str(log_dir), "flush_secs": flush_secs}
        self._writer = self._make_writer(**self._settings)

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        for name, value in stats.items():
            self._writer.add_scalar(name, value, step)

    def resume(self, step: int) -> None:
        """TensorBoard hides the events after `step` that an interrupted run left in the folder."""
        self._writer.close()
        self._writer = self._make_writer(**self._settings, purge_step=step + 1)

    def close(self) -> None:
        self._writer.close()
