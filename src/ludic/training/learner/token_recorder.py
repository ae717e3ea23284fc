"""`TokenRecorder`: what the trainer computes of every sampled token, written next to a run's rollouts for `ludic view`.

trained/step_000012.rank0.npz holds the samples of update 12 (the metrics' step) that rank 0 computed: per sample rollout_id,
segment, num_tokens and num_weights; flat, one entry per action token, logp (float32), entropy and gradient (float16); weight
(float32), one per token or one per sample. A thread writes it. Training never waits for it and never fails because of it: a record
for which there is no room is dropped and counted, and a full disk is a warning.
"""

import contextlib
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ludic.training.losses import ActionTokens
from ludic.types import SAWItem
from ludic.util.files import UNFINISHED

logger = logging.getLogger(__name__)

MAX_WAITING = 2
"""Records that may wait for the thread; each is a few bytes per token of a batch."""
_NAMES = "step_{step:06d}.rank{rank}.npz"
_MAX_HALF = float(np.finfo(np.float16).max)


class StepRecord:
    """The action tokens of one update on one rank, micro-batch by micro-batch. An error empties it, and training goes on."""

    def __init__(self) -> None:
        self.items: list[SAWItem] = []
        self.error: Exception | None = None
        self._parts: list[Tensor] = []
        """One tensor per micro-batch: [3, A] log-probs, gradients and entropies; NaN where there are none."""

    def watch(self, tokens: ActionTokens) -> None:
        """Before the backward pass: keep the gradient of the log-probs, which a loss makes zero where it clips or masks."""
        if tokens.logps.requires_grad:
            tokens.logps.retain_grad()

    def add(self, items: Sequence[SAWItem], tokens: ActionTokens) -> None:
        """After the backward pass."""
        if self.error is not None:
            return
        try:
            part = _columns(tokens)
        except Exception as error:  # noqa: BLE001 - out of memory on the device: the picture is lost, not the run
            self.error, self.items, self._parts = error, [], []
            return
        self.items += items
        self._parts.append(part)

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays that are written; the copy from the device is made here."""
        logp, gradient, entropy = torch.cat(self._parts, dim=1).cpu().numpy()
        weights = [_weights(item) for item in self.items]
        arrays = {
            "rollout_id": np.array([(item.origin.rollout_id or "").encode() for item in self.items], dtype=np.bytes_),
            "segment": np.array([item.origin.segment for item in self.items], dtype=np.int32),
            "num_tokens": np.array([item.num_action_tokens for item in self.items], dtype=np.int32),
            "num_weights": np.array([len(own) for own in weights], dtype=np.int32),
            "weight": np.concatenate(weights),
            "logp": logp,
        }
        for name, values in (("gradient", gradient), ("entropy", entropy)):
            if not np.isnan(values).all():
                arrays[name] = values.clip(-_MAX_HALF, _MAX_HALF).astype(np.float16)
        return arrays


def _columns(tokens: ActionTokens) -> Tensor:
    logps = tokens.logps
    unknown = torch.full_like(logps, torch.nan, dtype=torch.float32, requires_grad=False)
    # In units of one token of the batch: with token_mean and no clip it is the ratio times the advantage.
    gradient = unknown if logps.grad is None else -logps.grad.float() * tokens.facts.num_tokens
    entropy = unknown if tokens.entropy is None else tokens.entropy.detach().float()
    return torch.stack([logps.detach().float(), gradient, entropy])


def _weights(item: SAWItem) -> np.ndarray:
    own = item.attachments.token_weights
    return np.array([item.weight], dtype=np.float32) if own is None else own


class TokenRecorder:
    """Writes the records of one rank into a folder. `Trainer(token_recorder=…)` uses it; every rank has one."""

    def __init__(
        self, folder: str | Path, *, every: int = 1, max_waiting: int = MAX_WAITING, first_rank: int = 0
    ) -> None:
        """`every`: the first update and every n-th are recorded; 0 records none. `first_rank`: what rank 0 is called in names of
        files; recorders of several trainers that share a folder have different ones."""
        self.folder, self.every, self._first_rank = Path(folder), every, first_rank
        self.num_written = self.num_dropped = self.num_failed = 0
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._lock = threading.Lock()
        self._thread: ThreadPoolExecutor | None = None
        self._warned: set[str] = set()

    def begin(self, step: int) -> None:
        """Remove the records of updates after `step`, which the run is going to make again. Called once, by one rank."""
        try:
            for path in self.folder.glob("step_*.rank*.npz"):
                if int(path.name[5:].partition(".")[0]) > step:
                    path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._warn("old records in %s cannot be removed: %s", self.folder, error)

    def start(self, step: int) -> StepRecord | None:
        """The record to fill during the update that makes version `step`; None if it is not due."""
        is_due = self.every > 0 and (step == 1 or step % self.every == 0)
        return StepRecord() if is_due else None

    def write(self, step: int, record: StepRecord, *, rank: int = 0) -> None:
        """Have the thread write a record; drops it if too many wait."""
        if record.error is not None:
            self._warn("the tokens of step %d are not recorded: %s", step, record.error)
        if not record.items:
            return
        with self._lock:
            if self._num_waiting >= self._max_waiting:
                self.num_dropped += 1
                is_dropped = True
            else:
                self._num_waiting += 1
                is_dropped = False
        if is_dropped:
            self._warn("%s is slower than training: records of updates are dropped (step %d first).", self.folder, step)
            return
        try:
            arrays = record.arrays()
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="token-recorder")
            self._thread.submit(
                self._save, self.folder / _NAMES.format(step=step, rank=self._first_rank + rank), arrays
            )
        except Exception as error:  # noqa: BLE001 - a picture of training must not end it
            self._done(failed=True)
            self._warn("the tokens of step %d are not recorded: %s", step, error)

    def flush(self) -> None:
        """Wait until everything is written."""
        if self._thread is not None:
            self._thread.submit(lambda: None).result()

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None

    def _save(self, path: Path, arrays: dict[str, np.ndarray]) -> None:
        unfinished = path.with_name(f"{UNFINISHED}{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # the stubs take the names for another argument
            unfinished.replace(path)
            self._done(failed=False)
            self.num_written += 1
        except Exception as error:  # noqa: BLE001 - a full disk, a folder that was removed
            self._done(failed=True)
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)
            self._warn("%s cannot be written; training goes on: %s", path, error)

    def _done(self, *, failed: bool) -> None:
        with self._lock:
            self._num_waiting -= 1
            self.num_failed += failed

    def _warn(self, message: str, *values: Any) -> None:
        """Each kind once."""
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message, *values)
