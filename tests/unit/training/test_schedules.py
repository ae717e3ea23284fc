"""Learning-rate multipliers, against values worked by hand."""

import pytest

from ludic.training.config import LRSchedule
from ludic.types import ConfigError


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (LRSchedule(), {0: 1, 1: 1, 10**6: 1}),
        (LRSchedule(warmup_steps=4), {0: 0.25, 1: 0.5, 2: 0.75, 3: 1, 4: 1, 99: 1}),
        # after the warm-up 8 steps of decay: step 6 is half-way from 1 to 0.2
        (LRSchedule("linear", 2, 10, 0.2), {0: 0.5, 1: 1, 2: 1, 4: 0.8, 6: 0.6, 8: 0.4, 10: 0.2, 50: 0.2}),
        (LRSchedule("linear", 0, 4), {0: 1, 1: 0.75, 2: 0.5, 3: 0.25, 4: 0}),
        # cos(pi/3) = 1/2, so a third of the way 3/4 is left
        (LRSchedule("cosine", 1, 7), {0: 1, 1: 1, 3: 0.75, 4: 0.5, 5: 0.25, 7: 0, 9: 0}),
        (LRSchedule("cosine", 1, 7, 0.1), {4: 0.55, 7: 0.1}),
        (LRSchedule("wsd", 2, 20, 0.0, 5), {0: 0.5, 2: 1, 15: 1, 16: 0.8, 18: 0.4, 20: 0, 21: 0}),
        (LRSchedule("wsd", 0, 20, 0.5), {0: 1, 16: 1, 18: 0.75, 20: 0.5}),
    ],
)
def test_schedule_multipliers_match_values_worked_by_hand(schedule: LRSchedule, expected: dict[int, float]):
    assert {step: schedule(step) for step in expected} == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "exponential"}, "constant, linear, cosine, wsd"),
        ({"warmup_steps": -1}, "0 or more"),
        ({"min_ratio": 1.5}, "between 0 and 1"),
        ({"kind": "cosine"}, "Set total_steps"),
        ({"kind": "linear", "warmup_steps": 5, "total_steps": 5}, "no step after"),
        ({"kind": "linear", "total_steps": 5, "decay_steps": 2}, "is for kind='wsd'"),
        ({"kind": "wsd", "warmup_steps": 2, "total_steps": 5, "decay_steps": 4}, "room for 3"),
    ],
)
def test_invalid_schedule_is_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        LRSchedule(**settings)
