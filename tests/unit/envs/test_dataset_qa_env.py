import pytest

from ludic.envs import DatasetQAEnv
from ludic.types import ResetNeeded

SAMPLE = {"id": 7, "question": "2+2?", "answer": " Four "}


def test_one_question_one_answer_then_over():
    env = DatasetQAEnv(SAMPLE, system_prompt="Answer.")
    assert env.reset() == {"agent_0": ("2+2?", {"question_id": "7"})}
    outcome = env.step({"agent_0": "four"})["agent_0"]
    assert outcome.reward == 1.0 and outcome.terminated and not outcome.truncated
    assert outcome.info == {
        "question_id": "7", "raw_action": "four", "parsed_answer": "four", "target_answer": "Four", "correct": True,
    }  # fmt: skip
    assert env.suggested_sysprompt == "Answer."
    with pytest.raises(ResetNeeded):
        env.step({"agent_0": "four"})
    with pytest.raises(RuntimeError):
        env.env_step("four")


def test_rewards_keys_and_rules_can_be_set():
    env = DatasetQAEnv(
        {"uid": "u", "q": "x", "a": "3"},
        prompt_key="q",
        answer_key="a",
        prompt_builder=lambda sample: f"Q: {sample['q']}",
        verifier=lambda answer, target: float(answer) == float(target),
        correct_reward=2.0,
        incorrect_reward=-1.0,
    )
    assert env.reset()["agent_0"] == ("Q: x", {"question_id": "u"})
    assert env.step({"agent_0": "3.0"})["agent_0"].reward == 2.0
    env.reset()
    assert env.step({"agent_0": "4"})["agent_0"].reward == -1.0
    assert env.current_obs() == {"agent_0": "Q: x"}


@pytest.mark.parametrize("sample", [{"question": "x"}, {"answer": "x"}])
def test_a_missing_key_is_named(sample):
    with pytest.raises(KeyError, match="prompt_key or answer_key"):
        DatasetQAEnv(sample)
