"""What became of each group that a learner was given: handed out, trained, saved, acknowledged.

The trainer's thread tells it what happened; whoever talks to Redis asks it what may be acknowledged. Only an acknowledgement
that Redis has confirmed is forgotten, so a state that is saved at any moment lists all that must not be trained on again.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ludic.batch_gen.pipeline.queue import Settlement

_MAX_DONE = 10_000
"""Far more than a learner acknowledges in the seconds that Redis can lose."""


class Acknowledge(StrEnum):
    """When a group is removed from the queue."""

    SAVED = "saved"  # with the first checkpoint at or after the step that used it
    TRAINED = "trained"  # with the step that used it: a crash loses what was trained on since the last checkpoint


@dataclass(frozen=True, slots=True)
class _Used:
    """A group whose step is done."""

    step: int
    settlement: Settlement


class Ledger:
    """The groups of one learner's life. Every method may be called from any thread."""

    def __init__(self, acknowledge: Acknowledge) -> None:
        self._acknowledge = acknowledge
        self._lock = threading.Lock()
        self._out: dict[str, int] = {}
        """Group → items, handed to the trainer since its last step."""
        self._used: dict[str, _Used] = {}
        """Trained on, and not yet acknowledged."""
        self._due: dict[str, Settlement] = {}
        """Those of them that may be."""
        self._done: dict[str, Settlement] = {}
        """Acknowledged, the latest of them: a Redis that was killed may have forgotten that."""
        self._suspects: set[str] = set()
        """Groups that Redis was told an update begins with, and not yet that it is over."""

    # --- what happens ---

    def hand_out(self, groups: Iterable[tuple[str, int]]) -> None:
        new = dict(groups)
        with self._lock:
            self._out.update(new)
            self._suspects.update(new)

    def told_over(self, ids: Iterable[str]) -> None:
        """Redis knows that the updates of these groups are over."""
        with self._lock:
            self._suspects.difference_update(ids)

    def trained(self, step: int, num_items: int) -> None:
        """A step has used so many of the items that are out; the rest were left out of it."""
        with self._lock:
            left = num_items
            for id_, size in self._out.items():
                used = min(left, size)
                left -= used
                settlement = Settlement(id=id_, trained=used, filtered=size - used)
                self._used[id_] = _Used(step, settlement)
                if self._acknowledge is Acknowledge.TRAINED:
                    self._due[id_] = settlement
            self._out.clear()

    def saved(self, step: int) -> None:
        """What went into the weights up to this step is safe."""
        with self._lock:
            self._due.update({id_: used.settlement for id_, used in self._used.items() if used.step <= step})

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
        """Whether a group that Redis offers is one whose acknowledgement it has lost; then it is due once more."""
        with self._lock:
            if id_ not in self._done:
                return False
            self._due[id_] = self._done[id_]
            return True

    # --- how it stands ---

    def over(self, *, with_out: bool = False) -> set[str]:
        """Groups whose update is over, and Redis has not been told. `with_out`: also those that are handed out, and that the
        trainer gave back alive: it asks for the next batch, or ends without an error."""
        with self._lock:
            return set(self._suspects) if with_out else self._suspects - self._out.keys()

    def due(self) -> list[Settlement]:
        with self._lock:
            return list(self._due.values())

    def ids(self) -> set[str]:
        """Groups that must not be handed out again in this life."""
        with self._lock:
            return {*self._out, *self._used}

    def items_in_hand(self, without: Iterable[Settlement] = ()) -> int:
        """Items that are out or used; those of `without` are left out."""
        with self._lock:
            leaving = {settlement.id for settlement in without}
            used = (_size(u.settlement) for id_, u in self._used.items() if id_ not in leaving)
            return sum(self._out.values()) + sum(used)

    def state(self) -> list[list[Any]]:
        with self._lock:
            return [
                [id_, used.step, used.settlement.trained, used.settlement.filtered] for id_, used in self._used.items()
            ]

    def load(self, state: Sequence[Sequence[Any]]) -> None:
        """What was trained on before the checkpoint that we begin with: it is in those weights, so it is acknowledged now."""
        with self._lock:
            for id_, step, num_trained, num_filtered in state:
                settlement = Settlement(id=id_, trained=num_trained, filtered=num_filtered)
                self._used[id_] = _Used(step, settlement)
                self._due[id_] = settlement


def _size(settlement: Settlement) -> int:
    return settlement.trained + settlement.stale + settlement.filtered
