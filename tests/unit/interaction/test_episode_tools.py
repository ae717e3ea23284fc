"""Tools that an env offers for one episode."""

import asyncio

import pytest

from ludic.agents import Agent, ReActAgent
from ludic.batch_gen import stitch_rollout
from ludic.envs import LudicEnv, SingleAgentEnv
from ludic.interaction import MultiAgentProtocol, SingleAgentProtocol
from ludic.types import ConfigError, StepOutcome
from tests.fakes import CountingEnv, RecordingClient, ScriptedClient, make_agent
from tests.unit.agents.test_tool_agents import call


class Vault(SingleAgentEnv):
    """The code is drawn at reset; only the env's own tool can read it."""

    def env_reset(self, *, seed=None):
        self.code = f"code{seed}"
        self.times_read = 0
        return "What is the code?", {}

    def episode_tools(self, agent_id):
        return [self.read]

    def read(self, page: int = 1) -> str:
        """Read the note."""
        self.times_read += 1
        if page != 1:
            raise LookupError(f"there is no page {page}")
        return self.code

    def env_step(self, action):
        return StepOutcome("", float(action == self.code), terminated=True, info={"times_read": self.times_read})


async def play(agent, env=None, seed=7):
    (rollout,) = await SingleAgentProtocol(agent).run(env=env or Vault(), max_steps=1, env_seed=seed)
    return rollout


async def test_prompt_contains_the_tool_and_the_trace_has_the_same_tokens():
    client = RecordingClient(ScriptedClient([call("read"), "<a>code7</a>"]))
    rollout = await play(make_agent(client, cls=ReActAgent))
    (first, sampled), (second, answer) = client.calls
    assert b'"name": "read"' in bytes(token for token in first if token < 256)
    assert second[: len(first) + len(sampled)] == first + sampled
    (item,) = stitch_rollout(rollout, {(rollout.id, step.index): 1.0 for step in rollout.steps})
    assert item.input_ids.tolist() == second + answer


async def test_tool_errors_are_reported_to_the_model():
    replies = [call("read", page=9), call("read", page="one"), call("raed"), "<a>code7</a>"]
    rollout = await play(make_agent(replies, cls=ReActAgent))
    failed, wrong, unknown = (step.tool_results[0]["content"] for step in rollout.agent_steps[:3])
    assert "there is no page 9" in failed and "argument 'page'" in wrong and "Available tools: read" in unknown
    assert rollout.env_steps[0].info["times_read"] == 1


async def test_an_agent_without_tool_calls_refuses_episode_tools():
    with pytest.raises(ConfigError, match="Use an agent that can: ToolAgent or ReActAgent"):
        await play(make_agent(["<a>code7</a>"], cls=Agent))


async def test_tools_of_one_episode_are_removed_in_the_next():
    agent = make_agent([call("read"), "<a>code7</a>", call("read"), "<a>code8</a>", "<a>inc</a>"], cls=ReActAgent)
    assert (await play(agent, seed=7)).env_steps[0].reward_components["env"] == 1.0
    assert (await play(agent, seed=8)).env_steps[0].reward_components["env"] == 1.0, "each env has its own note"
    await play(agent, env=CountingEnv(1))
    assert agent.tool_schemas == [] and agent.tool_map == {}


class SlowVault(Vault):
    """Both episodes begin before either of them sits down."""

    async def async_env_reset(self, *, seed=None):
        await asyncio.sleep(0)
        return self.env_reset(seed=seed)


async def test_a_busy_agent_keeps_its_tools_when_another_episode_requests_it():
    agent = make_agent([call("read"), "<a>code7</a>"], cls=ReActAgent)
    plays = [play(agent, SlowVault(), seed) for seed in (7, 8)]
    first, second = await asyncio.gather(*plays, return_exceptions=True)
    assert isinstance(second, ConfigError)
    assert (
        first.agent_steps[0].tool_results[0]["content"] == "code7"
        and first.env_steps[0].reward_components["env"] == 1.0
    )


async def test_two_tools_of_one_name_are_refused():
    def read() -> str:
        """Read another note."""
        return ""

    with pytest.raises(ConfigError, match="Two tools share a name"):
        await play(make_agent(["<a>x</a>"], cls=ReActAgent, tools=[read]))


class TwoRooms(LudicEnv):
    """Only the one in the library can look things up."""

    agent_ids = ("library", "street")
    active_agents = ()

    def reset(self, *, seed=None):
        self.active_agents = list(self.agent_ids)
        return {agent_id: ("go", {}) for agent_id in self.agent_ids}

    def episode_tools(self, agent_id):
        return [self.look_up] if agent_id == "library" else []

    def look_up(self) -> str:
        """Look it up."""
        return "found"

    def step(self, actions):
        self.active_agents = []
        return {agent_id: StepOutcome("", 0.0, terminated=True) for agent_id in self.agent_ids}


async def test_each_agent_id_has_its_own_tools():
    agents = {
        "library": make_agent([call("look_up"), "<a>x</a>"], cls=ReActAgent),
        "street": make_agent([call("look_up"), "<a>x</a>"], cls=ReActAgent),
    }
    library, street = await MultiAgentProtocol(agents).run(env=TwoRooms(), max_steps=1)
    assert library.agent_steps[0].tool_results[0]["content"] == "found"
    assert street.agent_steps[0].action_target == "env" and street.agent_steps[0].info["parse_error"]
