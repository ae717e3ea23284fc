"""Leases: one learner per name, renewed from a thread. Another learner takes a name over only after its lease has expired.

The renewal runs in a thread because a learner that blocks its event loop with a minute of gradients must not lose its lease.
"""

import logging
import os
import platform
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ludic.types import ConfigError, LudicError
from ludic.types.errors import TryAgain
from ludic_pipeline.queue.connection import RedisAddress, away
from ludic_pipeline.queue.scripts import LEASE_LOST, Keys

logger = logging.getLogger(__name__)

CallScript: TypeAlias = Callable[[str, Sequence[Any]], Any]
"""Runs a script with these arguments, without retries."""


class LeaseLost(TryAgain, RuntimeError):
    """Another learner has taken over this learner's name and groups."""


class LeaseHeld(LudicError, RuntimeError):
    """Another live learner holds this name."""


def new_token() -> str:
    """Identifies one learner process; messages show its host and process id."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex}".replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Lease:
    """A learner's name and the token of the process that holds it."""

    name: str
    token: str = field(default_factory=new_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimes:
    """Lease duration and renewal interval; the same for every learner of a queue."""

    holds_s: float = 15.0
    """The lease expires this long after the last heartbeat."""
    beat_s: float = 3.0
    """Interval of heartbeats."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s <= self.holds_s / 3:
            raise ConfigError(
                f"holds_s={self.holds_s}, beat_s={self.beat_s}; beat_s must be above 0 and at most a third of holds_s, or one "
                "late answer loses the lease."
            )


LEASE_TIMES = LeaseTimes()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerStatus:
    """State of a learner; it is sent with every call."""

    sequence: int = 0
    """1, 2, 3, … within a learner process. Redis ignores a state with a lower number than the last one of the same process."""
    version: int | None = None
    """The policy version it trains on; None if not known yet."""
    items_per_update: int = 1
    """Items of a batch, over all ranks."""
    versions_per_batch: int = 1
    """Optimizer steps on a batch."""
    max_lag: int | None = None
    """None: no limit."""
    is_waiting: bool = False
    """The learner has nothing to train on."""
    items_in_hand: int = 0
    """Items given to the trainer and not acknowledged yet; pacing does not count them as waiting."""

    def arguments(self, lease: Lease) -> list[str | int]:
        """The first eight arguments of every script that a learner calls."""
        version = "" if self.version is None else self.version
        max_lag = "" if self.max_lag is None else self.max_lag
        items = f"{self.items_per_update}/{self.versions_per_batch}"
        return [
            lease.name, lease.token, version, items, max_lag, int(self.is_waiting), self.items_in_hand, self.sequence,
        ]  # fmt: skip


class Heartbeat:
    """Calls `beat` from its own thread and connection until it is stopped or the lease is lost."""

    def __init__(
        self, address: RedisAddress, keys: Keys, lease: Lease, times: LeaseTimes, beat: Callable[[CallScript], None]
    ) -> None:
        self._address, self._keys, self._lease, self._times, self._beat = address, keys, lease, times, beat
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {lease.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current beat."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        from redis.exceptions import ResponseError

        client = self._address.sync_client()

        def call(script: str, args: Sequence[Any]) -> Any:
            return client.register_script(script)(keys=self._keys.all, args=args)

        try:
            while not self._end.wait(self._times.beat_s):
                try:
                    self._beat(call)
                except ResponseError as error:
                    if str(error).startswith(LEASE_LOST):
                        logger.error("%s", lost(self._lease, str(error)))  # the next batch raises it
                        return
                    logger.warning("the lease of %s could not be renewed: %s", self._lease.name, error)
                except away() as error:
                    logger.warning("the lease of %s could not be renewed: %s", self._lease.name, type(error).__name__)
        finally:
            client.close()


def lost(lease: Lease, reason: str) -> LeaseLost:
    return LeaseLost(
        f"This learner was {lease.name!r} ({lease.token}) and has lost that name: {reason}. It sent no heartbeat for longer than "
        "the lease lasts (a pause of the process or the network?), and another learner took over its groups. Resume from the "
        "last checkpoint; groups that are in the checkpoint are not trained on again."
    )
