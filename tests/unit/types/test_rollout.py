import json
import string

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ludic.types import (
    AgentStep,
    EnvironmentStep,
    Failure,
    MessageView,
    Rollout,
    StopReason,
    TokenTrace,
)

pytestmark = pytest.mark.slow

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(string.ascii_letters, max_size=4), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
infos = st.dictionaries(st.text(max_size=5), json_values, max_size=3)
ids = st.lists(st.integers(0, 150_000), max_size=6)


@st.composite
def rollouts(draw):
    """Conversations that extend, restart, or share nothing, with and without env steps."""
    messages: list[dict] = []
    steps: list = []
    prompt: list[int] = draw(ids)
    for turn in range(draw(st.integers(0, 4))):
        if draw(st.booleans()):
            messages, prompt = [], draw(ids)
        messages = [*messages, {"role": "user", "content": draw(st.text(max_size=5))}]
        completion = draw(ids)
        logprobs = [draw(st.floats(-50, 0, width=32)) for _ in completion] if draw(st.booleans()) else None
        runs = [(turn, len(completion))] if draw(st.booleans()) else ()
        trace = TokenTrace(prompt, completion, logprobs, draw(st.sampled_from([None, "stop", "length"])), runs, 0.7)
        agent_step = AgentStep(
            index=len(steps), prompt_messages=MessageView(list(messages)), action=draw(st.text(max_size=5)), trace=trace,
            info=draw(infos), turn_id=f"t{turn}", reward=draw(st.floats(-5, 5)),
            tool_calls=draw(st.none() | st.just([{"id": "call00000"}])),
        )  # fmt: skip
        steps.append(agent_step)
        if draw(st.booleans()):
            steps.append(
                EnvironmentStep(
                    index=len(steps), prev_obs="a", action=agent_step.action, parsed_action=draw(json_values),
                    next_obs=draw(st.none() | st.text(max_size=4)), source_agent_step_id=agent_step.id,
                    agent_step_ids=[agent_step.id], reward=draw(st.floats(-5, 5)), trace=trace, info=draw(infos),
                    reward_components={"env": 1.0}, turn_id=f"t{turn}",
                )
            )  # fmt: skip
        messages = [*messages, {"role": "assistant", "content": agent_step.action}]
        prompt = [*prompt, *completion, *draw(ids)]
    return Rollout(steps=steps, meta=draw(infos), stop=draw(st.none() | st.sampled_from(list(StopReason))))


@given(rollout=rollouts())
@settings(max_examples=150)
def test_json_round_trip(rollout):
    again = Rollout.from_json(rollout.to_json())
    assert again == rollout
    for before, after in zip(rollout.steps, again.steps, strict=True):
        assert type(after) is type(before) and after.trace == before.trace
    assert again.to_json() == rollout.to_json()


def long_conversation(num_turns: int) -> Rollout:
    messages: list[dict] = []
    prompt: list[int] = []
    rollout = Rollout()
    for turn in range(num_turns):
        messages = [*messages, {"role": "user", "content": "o" * 50}]
        prompt = [*prompt, *range(20)]
        trace = TokenTrace(prompt, list(range(10)))
        rollout.steps.append(
            AgentStep(index=turn, prompt_messages=messages, action="a" * 20, trace=trace, turn_id=str(turn))
        )
        messages = [*messages, {"role": "assistant", "content": "a" * 20}]
        prompt = [*prompt, *range(10)]
    return rollout


def test_json_size_is_linear_in_the_conversation():
    short, long = len(long_conversation(10).to_json()), len(long_conversation(80).to_json())
    assert long < 8.5 * short


def test_a_rollout_read_back_shares_memory_between_its_prompts():
    again = Rollout.from_json(long_conversation(60).to_json())
    buffers = {id(s.trace.prompt_token_ids.base): s.trace.prompt_token_ids.base.nbytes for s in again.agent_steps}
    assert sum(buffers.values()) < 8 * again.agent_steps[-1].trace.prompt_token_ids.nbytes


def test_total_reward_counts_env_steps_and_parse_failures_once():
    trace = TokenTrace([1], [2])

    def agent(reward, target, parse_error):
        return AgentStep(
            index=0, prompt_messages=[], action="", trace=trace, reward=reward, action_target=target,
            info={"parse_error": parse_error},
        )  # fmt: skip

    env = EnvironmentStep(
        index=1, prev_obs=None, action="", parsed_action=None, next_obs=None, source_agent_step_id=None,
        agent_step_ids=[], reward=1.0,
    )  # fmt: skip
    rollout = Rollout(steps=[agent(-1.0, "env", True), agent(0.25, "internal", True), agent(0.5, "env", False), env])
    assert rollout.total_reward == 0.0
    assert rollout.total_reward_all() == 0.75
    assert rollout.total_reward_for("env") == 1.0 and rollout.total_reward_for(["agent", "env"]) == 0.75


def made_step(index: int, turn: str | None, reward: float = 0.0, **info) -> AgentStep:
    return AgentStep(
        index=index, prompt_messages=[], action="", trace=TokenTrace([1], [2]), reward=reward, turn_id=turn, info=info
    )


def moved(index: int, turn: str | None, reward: float) -> EnvironmentStep:
    return EnvironmentStep(
        index=index, prev_obs=None, action="", parsed_action="", next_obs=None, source_agent_step_id=None,
        agent_step_ids=[], reward=reward, turn_id=turn,
    )  # fmt: skip


def test_turns_group_steps_by_turn_id():
    steps = [
        made_step(0, "a", -0.25),
        made_step(1, "a", -0.5, parse_error=True),
        moved(2, "a", 1.0),
        moved(3, None, 0.125),
        made_step(4, "b"),
        moved(5, None, 0.0),
        moved(6, "b", 2.0),  # others moved in between; it still belongs to its turn
    ]
    rollout = Rollout(steps=steps)
    turns = rollout.turns()
    assert [[step.index for step in turn.steps] for turn in turns] == [[0, 1, 2], [3], [4, 6], [5]]
    assert [turn.number for turn in turns] == [0, 1, 2, 3] and turns[0].last is steps[2]
    assert [turn.reward for turn in turns] == [0.25, 0.125, 2.0, 0.0]
    assert [turn.total_reward for turn in turns] == [0.5, 0.125, 2.0, 0.0]
    assert sum(turn.total_reward for turn in turns) == rollout.total_reward
    assert Rollout().turns() == []


def test_failed_makes_a_rollout_with_a_failure():
    try:
        raise ValueError("the dice fell off the table")
    except ValueError as error:
        rollout = Rollout.failed(error, meta={"env_seed": 3})
    again = Rollout.from_json(rollout.to_json())
    assert again.stop is StopReason.FAILED and again.meta == {"env_seed": 3}
    assert again.failure.error == "ValueError" and "dice" in again.failure.message
    assert "Traceback" in again.failure.traceback


def test_numpy_scalars_in_info_become_plain_numbers():
    rollout = Rollout(meta={"score": np.float32(0.5), "n": np.int64(3)})
    assert json.loads(rollout.to_json())["meta"] == {"score": 0.5, "n": 3}


def test_error_names_a_value_that_is_not_json():
    with pytest.raises(TypeError, match="set"):
        Rollout(meta={"x": {1, 2}}).to_json()


def test_message_views_compare_and_index_like_lists():
    log = [{"role": "user", "content": str(i)} for i in range(5)]
    view = MessageView(log, 3)
    log.append({"role": "user", "content": "later"})
    assert view == log[:3] and len(view) == 3 and view[-1] == log[2] and view[1:] == log[1:3]
    with pytest.raises(IndexError):
        view[3]


# --- failures ---


def test_failure_has_the_traceback_of_user_code():
    def user_code():
        return json.loads("{")

    try:
        user_code()
    except ValueError as error:
        failure = Failure.from_exception(error)
    assert failure.user_traceback.lstrip().startswith('File "') and "in user_code" in failure.user_traceback
    assert "json/decoder.py" in failure.user_traceback, "what the user's code called is below it"
    assert failure.place.startswith("test_rollout.py:") and failure.place.endswith("in user_code")
    assert "Traceback (most recent call last)" in failure.traceback
