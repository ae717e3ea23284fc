import json
from collections import Counter

import pytest

from ludic.batch_gen import PrioritisedCurriculum
from ludic.training import BetaValueTracker
from ludic.types import prompt_key
from tests.unit.batch_gen.test_curriculum import TASKS, picks, result


class Known:
    """Fixed success rates by task."""

    def __init__(self, **success):
        self.success = {f"task_index={name.removeprefix('t')}": value for name, value in success.items()}

    def success_of(self, key):
        return self.success.get(key, 0.5)


def test_the_weight_of_a_task_is_the_standard_deviation_of_its_outcome():
    curriculum = PrioritisedCurriculum(TASKS, Known(t0=0.0, t1=1.0, t2=0.2, t3=0.9), batch_size=1)
    # sqrt(0) + 0.05; sqrt(0.16) + 0.05; sqrt(0.09) + 0.05; unknown: sqrt(0.25) + 0.05
    assert [curriculum.weight_of(i) for i in range(5)] == pytest.approx([0.05, 0.05, 0.45, 0.35, 0.55])


def test_tasks_are_drawn_in_proportion_to_their_weights():
    curriculum = PrioritisedCurriculum(TASKS[:3], Known(t0=0.5, t1=0.1, t2=1.0), batch_size=1, eps=0.1)
    counts = Counter(index for _ in range(4000) for index in picks(curriculum))
    # 0.6, 0.4 and 0.1 of 1.1; three standard deviations are below 0.024
    assert [counts[i] / 4000 for i in range(3)] == pytest.approx([6 / 11, 4 / 11, 1 / 11], abs=0.025)


def test_it_reads_the_values_and_leaves_counting_to_the_credit_assigner():
    tracker = BetaValueTracker()
    curriculum = PrioritisedCurriculum(TASKS, tracker, batch_size=2)
    chosen = curriculum.next_requests()
    curriculum.observe([result(task, 1.0) for task in chosen])
    assert len(tracker) == 0
    tracker.initialise(prompt_key(chosen[0].meta), [1.0])
    assert curriculum.weight_of(chosen[0].env_seed) == pytest.approx(0.05)


def test_a_resumed_curriculum_draws_the_same_tasks():
    whole, resumed = (PrioritisedCurriculum(TASKS, Known(t1=0.0), batch_size=3, seed=5) for _ in range(2))
    for _ in range(4):
        picks(whole)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert [picks(resumed) for _ in range(5)] == [picks(whole) for _ in range(5)]
