"""Stats for experiment trackers: TensorBoard, Weights & Biases, Trackio."""

import os
from collections.abc import Mapping, Sequence
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


class WandbLogger:
    """One run of wandb; `mode="offline"` writes a folder that `wandb sync` uploads later.

    To continue the same run after resuming, give it an id: `init_kwargs={"id": "my-run", "resume": "allow"}`.
    """

    def __init__(
        self,
        init_kwargs: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
        group: str | None = None,
        tags: Sequence[str] | None = None,
        notes: str | None = None,
        config: Mapping[str, Any] | None = None,
        dir: str | Path | None = None,
        mode: str | None = None,
    ) -> None:
        """`init_kwargs`: further arguments of `wandb.init`. `project`: by default the environment variable WANDB_PROJECT, or
        "Ludic"."""
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "WandbLogger") from error
        settings = {
            "project": project or os.environ.get("WANDB_PROJECT") or "Ludic",
            "name": name,
            "group": group,
            "tags": tags,
            "notes": notes,
            "config": None if config is None else dict(config),
            "dir": None if dir is None else str(dir),
            "mode": mode,
        }
        given = {key: value for key, value in settings.items() if value is not None}
        self._run: Any = wandb.init(**{**given, **(init_kwargs or {})})
        self._last_step = 0

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        # W&B drops what comes for an earlier step, as a background evaluation does; `eval/step` says where it belongs.
        self._last_step = max(self._last_step, step)
        self._run.log(dict(stats), step=self._last_step)

    def close(self) -> None:
        self._run.finish()


class TrackioLogger:
    """One run of Trackio, in its local database: `trackio show --project NAME`. Needs no account and no network.

    A run that is resumed goes on under the same name.
    """

    def __init__(
        self,
        init_kwargs: Mapping[str, Any] | None = None,
        *,
        project: str | None = None,
        name: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """`init_kwargs`: further arguments of `trackio.init`. `project`: by default the environment variable TRACKIO_PROJECT, or
        "Ludic"."""
        try:
            import trackio
        except ImportError as error:
            raise MissingExtra("trackio", "TrackioLogger") from error
        settings = {
            "project": project or os.environ.get("TRACKIO_PROJECT") or "Ludic",
            "name": name,
            "config": None if config is None else dict(config),
            "resume": "allow",
            "embed": False,
        }
        given = {key: value for key, value in settings.items() if value is not None}
        self._run: Any = trackio.init(**{**given, **(init_kwargs or {})})

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        self._run.log(dict(stats), step=step)

    def close(self) -> None:
        self._run.finish()
