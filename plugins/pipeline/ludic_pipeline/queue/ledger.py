"""Tracks the state of each group that a learner has taken: handed out, trained, saved, acknowledged.

The trainer's thread reports what happened; the batch source and the heartbeat read what may be acknowledged. The ledger forgets a
group only after Redis confirms its acknowledgement, so a state saved at any moment lists all groups that must not be trained on
again.
"""

import threading
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any

from ludic_pipeline.queue.queue import Settlement

_MAX_DONE = 10_000
"""Far more groups than a learner acknowledges in the seconds of data that a killed Redis can lose."""


class Acknowledge(StrEnum):
    """When a group is removed from the queue."""

    SAVED = "saved"  # with the first checkpoint at or after the step that used it
    TRAINED = "trained"  # with the step that used it: a crash loses the groups trained on since the last checkpoint


class Ledger:
    """The groups of one learner process. Every method may be called from any thread."""

    def __init__(self, acknowledge: Acknowledge) -> None:
        self._acknowledge = acknowledge
        self._lock = threading.Lock()
        self._out: dict[str, int] = {}
        """Group → items given to the trainer since its last step."""
        self._used: dict[str, tuple[int, Settlement]] = {}
        """Group → step that used it; trained on and not acknowledged yet."""
        self._due: dict[str, Settlement] = {}
        """Groups of `_used` that may be acknowledged."""
        self._done: dict[str, Settlement] = {}
        """The latest acknowledged groups; a killed Redis may have lost the acknowledgement."""
        self._suspects: set[str] = set()
        """Groups whose update has started in Redis' records and has not ended there."""

    # --- events ---

    def hand_out(self, groups: Iterable[tuple[str, int]]) -> None:
        new = dict(groups)
        with self._lock:
            self._out.update(new)
            self._suspects.update(new)

    def mark_over(self, ids: Iterable[str]) -> None:
        """Redis has recorded that the updates of these groups are over."""
        with self._lock:
            self._suspects.difference_update(ids)

    def trained(self, step: int, num_items: int) -> None:
        """A step has used `num_items` of the items handed out; the trainer filtered the rest."""
        with self._lock:
            left = num_items
            for id_, size in self._out.items():
                used = min(left, size)
                left -= used
                settlement = Settlement(id=id_, trained=used, filtered=size - used)
                self._used[id_] = (step, settlement)
                if self._acknowledge is Acknowledge.TRAINED:
                    self._due[id_] = settlement
            self._out.clear()

    def saved(self, step: int) -> None:
        """The weights of this step are saved, so groups used up to it may be acknowledged."""
        with self._lock:
            self._due |= {id_: settlement for id_, (at, settlement) in self._used.items() if at <= step}

    def settled(self, settlements: Iterable[Settlement]) -> None:
        """Redis has confirmed these."""
        with self._lock:
            for settlement in settlements:
                self._used.pop(settlement.id, None)
                self._due.pop(settlement.id, None)
                self._done[settlement.id] = settlement
            for id_ in list(self._done)[:-_MAX_DONE]:
                del self._done[id_]

    def forgotten(self, id_: str) -> bool:
        """True if Redis has lost the acknowledgement of this group; the group is then due again."""
        with self._lock:
            if id_ not in self._done:
                return False
            self._due[id_] = self._done[id_]
            return True

    # --- state ---

    def over(self, *, with_out: bool = False) -> set[str]:
        """Groups whose update is over and not reported to Redis. `with_out`: include those handed out, for a trainer that asks
        for the next batch or ends without an error."""
        with self._lock:
            return set(self._suspects) if with_out else self._suspects - self._out.keys()

    def due(self) -> list[Settlement]:
        with self._lock:
            return list(self._due.values())

    def ids(self) -> set[str]:
        """Groups that this process must not hand out again."""
        with self._lock:
            return {*self._out, *self._used}

    def items_in_hand(self, without: Iterable[Settlement] = ()) -> int:
        """Items handed out or used, except those of `without`."""
        with self._lock:
            leaving = {settlement.id for settlement in without}
            used = (settlement.num_items for id_, (_, settlement) in self._used.items() if id_ not in leaving)
            return sum(self._out.values()) + sum(used)

    def state(self) -> list[list[Any]]:
        with self._lock:
            return [[id_, step, one.trained, one.filtered] for id_, (step, one) in self._used.items()]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """Load the groups trained on before the checkpoint. They are in its weights, so they may be acknowledged now."""
        with self._lock:
            for id_, step, num_trained, num_filtered in state:
                settlement = Settlement(id=id_, trained=num_trained, filtered=num_filtered)
                self._used[id_] = (step, settlement)
                self._due[id_] = settlement
