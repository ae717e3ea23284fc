"""Turns: room on a server that waiting clients get fairly. Sandbox servers and samplers of the Tinker server use it."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any


class NoTurn(TimeoutError):
    """A client's turn did not come in time."""


@dataclass(slots=True, eq=False)
class _Waiting:
    """A piece of work that waits for room."""

    size: int
    cost: float
    turn: "asyncio.Future[None]"


class Turns:
    """Room for work, given to clients in turn; the work of one client keeps its order.

    `choose` picks the next of the waiting clients, which stand in the order of their last turns; by default the first. `charge` is
    told the cost of each turn.
    """

    def __init__(
        self,
        room: int,
        *,
        choose: Callable[[Mapping[str, Any]], str] = lambda waiting: next(iter(waiting)),
        charge: Callable[[str, float], None] = lambda client, cost: None,
    ) -> None:
        self._room, self._choose, self._charge = room, choose, charge
        self._waiting: dict[str, deque[_Waiting]] = {}
        self.num_running = 0
        """Room in use."""

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    @contextlib.asynccontextmanager
    async def turn(
        self, client: str, *, size: int = 1, cost: float = 0.0, wait_s: float | None = None
    ) -> AsyncIterator[None]:
        """Wait for the client's turn and hold the room until the end of the block; NoTurn after `wait_s` seconds."""
        waiting = _Waiting(size, cost, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(client, deque()).append(waiting)
        self._admit()
        try:
            async with asyncio.timeout(wait_s):
                await waiting.turn
        except BaseException as error:
            if waiting.turn.done() and not waiting.turn.cancelled():  # it was admitted in the same moment
                self._leave(waiting)
            else:
                self._remove(client, waiting)
            if isinstance(error, TimeoutError):
                raise NoTurn(f"No turn within {wait_s:g} s.") from error
            raise
        try:
            yield
        finally:
            self._leave(waiting)

    def _leave(self, waiting: _Waiting) -> None:
        self.num_running -= waiting.size
        self._admit()

    def _remove(self, client: str, waiting: _Waiting) -> None:
        queue = self._waiting.get(client, deque())
        with contextlib.suppress(ValueError):
            queue.remove(waiting)
        if not queue:
            self._waiting.pop(client, None)
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            client = self._choose(self._waiting)
            first = self._waiting[client][0]
            if self.num_running and self.num_running + first.size > self._room:
                return  # and none of another client before it, or large work would never have its turn
            queue = self._waiting.pop(client)
            queue.popleft()
            if first.turn.done():  # cancelled, and about to leave
                if queue:
                    self._waiting = {client: queue, **self._waiting}  # it has had no turn
                continue
            if queue:
                self._waiting[client] = queue  # behind the others
            self._charge(client, first.cost)
            self.num_running += first.size
            first.turn.set_result(None)
