"""Results that clients wait for: one future per accepted request, found by the request's id.

The id follows from what the client sent (run and number, or sampling session and number), so a repeated request finds the
future of the first one. Everything here belongs to the event loop; `Futures.resolve` is what the worker posts to it.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

KEPT_S = 3600.0
"""Seconds that a result waits for its client."""
KEPT_AFTER_RETRIEVAL_S = 120.0
"""Seconds that a result stays after it was sent, for a client that lost the answer."""


@dataclass(frozen=True, slots=True)
class Failure:
    """The request could not be carried out."""

    message: str
    is_users: bool = True
    """True if the request is to blame, and not the server."""


Result = dict[str, Any] | bytes | Failure
"""The result of a request: JSON, a protobuf message, or why it failed."""


def request_id(owner: str, number: int) -> str:
    """The id of a request of a training run or a sampling session."""
    return f"{owner}#{number}"


@dataclass(slots=True, eq=False)
class Future:
    """The result of one request, present or to come."""

    id: str
    tenant: str
    result: Result | None = None
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


class Futures:
    """All futures by id."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_id: dict[str, Future] = {}

    def get(self, request_id: str, tenant: str) -> Future | None:
        """None if it is unknown, expired or another tenant's."""
        future = self._by_id.get(request_id)
        return future if future is not None and future.tenant == tenant else None

    def begin(self, request_id: str, tenant: str) -> Future:
        """A future for a new request."""
        assert request_id not in self._by_id, f"{request_id} has a future already"
        future = self._by_id[request_id] = Future(request_id, tenant)
        return future

    def resolve(self, future: Future, result: Result) -> None:
        """Wake the clients that wait. A result is set once."""
        if future.result is not None:
            return
        future.result = result
        future.expires = self._clock() + KEPT_S
        future._done.set()

    def retrieved(self, future: Future) -> None:
        """The result was sent to the client."""
        future.expires = self._clock() + KEPT_AFTER_RETRIEVAL_S

    def sweep(self) -> None:
        """Drop results whose time is over."""
        now = self._clock()
        over = [future.id for future in self._by_id.values() if future.expires is not None and future.expires < now]
        for request_id in over:
            del self._by_id[request_id]
