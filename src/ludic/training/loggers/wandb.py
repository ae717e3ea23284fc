"""Stats for Weights & Biases; `mode="offline"` writes a folder that `wandb sync` uploads later."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ludic.types import MissingExtra

DEFAULT_PROJECT = "Ludic"


class WandbLogger:
    """One run of wandb; what `wandb.init` takes beyond the usual goes through `init_kwargs`.

    To go on with the same run after resuming, give it an id: `init_kwargs={"id": "my-run", "resume": "allow"}`.
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
        """Without `project`, it is the environment variable WANDB_PROJECT, and without that "Ludic"."""
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "WandbLogger") from error
        usual = {
            "project": project_name(project),
            "name": name,
            "group": group,
            "tags": tags,
            "notes": notes,
            "config": None if config is None else dict(config),
            "dir": None if dir is None else str(dir),
            "mode": mode,
        }
        given = {key: value for key, value in usual.items() if value is not None}
        self._run: Any = wandb.init(**{**given, **(init_kwargs or {})})
        self._last_step = 0

    def log(self, step: int, stats: Mapping[str, float]) -> None:
        # W&B drops what comes for an earlier step, as a background evaluation does; `eval/step` says where it belongs.
        self._last_step = max(self._last_step, step)
        self._run.log(dict(stats), step=self._last_step)

    def close(self) -> None:
        self._run.finish()


def project_name(given: str | None = None) -> str:
    return given or os.environ.get("WANDB_PROJECT") or DEFAULT_PROJECT
