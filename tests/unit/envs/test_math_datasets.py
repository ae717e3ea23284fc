"""The published answers of GSM8K and MATH-500, graded by the envs: each is right for its own problem and for no other."""

import pytest

from ludic.envs.dataset_qa_env import DatasetQAEnv
from ludic.envs.gsm8k import GSM8KEnv
from ludic.envs.math import MATHEnv
from ludic.parsers import boxed_parser, final_number_parser
from tests.data import read_jsonl

pytest.importorskip("math_verify", reason="the math extra is not installed")


def reward(env: DatasetQAEnv, answer: str | None) -> float:
    assert answer is not None, env.question_id
    env.reset(seed=0)
    return env.step({"agent_0": answer})["agent_0"].reward


@pytest.mark.parametrize(("name", "num_records"), [("gsm8k_train", 7473), ("gsm8k_test", 1000)])
def test_every_worked_answer_of_gsm8k_earns_the_full_reward(name, num_records):
    envs = [GSM8KEnv(sample) for sample in read_jsonl(name)]
    assert len(envs) == num_records
    refused = [env.sample for env in envs if reward(env, final_number_parser(env.sample["answer"]).action) != 1.0]
    assert refused == []


def test_the_answer_of_another_question_of_gsm8k_earns_nothing():
    envs = [GSM8KEnv(sample) for sample in read_jsonl("gsm8k_test")]
    for env, other in zip(envs, [*envs[1:], envs[0]], strict=True):
        assert reward(env, other.target) == float(env.target == other.target), (env.target, other.target)


def test_every_solution_of_math_500_earns_the_full_reward():
    samples = read_jsonl("math500")
    envs = [MATHEnv(sample) for sample in samples]
    assert [env.target for env in envs] == [sample["answer"] for sample in samples] and len(envs) == 500
    refused = [env.target for env in envs if reward(env, boxed_parser(env.sample["solution"]).action) != 1.0]
    assert refused == []


def test_the_answer_of_another_problem_of_math_500_earns_nothing():
    envs = [MATHEnv(sample) for sample in read_jsonl("math500")[::5]]  # all 500 take ten seconds
    for env, other in zip(envs, [*envs[1:], envs[0]], strict=True):
        assert reward(env, other.target) == float(env.target == other.target), (env.target, other.target)
