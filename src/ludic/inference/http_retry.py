"""Asking again: which failures are worth it, how long to wait, and when to give up."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from ludic.types import ConfigError, LudicError

T = TypeVar("T")


class EndpointError(LudicError, RuntimeError):
    """A server did not give an answer, or refused to."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status, where one came."""


class Busy(EndpointError):
    """Nothing is wrong with the question: worth another try."""

    def __init__(self, message: str, *, status: int | None = None, wait_s: float | None = None) -> None:
        super().__init__(message, status=status)
        self.wait_s = wait_s
        """How long to wait before it, where somebody knows."""


class Unreachable(Busy, ConnectionError):
    """The connection could not be made, or was lost."""


class NoAnswer(Busy, TimeoutError):
    """The connection stood, and nothing came over it in time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How patient a client is."""

    max_retries: int = 5
    """How often a question is asked again."""
    wait_s: float = 0.5
    """Wait before the first retry; twice as long before each further one."""
    longest_wait_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_retries < 0 or self.wait_s < 0:
            raise ConfigError(f"max_retries={self.max_retries}, wait_s={self.wait_s}; neither can be negative.")

    def wait_before(self, retry: int) -> float:
        # Not all who were sent away at the same moment should come back at the same moment.
        return min(self.wait_s * 2**retry, self.longest_wait_s) * random.uniform(0.75, 1.25)

    async def run(self, ask: Callable[[], Awaitable[T]]) -> T:
        """What `ask` returns; after the last try, its failure and how often it was tried."""
        for attempt in range(self.max_retries + 1):
            try:
                return await ask()
            except Busy as busy:
                if attempt == self.max_retries:
                    raise EndpointError(f"{busy} It was asked {attempt + 1} times.", status=busy.status) from busy
                wait = self.wait_before(attempt) if busy.wait_s is None else min(busy.wait_s, self.longest_wait_s)
                await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")
