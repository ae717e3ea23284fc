"""Results that clients wait for: one future per accepted request, found by the request's id.

The id follows from what the client sent (run and number, or sampling session and number), so a repeated request finds the
future of the first one. Everything here belongs to the event loop; `Futures.resolve` is what the worker posts to it.
"""

import asyncio
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

KEPT_S = 3600.0
"""How long a result waits for its client."""
KEPT_AFTER_RETRIEVAL_S = 120.0
"""How long a result that was sent stays, for a client that lost the answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request could not be carried out."""

    message: str
    is_users: bool = True
    """Whether the request is to blame, and not the server."""


Result = dict[str, Any] | bytes | Failure
"""What a request gives: JSON, a protobuf message, or why it failed."""


def request_id(owner: str, number: int) -> str:
    """The id of a request of a training run or a sampling session."""
    return f"{owner}#{number}"


@dataclass(slots=True, eq=False)
class Future:
    """The result of one request, present or to come."""

    id: str
    tenant: str
    channel: str | None = None
    """The channel of `Futures.completions` that announces its result."""
    result: Result | None = None
    reason: str | None = None
    """Why it waits, in words for the user."""
    num_sequences: int = 0
    """The sequences of a sampling request."""
    expires: float | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, timeout_s: float) -> Result | None:
        """The result, or None if there is none within the time."""
        if self.result is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._done.wait()
            except TimeoutError:
                return None
        return self.result


@dataclass(slots=True, eq=False)
class _Channel:
    """Completions of one sampling client, in order."""

    finished: list[tuple[int, Future]] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    num_polls: int = 0
    """Clients that wait for it now."""


class Futures:
    """All futures by id."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, Future] = {}
        self._channels: dict[str, _Channel] = defaultdict(_Channel)
        self._cursors = itertools.count(1)

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str, tenant: str) -> Future | None:
        """None if it is unknown, expired or another tenant's."""
        future = self._by_id.get(request_id)
        return future if future is not None and future.tenant == tenant else None

    def begin(self, request_id: str, tenant: str, *, channel: str | None = None) -> Future:
        """A future for a new request."""
        assert request_id not in self._by_id, f"{request_id} has a future already"
        future = self._by_id[request_id] = Future(request_id, tenant, channel)
        return future

    def resolve(self, future: Future, result: Result) -> None:
        """Wake the clients that wait. A result is set once."""
        if future.result is not None:
            return
        future.result = result
        future.expires = self._clock() + KEPT_S
        future._done.set()
        if future.channel is not None:
            channel = self._channels[future.channel]
            channel.finished.append((next(self._cursors), future))
            channel.changed.set()

    def retrieved(self, future: Future) -> None:
        """The result was sent to the client."""
        future.expires = self._clock() + KEPT_AFTER_RETRIEVAL_S

    def forget(self, request_ids: Iterable[str], tenant: str) -> None:
        """The client has these results."""
        for request_id in request_ids:
            if (future := self.get(request_id, tenant)) is not None and future.result is not None:
                del self._by_id[request_id]

    async def completions(self, channel: str, after: int, timeout_s: float) -> tuple[list[Future], int]:
        """The futures of a channel that are done since the cursor `after`, and the next cursor; waits for the first."""
        own = self._channels[channel]
        own.finished = [(cursor, future) for cursor, future in own.finished if cursor > after]
        if not own.finished:
            own.changed.clear()
            own.num_polls += 1
            try:
                async with asyncio.timeout(timeout_s):
                    await own.changed.wait()
            except TimeoutError:
                return [], after
            finally:
                own.num_polls -= 1
        return [future for _, future in own.finished], own.finished[-1][0]

    def close_channels(self, prefix: str) -> None:
        """No client polls these any more."""
        for name in [name for name in self._channels if name.startswith(prefix)]:
            del self._channels[name]

    def sweep(self) -> None:
        """Drop results whose time is over."""
        now = self._clock()
        over = [future.id for future in self._by_id.values() if future.expires is not None and future.expires < now]
        for request_id in over:
            del self._by_id[request_id]
        for name, channel in list(self._channels.items()):  # most have no client that polls
            channel.finished = [entry for entry in channel.finished if entry[1].id in self._by_id]
            if not channel.finished and channel.num_polls == 0:
                del self._channels[name]
