"""A `Store` that keeps everything in memory: nothing survives the process."""

from collections.abc import Callable, Mapping

from torch import Tensor

from ludic.tinker.server.futures import Result
from ludic.tinker.server.records import Checkpoint, CheckpointPath, Refused, RequestKind, Run, Sampler, Session


class MemoryStore:
    """For tests, and for a server without a data folder."""

    def __init__(self) -> None:
        self._checkpoints: dict[CheckpointPath, tuple[Checkpoint, dict[str, Tensor]]] = {}

    def add_session(self, session: Session) -> None: ...

    def end_session(self, session_id: str, finished: str, detail: str | None) -> None: ...

    def add_run(self, run: Run) -> None: ...

    def end_run(self, run_id: str) -> None: ...

    def add_sampler(self, sampler: Sampler) -> None: ...

    def remove_sampler(self, sampler_id: str) -> None: ...

    def accept(self, run_id: str, number: int, kind: RequestKind, payload: bytes) -> None: ...

    def executed(self, run_id: str, number: int, result: Result, state: Callable[[], dict[str, Tensor]]) -> None: ...

    def save_checkpoint(self, checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, overwrite: bool) -> None:
        if checkpoint.path in self._checkpoints and not overwrite:
            raise Refused(
                409, f"There is a checkpoint {checkpoint.path} already; give overwrite=True, or another name."
            )
        kept = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
        self._checkpoints[checkpoint.path] = checkpoint, kept

    def load_checkpoint(self, path: CheckpointPath) -> tuple[Checkpoint, dict[str, Tensor]]:
        if path not in self._checkpoints:
            raise Refused(404, f"There is no checkpoint {path}.")
        return self._checkpoints[path]

    def checkpoint(self, path: CheckpointPath) -> Checkpoint:
        return self.load_checkpoint(path)[0]

    def delete_checkpoint(self, path: CheckpointPath) -> None:
        self._checkpoints.pop(path, None)
