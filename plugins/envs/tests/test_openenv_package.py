"""Against the package `openenv`: our client with its server.

It brings Gradio and pandas (92 MB of wheels) and an older `mcp` than ours, so it is not in the test environment. By hand: a virtual
environment with `pip install openenv` and Ludic, then `python -m pytest plugins/envs/tests/test_openenv_package.py`.
"""

import asyncio
import contextlib
import random
import socket
import threading

import pytest

pytest.importorskip("openenv", reason="the package openenv is not installed (92 MB; see the top of this file)")

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from pydantic import Field

from ludic.envs import check_env
from ludic.tools import Tool
from ludic_envs.adapters.openenv import OpenEnvEnv, OpenEnvError

pytestmark = pytest.mark.integration


class GuessAction(Action):
    number: int = Field(ge=1, le=8, description="the guess")


class GuessObservation(Observation):
    hint: str
    num_guesses: int = 0


class GuessState(State):
    secret: int = 0


class Guess(Environment):
    """A number from 1 to 8; a hint after each guess; four guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = GuessState()

    def reset(self, seed=None, episode_id=None, highest=8, **kwargs):
        self._state = GuessState(episode_id=episode_id, secret=random.Random(seed).randint(1, highest))
        return GuessObservation(hint="A number from 1 to 8?")

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.number == 7:
            raise RuntimeError("seven is broken")
        found = action.number == self._state.secret
        hint = "found" if found else "higher" if action.number < self._state.secret else "lower"
        over = found or self._state.step_count == 4
        return GuessObservation(hint=hint, num_guesses=self._state.step_count, reward=float(found), done=over)

    @property
    def state(self):
        return self._state


class Calculator(MCPEnvironment):
    """Tools for sums; a call of `submit` with 42 earns 1 and ends the episode."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("calculator")

        @server.tool
        def add(a: int, b: int = 1) -> int:
            """The sum of two numbers."""
            return a + b

        @server.tool
        def submit(answer: int) -> str:
            """Hand in the answer."""
            return "right" if answer == 42 else "wrong"

        super().__init__(server)
        self._state = State()

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state = State(episode_id=episode_id)
        return Observation(metadata={"task": "make 42"})

    def _step_impl(self, action, timeout_s=None, **kwargs):
        return Observation(done=False, reward=0.0)

    async def step_async(self, action, timeout_s=None, **kwargs):
        seen = await super().step_async(action, timeout_s=timeout_s, **kwargs)
        self._state.step_count += 1
        if isinstance(seen, CallToolObservation) and seen.tool_name == "submit":
            right = action.arguments.get("answer") == 42
            seen = seen.model_copy(update={"reward": float(right), "done": right})
        return seen

    @property
    def state(self):
        return self._state


@contextlib.contextmanager
def served(app):
    """OpenEnv's application in a thread, on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}"
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="module")
def guess():
    app = create_fastapi_app(Guess, GuessAction, GuessObservation, max_concurrent_envs=8, state_cls=GuessState)
    with served(app) as url:
        yield url


@pytest.fixture(scope="module")
def calculator():
    app = create_fastapi_app(Calculator, CallToolAction, CallToolObservation, max_concurrent_envs=8)
    with served(app) as url:
        yield url


# --- our client, its server ---


async def test_an_env_of_openenv_keeps_the_contract(guess):
    await check_env(lambda: OpenEnvEnv(guess, on_error="observe"), max_steps=10)


async def test_typed_actions_rewards_and_state_arrive(guess):
    env = OpenEnvEnv(guess, observation_field="hint", reset_args={"episode_id": "mine"})
    await env.async_reset(seed=3)
    secret = (await env.state())["secret"]
    assert env.legal_actions("agent_0") == [str(number) for number in range(1, 9)]
    assert "integer from 1 to 8, the guess" in env.suggested_sysprompt
    wrong = (await env.async_step({"agent_0": str(secret % 6 + 1)}))["agent_0"]
    assert wrong.obs in ("higher", "lower") and wrong.reward == 0.0
    assert (await env.async_step({"agent_0": "many"}))["agent_0"].info["illegal_move"]
    refused = (await env.async_step({"agent_0": "99"}))["agent_0"]
    assert refused.info["illegal_move"] and "less than or equal to 8" in refused.obs
    assert (await env.state()) == {"episode_id": "mine", "step_count": 1, "secret": secret}
    right = (await env.async_step({"agent_0": str(secret)}))["agent_0"]
    assert (right.obs, right.reward, right.terminated) == ("found", 1.0, True)
    await env.async_close()


async def test_a_full_server_is_waited_for():
    with served(create_fastapi_app(Guess, GuessAction, GuessObservation)) as url:  # one session

        async def episode(seed):
            env = OpenEnvEnv(url, wait_s=30)
            await env.async_reset(seed=seed)
            await asyncio.sleep(0)
            await env.async_close()

        await asyncio.gather(*(episode(seed) for seed in range(4)))
        first = OpenEnvEnv(url)
        await first.async_reset(seed=0)
        with pytest.raises(OpenEnvError, match="max_concurrent_envs"):
            await OpenEnvEnv(url, wait_s=0.1).async_reset(seed=1)
        await first.async_close()


async def test_mcp_tools_are_the_tools_of_the_episode_and_earn_rewards(calculator):
    env = OpenEnvEnv(calculator, tools=True)
    await env.async_reset(seed=0)
    tools = {tool.name: tool for tool in map(Tool.from_callable, env.episode_tools("agent_0"))}
    assert tools["add"].parameters["required"] == ["a"]
    assert (await tools["add"].call({"a": 40, "b": 2})).content == "42"
    assert (await tools["submit"].call({"answer": 42})).content == "right"
    end = (await env.async_step({"agent_0": "I have handed it in."}))["agent_0"]
    assert (end.reward, end.terminated) == (1.0, True)
    await env.async_close()
