import json
from collections import Counter

import pytest

from ludic.batch_gen import EasiestFirstCurriculum, SuccessBandCurriculum, UniformCurriculum
from ludic.types import Rollout
from tests.unit.batch_gen.parts import request
from tests.unit.batch_gen.test_stitching import env_step

TASKS = [request(env_seed=index, meta={"level": 10 - index}) for index in range(10)]


def result(task, reward) -> Rollout:
    return Rollout(steps=[env_step(0, turn="t", reward=reward)], meta={"request_meta": dict(task.meta)})


def picks(curriculum) -> list[int]:
    return [task.env_seed for task in curriculum.next_requests()]


def test_uniform_batches_hold_different_tasks_and_reach_all_of_them():
    curriculum = UniformCurriculum(TASKS, batch_size=4)
    batches = [picks(curriculum) for _ in range(200)]
    assert all(len(set(batch)) == 4 for batch in batches)
    counts = Counter(index for batch in batches for index in batch)
    assert len(counts) == 10 and min(counts.values()) > 50  # 80 expected


def test_a_success_rate_is_a_mean_first_and_forgets_later():
    curriculum = UniformCurriculum(TASKS, batch_size=1, forget=0.25)
    (task,) = curriculum.next_requests()
    index = task.env_seed
    for reward in (1.0, 0.0, 0.0, 0.0):
        curriculum.observe([result(task, reward)])
    assert curriculum.success_rates[index] == pytest.approx(0.25)
    curriculum.observe([result(task, 1.5)])
    assert curriculum.success_rates[index] == pytest.approx(0.25 + 0.25 * 0.75)
    assert curriculum.num_seen[index] == 5


def test_easiest_first_opens_harder_tasks_when_the_open_ones_are_mastered():
    curriculum = EasiestFirstCurriculum(TASKS, difficulty=lambda task: task.meta["level"], batch_size=2)
    assert sorted(picks(curriculum)) == [8, 9]
    curriculum.observe([result(task, 1.0) for task in curriculum.next_requests()[:1]])
    assert curriculum.num_open == 2, "one of two is not enough"
    curriculum.observe([result(task, 1.0) for task in curriculum.next_requests()])
    assert curriculum.num_open == 4
    assert {index for _ in range(50) for index in picks(curriculum)} == {6, 7, 8, 9}


def test_the_band_prefers_tasks_that_are_neither_hopeless_nor_solved():
    curriculum = SuccessBandCurriculum(TASKS, batch_size=2, outside_weight=0.01)
    chosen = {task.env_seed: task for _ in range(100) for task in curriculum.next_requests()}
    assert len(chosen) == 10, "what was not tried yet is possible"
    for index, task in chosen.items():
        rewards = {0: [1.0, 0.0], 1: [1.0, 0.0]}.get(index, [float(index % 2)] * 2)
        curriculum.observe([result(task, reward) for reward in rewards])
    counts = Counter(index for _ in range(300) for index in picks(curriculum))
    assert counts[0] + counts[1] > 0.85 * 600
    assert len(counts) > 2, "the others stay possible"


@pytest.mark.parametrize("make", [
    lambda: UniformCurriculum(TASKS, batch_size=3, seed=2),
    lambda: EasiestFirstCurriculum(TASKS, difficulty=lambda task: task.meta["level"], batch_size=3, seed=2),
    lambda: SuccessBandCurriculum(TASKS, batch_size=3, seed=2),
])  # fmt: skip
def test_a_resumed_curriculum_goes_on_exactly(make):
    whole = make()
    for _ in range(4):
        whole.observe([result(task, float(task.env_seed > 4)) for task in whole.next_requests()])
    resumed = make()
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(3):
        batch = whole.next_requests()
        assert batch == resumed.next_requests()
        for curriculum in (whole, resumed):
            curriculum.observe([result(task, 1.0) for task in batch])
