import pytest

from ludic.envs import check_env
from ludic.envs.math import MATHEnv

SAMPLE = {
    "problem": "What is the sum of the reciprocals of the roots of $x^2 - 6x + 4 = 0$?",
    "solution": r"Not \boxed{6}: the sum is 6 and the product 4, so it is $\boxed{\frac{3}{2}}$.",
}


@pytest.mark.parametrize(
    ("sample", "target"),
    [
        (SAMPLE, r"\frac{3}{2}"),
        ({"question": "2 + 2?", "answer": r"It is \boxed{4}."}, "4"),
        ({"problem": "2 + 2?", "solution": "Four.", "answer": "4"}, "4"),
        ({"problem": "2 + 2?", "solution": r"\boxed{4}", "answer": "four"}, "4"),
        ({"problem": "2 + 2?", "answer": "4"}, "4"),
        ({"problem": "Which set?", "solution": r"\boxed{\{1, 2\}}"}, r"\{1, 2\}"),
    ],
)
def test_the_target_is_the_last_box_or_else_the_bare_answer(sample, target):
    assert MATHEnv(sample).target == target


@pytest.mark.parametrize(
    "sample",
    [
        {"problem": "2 + 2?", "solution": "It is four."},
        {"problem": "2 + 2?", "solution": r"It is \boxed{4."},
        {"problem": "2 + 2?", "solution": r"\boxed{}", "answer": " "},
        {"question": "2 + 2?", "answer": "It is four."},
    ],
)
def test_a_sample_without_a_target_is_refused(sample):
    with pytest.raises(ValueError, match="boxed"):
        MATHEnv(sample)


def test_a_sample_without_a_problem_or_a_solution_names_what_it_has():
    with pytest.raises(KeyError, match="question"):
        MATHEnv({"prompt": "2 + 2?", "solution": r"\boxed{4}"})
    with pytest.raises(KeyError, match="answer"):
        MATHEnv({"problem": "2 + 2?"})


@pytest.mark.parametrize(
    ("action", "reward"),
    [(r"\frac32", 1.0), ("1.5", 1.0), ("6/4", 1.0), (r"\frac{\sqrt{9}}{2}", 1.0), ("2/3", 0.0), ("x", 0.0), ("", 0.0)],
)
async def test_answers_are_graded_by_meaning(action, reward):
    env = MATHEnv(SAMPLE)
    await env.async_reset(seed=0)
    awaited = (await env.async_step({"agent_0": action}))["agent_0"]
    env.reset(seed=0)
    blocking = env.step({"agent_0": action})["agent_0"]
    assert awaited == blocking
    assert awaited.reward == reward and awaited.terminated


async def test_math_keeps_the_env_contract():
    await check_env(lambda: MATHEnv(SAMPLE))
