"""`AsyncRolloutBatchSource`: generation runs ahead of training by a bounded number of policy versions.

A batch started while `k` others are waiting or in training is trained on `k` updates later: that is its lag. The source
therefore starts a batch only while `k` updates are within `max_lag`, and never discards one. If the trainer waits and no batch
is ready, `k` is 0 and a batch starts in any case.
"""

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ludic.tasks import cancel_all
from ludic.types import BatchSource, ConfigError, SAWBatch
from ludic.types.interfaces import load_into, state_of, tell_version


@dataclass(frozen=True, kw_only=True, slots=True)
class _BatchStart:
    """State at the start of a batch's generation."""

    version: int
    """Policy version."""
    source_state: dict[str, Any]
    """State of the inner source; a resume generates the batch again from it."""


class AsyncRolloutBatchSource:
    """Generates the batches of `source` in a background task.

    The trainer calls `notify_version` after each update. `versions_per_batch` is how far the version moves per batch (more
    than 1 if a batch takes several optimizer steps, or weights are published only every few). Training must run in a thread
    to leave the event loop free, or nothing overlaps. Close the source, or use `async with`.
    """

    def __init__(
        self, source: BatchSource, *, max_lag: int = 1, max_batches: int = 2, versions_per_batch: int = 1
    ) -> None:
        if max_lag < 0:
            raise ConfigError(f"max_lag={max_lag}; it must be 0 (generate only when asked) or more.")
        if max_batches < 1:
            raise ConfigError(f"max_batches={max_batches}; there must be room for one finished batch.")
        if versions_per_batch < 1:
            raise ConfigError(f"versions_per_batch={versions_per_batch}; training on a batch makes a new version.")
        self._source = source
        self._max_lag = max_lag
        self._max_batches = max_batches
        self._versions_per_batch = versions_per_batch
        self._version = 0
        self._ready: deque[tuple[_BatchStart, SAWBatch]] = deque()
        self._in_progress: _BatchStart | None = None
        self._is_training = False
        self._go = asyncio.Event()
        """Set when the trainer's state changes; generation checks again whether it may start a batch."""
        self._filled = asyncio.Event()
        """Set when a batch is ready or generation has ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False

    # --- the trainer's side ---

    async def next_batch(self) -> SAWBatch:
        """The oldest finished batch; its meta holds the version at which its generation started, and its lag in updates."""
        if self._is_closed:
            raise ConfigError("This AsyncRolloutBatchSource is closed; make a new one.")
        if self._task is not None and self._loop is not asyncio.get_running_loop():
            self._forget_loop()
        task = self._task or self._start()
        self._is_training = False  # a trainer that asks for the next batch has finished the last one
        self._go.set()
        begun, batch = await self._wait_for_batch(task)
        self._is_training = True
        self._go.set()
        lag = self._version - begun.version
        batch.meta |= {"source": "async_rollout", "generated_at_version": begun.version, "lag": lag}
        batch.meta.setdefault("rollout_metrics", {})["lag"] = float(lag)
        return batch

    get_next_batch = next_batch

    def notify_version(self, version: int) -> None:
        """Set the version of the policy that generates now. May be called from any thread."""
        self._version = version
        self._is_training = False
        tell_version(self._source, version)  # a replay buffer inside expires samples by version
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._go.set)

    async def close(self) -> None:
        """Cancel generation and wait until it has ended."""
        self._is_closed = True
        task, self._task = self._task, None
        if task is not None:
            await cancel_all([task])

    async def __aenter__(self) -> "AsyncRolloutBatchSource":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _wait_for_batch(self, task: asyncio.Task[None]) -> tuple[_BatchStart, SAWBatch]:
        while not self._ready:
            if task.done():
                task.result()  # re-raises its error; after the last batch this is RequestsExhausted
            self._filled.clear()
            await self._filled.wait()
        return self._ready.popleft()

    # --- the background task ---

    def _start(self) -> asyncio.Task[None]:
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._generate(), name="generate batches ahead")
        self._task.add_done_callback(lambda _: self._filled.set())
        return self._task

    def _forget_loop(self) -> None:
        """Reset after the event loop has ended (a second `train_sync`); the unfinished batch is generated again."""
        self._task = None
        self._go, self._filled = asyncio.Event(), asyncio.Event()
        if self._in_progress is not None:
            load_into(self._source, self._in_progress.source_state)
        self._in_progress = None

    async def _generate(self) -> None:
        while True:
            while not self._may_begin():
                self._go.clear()
                await self._go.wait()
            self._in_progress = _BatchStart(version=self._version, source_state=state_of(self._source))
            batch = await self._source.next_batch()
            self._ready.append((self._in_progress, batch))
            self._in_progress = None
            self._filled.set()

    def _may_begin(self) -> bool:
        num_ahead = len(self._ready) + self._is_training
        return len(self._ready) < self._max_batches and num_ahead * self._versions_per_batch <= self._max_lag

    # --- resume ---

    def state_dict(self) -> dict[str, Any]:
        """State at the start of the oldest batch not returned yet; a resume generates prefetched batches again."""
        pending = self._ready[0][0] if self._ready else self._in_progress
        return {
            "version": self._version,
            "source": state_of(self._source) if pending is None else pending.source_state,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._task is not None:
            raise ConfigError("Load the state before the first next_batch; generation has begun already.")
        self._version = state["version"]
        load_into(self._source, state["source"])
