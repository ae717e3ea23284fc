"""One learner per name: a lease that is kept up from a thread, and lost only to somebody who waited for it to run out.

The thread matters: a learner that blocks its event loop for a minute of gradients is alive, and must not lose its name.
"""

import logging
import os
import platform
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ludic.batch_gen.pipeline.connection import RedisAddress, away
from ludic.batch_gen.pipeline.scripts import LEASE_LOST, Keys
from ludic.types import ConfigError, LudicError

logger = logging.getLogger(__name__)

CallScript: TypeAlias = Callable[[str, Sequence[Any]], Any]
"""Runs a script with these arguments, at once, and without asking twice."""


class LeaseLost(LudicError, RuntimeError):
    """Another learner has taken over this one's name, and with it the groups it held."""


class LeaseHeld(LudicError, RuntimeError):
    """Another learner has this name, and is alive."""


def new_token() -> str:
    """Names one life of one learner; says in messages where it runs."""
    return f"{platform.node() or 'host'}:{os.getpid()}:{uuid.uuid4().hex}".replace(" ", "_")


@dataclass(frozen=True, slots=True)
class Lease:
    """A learner's name, for as long as it lives."""

    name: str
    token: str = field(default_factory=new_token)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseTimes:
    """How fast a dead learner is noticed. Every learner of a queue has the same."""

    holds_s: float = 15.0
    """After so long without a sign of life the name is free."""
    beat_s: float = 3.0
    """A sign of life is given so often."""

    def __post_init__(self) -> None:
        if not 0 < self.beat_s <= self.holds_s / 3:
            raise ConfigError(
                f"A lease that holds {self.holds_s} s is renewed every {self.beat_s} s; a beat must be more than 0 and at most "
                "a third of it, or one late answer loses it."
            )


LEASE_TIMES = LeaseTimes()


@dataclass(frozen=True, kw_only=True, slots=True)
class LearnerStatus:
    """How a learner stands; it says so with everything it asks."""

    version: int | None = None
    """The policy version it trains on; None before it knows."""
    items_per_update: int = 1
    """Over all ranks."""
    max_lag: int | None = None
    """None: nothing is too old."""
    is_waiting: bool = False
    """It has nothing to train on."""
    items_in_hand: int = 0
    """Handed to the trainer and not yet acknowledged: nobody has to wait for these."""

    def arguments(self, lease: Lease) -> list[str | int]:
        """The first seven of every script that a learner calls."""
        version = "" if self.version is None else self.version
        max_lag = "" if self.max_lag is None else self.max_lag
        return [
            lease.name, lease.token, version, self.items_per_update, max_lag, int(self.is_waiting), self.items_in_hand,
        ]  # fmt: skip


class Heartbeat:
    """Calls `beat` from a thread of its own, over a connection of its own, until it is stopped or the lease is lost."""

    def __init__(
        self, address: RedisAddress, keys: Keys, lease: Lease, times: LeaseTimes, beat: Callable[[CallScript], None]
    ) -> None:
        self._address, self._keys, self._lease, self._times, self._beat = address, keys, lease, times, beat
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lease of {lease.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends with the beat that is under way."""
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
        f"This learner was {lease.name!r} ({lease.token}), but has lost that name: {reason}. It was silent for longer than a "
        "lease holds (a pause of the process or the network?), and another learner went on with its groups. Resume from the "
        "last checkpoint; nothing that it had saved is trained on again."
    )
