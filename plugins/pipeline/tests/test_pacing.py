"""Pacing: nothing is begun that would be too old when its turn comes, and the learner is never starved by it."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludic_pipeline.queue.pacing import _expected_lag, is_too_late, may_begin


@dataclass(frozen=True)
class Learner:
    version: int | None = 10
    items_per_update: int | None = 8
    max_lag: int | None = 2
    is_waiting: bool = False
    versions_per_batch: int = 1


@pytest.mark.parametrize(
    ("is_waiting", "ahead_items", "lag"),
    [
        (True, 0, 0),  # the next batch begins with it
        (True, 7, 0),
        (True, 8, 1),
        (False, 0, 1),  # an update is being made, which it cannot be part of
        (False, 7, 1),
        (False, 8, 2),
        (False, 23, 3),
    ],
)
def test_the_lag_of_an_item_is_the_number_of_batches_before_it(is_waiting, ahead_items, lag):
    learner = Learner(is_waiting=is_waiting)
    assert _expected_lag(learner, ahead_items, 10) == lag
    assert may_begin(learner, ahead_items=ahead_items) == (lag <= 2)


def test_the_age_of_the_served_weights_counts_as_lag():
    learner = Learner(is_waiting=True)
    assert may_begin(learner, ahead_items=0, served_version=8)
    assert not may_begin(learner, ahead_items=0, served_version=7), "it could never be used"
    assert not may_begin(learner, ahead_items=8, served_version=8)


@pytest.mark.parametrize("unknown", [{"version": None}, {"items_per_update": None}])
def test_no_group_starts_before_the_settings_of_the_learner_are_known(unknown):
    assert not may_begin(replace(Learner(is_waiting=True), **unknown), ahead_items=0)


def test_no_group_starts_with_weights_newer_than_the_resumed_step():
    assert not may_begin(Learner(version=40, is_waiting=True), ahead_items=0, served_version=57)
    assert not may_begin(Learner(version=40, max_lag=None), ahead_items=0, served_version=57)


@given(
    items_per_update=st.integers(1, 64), max_lag=st.integers(0, 9), group_size=st.integers(1, 16), steps=st.integers(1, 4),
    data=st.data(),
)  # fmt: skip
def test_paced_groups_are_never_stale_and_never_starve_the_learner(items_per_update, max_lag, group_size, steps, data):
    """Groups finish at once and in order: one that may begin is never dropped, in any order of events. A batch takes `steps`
    optimizer steps, and actors get the weights after the last."""
    learner = Learner(0, items_per_update, max_lag, is_waiting=True, versions_per_batch=steps)
    queue: list[int] = []
    num_updates = served = 0
    for _ in range(60):
        may = may_begin(learner, ahead_items=len(queue), served_version=served)
        if learner.is_waiting and len(queue) >= items_per_update:  # it takes whole groups until it has enough
            taken = 0
            while taken < items_per_update:
                assert learner.version - queue[0] <= max_lag
                queue, taken = queue[group_size:], taken + group_size
            learner = replace(learner, is_waiting=False)
        elif may and (learner.is_waiting or data.draw(st.booleans(), label="the actor goes first")):
            queue += [served] * group_size
        elif not learner.is_waiting:
            num_updates += 1
            learner = replace(learner, version=num_updates, is_waiting=num_updates % steps == 0)
            served = num_updates if learner.is_waiting else served
        else:
            raise AssertionError("the learner waits, and the actor may not begin")
    assert num_updates > 0 or items_per_update > 25 * group_size


def test_a_group_is_too_late_when_its_first_version_is_out_of_reach():
    assert not is_too_late(Learner(version=12), 10)
    assert is_too_late(Learner(version=13), 10)
    assert not is_too_late(Learner(version=13, max_lag=None), 10)
    assert not is_too_late(Learner(version=13), None), "its age is unknown"
    assert not is_too_late(Learner(version=None), 10)
