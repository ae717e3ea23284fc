"""The dialogue env, and a user simulator as a role: scripted, frozen or trained."""

import pytest

from ludic.agents import Agent
from ludic.batch_gen import RolloutEngine, assign_roles
from ludic.context import FullDialog
from ludic.envs import check_env
from ludic.inference import ByteTemplate, ScriptedClient
from ludic.interaction import Policies
from ludic.parsers import raw_parser
from ludic.types import ConfigError, EnvSpec, InferenceSpec, ProtocolSpec, ReturnSpec, RolloutRequest, StopReason
from ludic_envs.dialogue import ASSISTANT, USER, DialogueEnv

TABLE = {"goal": "a table for four at seven", "answer": "4 19:00", "rules": "Opens at 18:00."}


def said(env, **messages):
    (role,) = env.active_agents
    return env.step({role: messages[role]})


def opened(**settings) -> DialogueEnv:
    env = DialogueEnv(TABLE, **settings)
    env.reset(seed=0)
    return env


@pytest.mark.parametrize("user_reward", ["shared", "opposed", "none"])
async def test_the_env_keeps_the_contract(user_reward):
    await check_env(lambda: DialogueEnv(TABLE, max_turns=3, user_reward=user_reward))


def test_only_the_user_sees_the_goal_and_only_the_assistant_the_rules():
    env = DialogueEnv(TABLE)
    first = env.reset(seed=0)
    assert first.keys() == {USER} and "four at seven" in first[USER][0] and "18:00" not in first[USER][0]
    outcomes = said(env, user="Hello?")
    shown = outcomes[ASSISTANT].obs
    assert shown.endswith("The user writes: Hello?") and "18:00" in shown and "SUBMIT:" in shown
    assert "seven" not in shown and outcomes[USER].obs == ""
    assert said(env, assistant="When?")[USER].obs == "When?"
    assert said(env, user="At seven.")[ASSISTANT].obs == "At seven.", "the instructions are given once"


def test_a_submission_ends_the_dialogue_and_is_graded():
    for result, score in (("4 19:00", 1.0), (" 4   19:00\n", 1.0), ("5 19:00", 0.0), ("", 0.0)):
        env = opened()
        said(env, user="Four at seven.")
        outcomes = said(env, assistant=f"Done. SUBMIT: {result}")
        assert env.active_agents == []
        for role in (USER, ASSISTANT):
            assert outcomes[role].terminated and outcomes[role].reward == score
            assert outcomes[role].info["correct"] is bool(score) and outcomes[role].info["ended_by"] == "submission"


@pytest.mark.parametrize(("user_reward", "won", "lost"), [("shared", 1, 0), ("opposed", 0, 1), ("none", 0, 0)])
def test_the_reward_of_the_user(user_reward, won, lost):
    for result, reward in (("4 19:00", won), ("no", lost)):
        env = opened(user_reward=user_reward)
        said(env, user="Four at seven.")
        assert said(env, assistant=f"SUBMIT: {result}")[USER].reward == reward


def test_a_user_that_stops_too_many_turns_and_a_missing_message_earn_nothing():
    env = opened()
    outcomes = said(env, user=" STOP ")
    assert outcomes[ASSISTANT].terminated and outcomes[ASSISTANT].info["ended_by"] == "user"
    env = opened(max_turns=2)
    for text in ("Hi.", "What?", "A table."):
        outcomes = said(env, user=text, assistant=text)
    outcomes = said(env, assistant="For how many?")
    assert outcomes[USER].truncated and outcomes[USER].info["ended_by"] == "turns"
    env = opened()
    assert env.step({})[ASSISTANT].truncated


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sample": {"goal": "x"}}, "no 'answer'"),
        ({"max_turns": 0}, "max_turns=0"),
        ({"user_reward": "half"}, "shared, opposed and none"),
    ],
)
def test_wrong_settings_are_named(settings, says):
    with pytest.raises(ConfigError, match=says):
        DialogueEnv(**{"sample": TABLE, **settings})


# --- a user simulator as a policy ---


def make_agent(client, name) -> Agent:
    return Agent(client=client, model=name, ctx=FullDialog(), parser=raw_parser, chat_template=ByteTemplate())


def table(user, assistant, **settings) -> RolloutEngine:
    policies = Policies({"simulator": user, "helper": assistant}, make_agent)
    return RolloutEngine(protocol_registry={"talk": policies.protocol}, **settings)


REQUEST = assign_roles(
    RolloutRequest(
        env=EnvSpec("dialogue", {"sample": TABLE}),
        protocol=ProtocolSpec("talk"),
        inference=InferenceSpec(return_=ReturnSpec.for_rl()),
    ),
    {USER: "simulator", ASSISTANT: "helper"},
)


def by_role(rollouts):
    return {rollout.agent_id: rollout for rollout in rollouts}


async def test_two_scripted_agents_talk_until_the_assistant_submits():
    seen = []

    def user(request):
        seen.append(ByteTemplate().decode(request.prompt_token_ids.tolist()))
        return "I need a table." if len(seen) == 1 else "Four, at seven."

    replies = iter(["For how many, and when?", "SUBMIT: 4 19:00"])
    engine = table(ScriptedClient(user), ScriptedClient(lambda request: next(replies)))
    roles = by_role(await engine.generate_rollouts([REQUEST], max_steps=16))
    assert {name: rollout.policy for name, rollout in roles.items()} == {USER: "simulator", ASSISTANT: "helper"}
    assert roles[USER].total_reward == roles[ASSISTANT].total_reward == 1.0
    assert [step.action for step in roles[USER].agent_steps] == ["I need a table.", "Four, at seven."]
    assert roles[ASSISTANT].stop is StopReason.TERMINATED and roles[ASSISTANT].env_steps[-1].info["correct"]
    assert "For how many, and when?" in seen[1] and "\n\nFor how many" not in seen[1], "no blank lines for its own move"
