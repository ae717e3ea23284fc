"""A pool of sandboxes: lends them, resets them in the background, replaces failed ones, and caches results.

The backend makes the sandboxes (`_make_sandbox`). After several failures in a row the pool stops trying, and every waiting or later
`checkout` raises the reason.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Hashable
from typing import Any, Generic, Protocol, Self, TypeVar

from ludic.tasks import cancel_all
from ludic.types import ConfigError
from ludic.types.errors import retry_wait_s
from ludic_sandbox.interface import Sandbox, SandboxError, SandboxPoolExhaustedError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRUCache(Generic[K, V]):
    """A thread-safe cache with at most `max_size` entries."""

    def __init__(self, max_size: int) -> None:
        if max_size < 0:
            raise ConfigError(f"LRUCache(max_size={max_size}): it must be at least 0.")
        self._counts = {"hits": 0, "misses": 0, "max_size": max_size}
        self._entries: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            self._counts["hits" if key in self._entries else "misses"] += 1
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._entries[key] = value
            self._entries.move_to_end(key)
            if len(self._entries) > self._counts["max_size"]:
                self._entries.popitem(last=False)

    def clear(self) -> None:
        """Drop the entries; the counters stay."""
        with self._lock:
            self._entries.clear()

    @property
    def stats(self) -> dict[str, int]:
        with self._lock:
            return {**self._counts, "size": len(self._entries)}

    @property
    def hit_rate(self) -> float:
        """Share of hits among all lookups so far; 0 before the first."""
        return self._counts["hits"] / max(1, self._counts["hits"] + self._counts["misses"])


logger = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 60.0
"""Before another attempt to make a sandbox; doubled after each."""


class _PooledSandbox(Sandbox, Protocol):
    """A sandbox that can be closed."""

    async def close(self) -> None: ...


class BaseSandboxPool(ABC):
    """Implements SandboxPool of ludic_sandbox.interface. It belongs to the event loop that started it."""

    def __init__(
        self,
        *,
        n_workers: int = 4,
        cache_size: int = 10_000,
        auto_replace_failed: bool = True,
        max_consecutive_failures: int = 5,
        max_concurrent_ops: int = 8,
    ) -> None:
        if min(n_workers, max_consecutive_failures, max_concurrent_ops) < 1:
            raise ConfigError(
                f"A sandbox pool got n_workers={n_workers}, max_consecutive_failures={max_consecutive_failures} and "
                f"max_concurrent_ops={max_concurrent_ops}; each must be at least 1."
            )
        self._n_workers = n_workers
        self._auto_replace = auto_replace_failed
        self._max_failures = max_consecutive_failures
        self._cache: LRUCache[tuple[str, str], Any] = LRUCache(cache_size)
        self._all: list[_PooledSandbox] = []
        self._clean: deque[_PooledSandbox] = deque()
        self._lent: list[_PooledSandbox] = []
        self._recycling: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._operations = asyncio.Semaphore(max_concurrent_ops)
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failures = 0
        """In a row; a success resets it."""
        self._end: SandboxError | None = None
        """Why the pool makes no more sandboxes."""
        self._python_version = ""
        self._is_closing = False

    @property
    def has_given_up(self) -> bool:
        """True if the pool makes no more sandboxes until it is shut down and started again."""
        return self._end is not None

    @abstractmethod
    async def _make_sandbox(self) -> _PooledSandbox:
        """A new sandbox; the pool resets it before a checkout."""

    # --- used by callers ---

    @property
    def python_version(self) -> str:
        """Version of the Python inside; known once the pool has started."""
        return self._python_version

    @property
    def num_workers(self) -> int:
        return self._n_workers

    @property
    def available(self) -> int:
        return len(self._clean)

    @property
    def pending_resets(self) -> int:
        return len(self._recycling)

    @property
    def cache_stats(self) -> dict[str, int]:
        return self._cache.stats

    def get_cached(self, code_hash: str, tests_hash: str) -> Any | None:
        return self._cache.get((code_hash, tests_hash))

    def put_cached(self, code_hash: str, tests_hash: str, result: Any) -> None:
        self._cache.put((code_hash, tests_hash), result)

    async def start(self) -> None:
        """Make all sandboxes; if one cannot be made, none is kept and the error says why."""
        async with self._starting:
            if self._loop is not None:
                return
            self._loop, self._end = asyncio.get_running_loop(), None
            try:
                await self._make_all()
            except BaseException:  # also when cancelled: another start must not find half a pool
                self._loop = None
                await self._close_all()
                raise
            self._python_version = self._all[0].python_version
            async with self._changed:
                self._clean.extend(self._all)
                self._changed.notify_all()

    async def _make_all(self) -> None:
        try:
            async with asyncio.TaskGroup() as making:
                for _ in range(self._n_workers):
                    making.create_task(self._make_clean())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None  # they fail for the same reason

    async def checkout(self, timeout_s: float = 30.0) -> _PooledSandbox:
        self._check_usable()
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: self._clean or self._end)
                self._check_usable()
                sandbox = self._clean.popleft()
                self._lent.append(sandbox)
                return sandbox
        except TimeoutError:
            raise TimeoutError(
                f"No sandbox came free within {timeout_s:g} s: all {len(self._all)} are in use. Release them sooner, wait "
                "longer, or make the pool larger (n_workers)."
            ) from None

    async def release(self, sandbox: Sandbox) -> None:
        """Returns at once. A pool that was shut down has already closed its sandboxes."""
        if self._loop is None or self._is_closing:
            return
        owned = next((one for one in self._lent if one is sandbox), None)
        if owned is None:
            raise ConfigError(
                "This sandbox is not checked out of this pool. Release each one once, where it came from."
            )
        self._lent.remove(owned)
        task = asyncio.create_task(self._recycle(owned))
        self._recycling.add(task)
        task.add_done_callback(self._recycled)

    async def drain_pending_resets(self, timeout_s: float = 60.0) -> None:
        """Wait until every released sandbox is clean or replaced."""
        if self._recycling:
            _, late = await asyncio.wait(self._recycling, timeout=timeout_s)
            if late:
                raise TimeoutError(f"{len(late)} sandboxes were not clean after {timeout_s:g} s.")

    async def shutdown(self) -> None:
        """End every process, also of lent sandboxes. `start` may be called again."""
        async with self._starting:
            if self._loop is None:
                return
            self._is_closing = True
            await self._stop(SandboxError("The sandbox pool has been shut down. Start it again, or make another."))
            await cancel_all(self._recycling)
            try:
                await self._close_all()
            finally:
                self._loop, self._is_closing = None, False

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    # --- in the background ---

    async def _recycle(self, sandbox: _PooledSandbox) -> None:
        """Reset the sandbox, or replace it."""
        async with self._operations:
            clean: _PooledSandbox | None = sandbox
            try:
                await sandbox.reset()
                self._failures = 0
            except (SandboxError, OSError) as e:
                logger.warning("a sandbox could not be reset: %s", e)
                await self._discard(sandbox)  # not counted: several may break at once for one passing reason
                clean = await self._replacement() if self._auto_replace else None
        if clean is None:
            await self._stop_if_empty()
            return
        async with self._changed:
            self._clean.append(clean)
            self._changed.notify_all()  # Condition loses a notify() whose waiter is cancelled

    async def _replacement(self) -> _PooledSandbox | None:
        """A new sandbox, unless the pool has given up."""
        while self._end is None:
            await asyncio.sleep(retry_wait_s(self._failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
            try:
                return await self._make_clean()
            except (SandboxError, OSError) as e:
                await self._count_failure(e)
        return None

    async def _make_clean(self) -> _PooledSandbox:
        sandbox = await self._make_sandbox()
        self._all.append(sandbox)
        try:
            await sandbox.reset()
        except BaseException:
            await self._discard(sandbox)
            raise
        self._failures = 0
        return sandbox

    async def _discard(self, sandbox: _PooledSandbox) -> None:
        self._all.remove(sandbox)
        await sandbox.close()

    async def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        if self._failures >= self._max_failures:
            await self._stop(
                SandboxPoolExhaustedError(
                    f"The sandbox pool has given up: {self._failures} new sandboxes in a row failed. The last one: {error} When "
                    "that is repaired, shut the pool down and start it again."
                )
            )

    async def _stop_if_empty(self) -> None:
        if not self._all and self._end is None:
            await self._stop(
                SandboxPoolExhaustedError(
                    f"All {self._n_workers} sandboxes of the pool have failed and auto_replace_failed is off."
                )
            )

    def _recycled(self, task: asyncio.Task[None]) -> None:
        """The next checkout raises an unexpected error of a background task."""
        self._recycling.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("recycling a sandbox failed", exc_info=error)
            end = SandboxPoolExhaustedError(f"The sandbox pool is broken: {type(error).__name__}: {error}")
            stopping = asyncio.ensure_future(self._stop(end))
            self._recycling.add(stopping)
            stopping.add_done_callback(self._recycling.discard)

    async def _stop(self, why: SandboxError) -> None:
        async with self._changed:
            self._end = self._end or why
            self._changed.notify_all()

    async def _close_all(self) -> None:
        sandboxes, self._all = self._all, []
        self._clean.clear()
        self._lent.clear()
        await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))

    def _check_usable(self) -> None:
        if self._end is not None:
            raise self._end
        if self._loop is None:
            raise ConfigError("The sandbox pool has not been started. Call `await pool.start()` first.")
        if self._loop is not asyncio.get_running_loop():
            raise ConfigError(
                "The sandbox pool belongs to another event loop. Make one pool per loop (`shared_pool` does)."
            )
