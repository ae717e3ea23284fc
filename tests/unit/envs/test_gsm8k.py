import pytest

from ludic.envs import check_env
from ludic.envs.gsm8k import GSM8KEnv


def sample(answer="She has 3 + 4 = <<3+4=7>>7.\n#### 7"):
    return {"id": "q1", "question": "Ann has 3 pens and buys 4. How many has she?", "answer": answer}


@pytest.mark.parametrize(
    ("answer", "target"),
    [
        ("#### 72", "72"),
        ("12 * 9 = 108\n#### 1,080", "1080"),
        ("#### 109,200,000", "109200000"),
        ("#### -7", "-7"),
        ("#### $18", "18"),
        ("#### 3 of 12", "12"),
        ("#### 5\nno, #### 6", "6"),
        ("####7", "7"),
    ],
)
def test_the_target_is_the_last_whole_number_after_the_marker(answer, target):
    assert GSM8KEnv(sample(answer)).target == target


@pytest.mark.parametrize("answer", ["72", "#### ", "#### none", "#### 3.5", ""])
def test_a_sample_without_a_whole_number_is_refused_with_its_text(answer):
    with pytest.raises(ValueError, match="ends in '#### <whole number>'") as refusal:
        GSM8KEnv(sample(answer))
    assert repr(answer) in str(refusal.value)


@pytest.mark.parametrize(
    ("action", "reward"),
    [("7", 1.0), (" 7 ", 1.0), ("7.0", 1.0), ("$7", 1.0), ("7 pens", 1.0), ("14/2", 1.0), ("8", 0.0), ("", 0.0)],
)
async def test_answers_are_graded_by_value(action, reward):
    for outcome in (await _answer_awaiting(action), _answer_blocking(action)):
        assert outcome.reward == reward
        assert outcome.terminated and not outcome.truncated
        assert outcome.info["correct"] is bool(reward)
        assert outcome.info["target_answer"] == "7"


async def _answer_awaiting(action):
    env = GSM8KEnv(sample())
    await env.async_reset(seed=0)
    return (await env.async_step({"agent_0": action}))["agent_0"]


def _answer_blocking(action):
    env = GSM8KEnv(sample())
    env.reset(seed=0)
    return env.step({"agent_0": action})["agent_0"]


def test_the_system_prompt_asks_for_a_box_and_can_be_replaced():
    assert r"\boxed{}" in (GSM8KEnv(sample()).suggested_sysprompt or "")
    assert GSM8KEnv(sample(), system_prompt="Be brief.").suggested_sysprompt == "Be brief."


async def test_gsm8k_keeps_the_env_contract():
    await check_env(lambda: GSM8KEnv(sample()))
