"""Checkpoints of a policy that is trained elsewhere: its weights stay there, and a folder here says where, and all the rest.

    output_dir/step_000100/   trainer_state.json (with the tinker:// path), state.pt, manifest.json

The folder is written after the service has saved, so one that is there can be resumed from. Removing a folder removes
nothing at the service.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludic.training.checkpoint import UNFINISHED, CheckpointManager
from ludic.training.durable import CheckpointError, finish_folder
from ludic.training.state_files import check_state, read_state, write_state


class RemoteCheckpoints(CheckpointManager):
    """The same folders, pointers and pruning, without weights."""

    def save_path(self, step: int, path: str, state: Mapping[str, Any], metrics: Mapping[str, float]) -> Path:
        """Note that `path` holds the weights and the optimizer of this step."""
        target = self.root / f"step_{step:06d}"
        unfinished = self.root / f"{UNFINISHED}{target.name}"
        whole = {**state, "remote_path": path}
        check_state(step, whole)
        try:
            self._begin(unfinished)
            write_state(unfinished, step, whole, metrics)
            finish_folder(unfinished, {"step": step, "serial": self._next_serial()})
            self._commit(unfinished, target, step, metrics)
        except OSError as error:
            raise CheckpointError(f"{self._why_not_written(target, error)} The weights are safe at {path}.") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return target

    def read_path(self, where: int | str) -> tuple[str, dict[str, Any]]:
        """(where the weights are, the state beside them) of a step, of a folder, or of the "latest"."""
        if isinstance(where, int) or where.isdigit():
            folder = self.find(step=int(where))
        else:
            folder = self.find(path=None if where == "latest" else where)
        state = read_state(folder)
        if "remote_path" not in state:
            raise CheckpointError(f"{folder} holds a model of its own, and no path at Tinker. Resume it with Trainer.")
        return state.pop("remote_path"), state
