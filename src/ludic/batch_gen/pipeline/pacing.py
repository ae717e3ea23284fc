"""When an actor may begin another group, and when one that is being played has become useless.

Experience waits its turn: what is begun now is trained on after everything that waits or is being made. From that follows how
many updates will lie between the policy that samples it and the policy that learns from it. A group that would come too late
is not begun: an actor that is faster than the learner rests, instead of playing for the bin.
"""

from typing import Protocol


class LearnerFacts(Protocol):
    """As much of the learner's state as pacing needs."""

    @property
    def version(self) -> int | None:
        """The policy that it published last; None before any learner has announced itself."""
        ...

    @property
    def items_per_update(self) -> int | None: ...

    @property
    def max_lag(self) -> int | None:
        """How many updates behind an item may be; None for any number."""
        ...

    @property
    def is_waiting(self) -> bool:
        """It has nothing to train on: the next update begins with what comes next."""
        ...


def may_begin(learner: LearnerFacts, *, ahead_items: int, served_version: int | None = None) -> bool:
    """Whether a group that is begun now will still be fresh when its turn comes.

    `ahead_items`: those that wait and those that are being made, by everybody. `served_version`: of the policy that would play
    it; without it, the learner's own.
    """
    if learner.version is None or learner.items_per_update is None:
        return False  # how much a learner takes at a time, and how old, is not known before it says so
    served = learner.version if served_version is None else served_version
    if served > learner.version:
        return False  # a learner that was resumed at an earlier step; its weights are on their way
    return learner.max_lag is None or expected_lag(learner, ahead_items, served) <= learner.max_lag


def expected_lag(learner: LearnerFacts, ahead_items: int, served_version: int) -> int:
    """Updates between the policy that is served and the one that will be trained on the item after `ahead_items` others."""
    assert learner.version is not None and learner.items_per_update is not None, "may_begin has looked"
    being_trained = 0 if learner.is_waiting else 1
    return learner.version - served_version + being_trained + ahead_items // learner.items_per_update


def is_too_late(learner: LearnerFacts, first_version: int | None) -> bool:
    """Whether a group whose first tokens are of this version cannot be used any more, however soon it is finished."""
    if learner.version is None or learner.max_lag is None or first_version is None:
        return False
    return learner.version - first_version > learner.max_lag
