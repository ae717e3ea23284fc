"""Pacing of actors: when to start another group, and when a running group has become useless.

The queue is first in, first out: a new group is trained on after all groups that are waiting or in progress. This gives the number
of updates between the policy that samples it and the policy that trains on it. An actor does not start a group that would
exceed max_lag; if it is faster than the learner, it pauses.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The state that an actor needs for pacing, in the order of the reply of the script BEAT_ACTOR."""

    version: int | None
    """The policy version that the learner trains on; None before the first learner."""
    items_per_update: int | None
    """None before the first learner."""
    max_lag: int | None
    """Updates that an item may be behind; None: no limit."""
    is_waiting: bool
    """The learner has nothing to train on, so the next update starts with the next items."""
    waiting_items: int
    """Items in the queue whose training has not started, fetched by a learner or not."""
    in_progress_items: int
    """Items in progress at all live actors, including the caller."""
    num_actors: int
    """Live actors, including the caller."""
    waiting_groups: int
    """Groups that no learner has fetched; `max_waiting` bounds them."""
    num_learners: int
    """Live learners."""
    versions_per_batch: int = 1
    """Growth of the version with each batch of `items_per_update`."""
    finished_after: int | None = None
    """Updates of the run, once all of them are made and saved; None before that."""


def may_begin(learner: LearnerState, *, ahead_items: int, served_version: int | None = None) -> bool:
    """Return True if a group started now will be within max_lag when it is trained on.

    `ahead_items`: items that are waiting or in progress, over all actors. `served_version`: version of the policy that samples
    the group, by default the learner's.
    """
    if learner.version is None or learner.items_per_update is None:
        return False  # batch size and max_lag are unknown before the first learner
    served = learner.version if served_version is None else served_version
    if served > learner.version:
        return False  # the learner was resumed at an earlier step and has not published its weights yet
    return learner.max_lag is None or _expected_lag(learner, ahead_items, served) <= learner.max_lag


def _expected_lag(learner: LearnerState, ahead_items: int, served_version: int) -> int:
    """Versions between the served policy and the one that trains on an item behind `ahead_items` others."""
    assert learner.version is not None and learner.items_per_update is not None, "may_begin has checked"
    num_batches = (0 if learner.is_waiting else 1) + ahead_items // learner.items_per_update
    return learner.version - served_version + num_batches * learner.versions_per_batch


def is_too_late(learner: LearnerState, first_version: int | None) -> bool:
    """Return True if a group whose first tokens have this version is already beyond max_lag."""
    if learner.version is None or learner.max_lag is None or first_version is None:
        return False
    return learner.version - first_version > learner.max_lag
