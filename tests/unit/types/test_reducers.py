"""Reducers, against hand-computed numbers."""

import numpy as np
import pytest

from ludic.types import ConfigError, Reducer, apply_reducers_to_records, default_reducers, percent_keys

RECORDS = [
    {"rollout_id": "a", "reward": 1.0, "info": {"correct": True}, "finish_reason": "stop"},
    {"rollout_id": "a", "reward": 2.0, "info": {"correct": False}, "finish_reason": "length"},
    {"rollout_id": "b", "reward": 6.0, "info": {}, "finish_reason": "stop", "seq_len_truncated": True},
    {"rollout_id": "b", "info": {"correct": np.bool_(True)}},
]


def reduce(reducer: Reducer, records=RECORDS, **counts) -> float:
    return apply_reducers_to_records(records, {"it": reducer}, **counts)["it"]


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        (Reducer("mean", "reward"), 3.0),  # (1 + 2 + 6) / 3: the record without a reward is skipped
        (Reducer("sum", "reward"), 9.0),
        (Reducer("sum", "reward", normalize_by="samples"), 9 / 4),
        (Reducer("sum", "reward", normalize_by="rollouts"), 9 / 2),
        (Reducer("count_true", "info.correct"), 2.0),
        (Reducer("count_true", "info.correct", normalize_by="samples"), 2 / 4),
        (Reducer("mean", "info.correct"), 2 / 3),
        (Reducer("mean", lambda record: record.get("reward"), transform=lambda r: r * 10), 30.0),
    ],
)
def test_reducers_equal_hand_computed_numbers(reducer: Reducer, expected: float):
    assert reduce(reducer) == expected


def test_given_counts_override_those_of_the_records():
    assert reduce(Reducer("sum", "reward", normalize_by="samples"), sample_count=9) == 1.0
    assert reduce(Reducer("sum", "reward", normalize_by="rollouts"), rollout_count=3) == 3.0


def test_default_reducers_count_both_kinds_of_truncation():
    assert apply_reducers_to_records(RECORDS, default_reducers()) == {
        "completion_truncated_rate": 0.25,
        "seq_len_truncated_rate": 0.25,
    }
    assert percent_keys(default_reducers() | {"reward": Reducer("mean", "reward")}) == default_reducers().keys()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "median", "source": "x"}, "mean, sum, count_true"),
        ({"kind": "sum", "source": "x", "normalize_by": "tokens"}, "samples, rollouts"),
        ({"kind": "mean", "source": "x", "normalize_by": "samples"}, "divide twice"),
        ({"kind": "sum", "source": "a..b"}, "dotted path"),
    ],
)
def test_wrong_reducers_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        Reducer(**settings)


def test_error_for_a_sum_of_texts_names_the_reducer_and_the_value():
    with pytest.raises(ConfigError, match=r"'it' adds numbers.*'stop' \(str\)"):
        reduce(Reducer("sum", "finish_reason"))
