"""Limit of restarts, for supervisors of processes."""

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RestartLimit:
    """Number of restarts of a process within a time."""

    max_restarts: int = 5
    """Deaths within `within_s`; one more is too many."""
    within_s: float = 600.0
    delay_s: float = 1.0
    """Pause before the first restart; doubled with each further one in the window."""


class Restarts:
    """Counts the deaths of one process against a limit."""

    def __init__(self, limit: RestartLimit) -> None:
        self.limit = limit
        self._deaths: deque[float] = deque()

    @property
    def num_deaths(self) -> int:
        """Those within the window, at the last death."""
        return len(self._deaths)

    def died(self) -> float | None:
        """Count a death now; returns the pause before the restart, or None if the process has died too often."""
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self.limit.within_s:
            self._deaths.popleft()
        is_over = self.num_deaths > self.limit.max_restarts
        return None if is_over else self.limit.delay_s * 2 ** (self.num_deaths - 1)

    def too_many(self) -> str:
        """Number of its deaths, for a message."""
        return (
            f"has died {self.num_deaths} times within {self.limit.within_s:g} s, more than max_restarts = "
            f"{self.limit.max_restarts} allows"
        )
