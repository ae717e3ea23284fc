"""The python tool and the agent that thinks with it, on the real sandbox."""

import json

import pytest

from ludic import registry
from ludic.agents import ReToolAgent
from ludic.envs.gsm8k import GSM8KEnv
from ludic.interaction import SingleAgentProtocol
from ludic.tools import as_tool
from ludic.types import ConfigError
from ludic_sandbox.bubblewrap import bubblewrap_problem
from ludic_sandbox.python_tool import python, python_tool
from tests.fakes import make_agent

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(bool(bubblewrap_problem()), reason=bubblewrap_problem()),
]


def call(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


@pytest.mark.parametrize(
    ("code", "content", "is_error"),
    [
        ("print(6 * 7)", "42", False),
        ("x = 1", "The program printed nothing. Print what you want to see.", False),
        ("print(1)\n1 / 0", "ZeroDivisionError: division by zero\nError: the program ended with exit code 1.", True),
        ("def (", "Error: the program does not compile: invalid syntax in line 1.", True),
        ("x = bytearray(10**9)", "Error: the program ran out of memory.", True),
        ("print('a' * 5000 + 'b')", "… 1001 characters left out …", False),
        (
            "import socket\nsocket.create_connection(('1.1.1.1', 80))",
            "Error: the program ended with exit code 1.",
            True,
        ),
    ],
)
async def test_the_tool_tells_what_a_program_printed_and_how_it_ended(code, content, is_error):
    result = await as_tool(registry.tools.make("python")).call({"code": code})
    assert content in result.content and result.is_error is is_error


async def test_the_time_of_a_program_is_limited():
    result = await python_tool(timeout_s=0.5).call({"code": "while True: pass"})
    assert result.content == "Error: the program ran out of time." and result.is_error


def test_the_schema_is_the_same_with_limits_of_one_s_own():
    assert python_tool(timeout_s=3.0).schema == as_tool(python).schema
    assert as_tool(python).schema["function"]["parameters"]["required"] == ["code"]
    with pytest.raises(ConfigError, match="above 0"):
        python_tool(timeout_s=0)


async def test_a_retool_agent_runs_code_reads_its_output_and_answers():
    sample = {"question": "What is 12 * 9 / 2?", "answer": "#### 54"}
    agent = make_agent([f"I compute. {call('print(12 * 9 // 2)')}", "<a>54</a>"], cls=ReToolAgent)
    (rollout,) = await SingleAgentProtocol(agent).run(env=GSM8KEnv(sample), max_steps=1, env_seed=0)
    tool_step, answer = rollout.agent_steps
    assert tool_step.tool_results[0]["content"] == "54" and not tool_step.tool_results[0]["is_error"]
    assert ("tool", "54") in [(m["role"], m["content"]) for m in answer.prompt_messages]
    assert rollout.env_steps[-1].info["correct"]


async def test_a_retool_agent_must_answer_when_its_runs_are_used_up():
    agent = make_agent([call("print(1)"), call("print(2)")], cls=ReToolAgent, max_react_steps=2)
    agent.reset()
    agent.on_env_reset("obs", {})
    _, final = (await agent.act()).steps
    assert final.action_target == "env" and "cannot run any more code" in final.prompt_messages[-1]["content"]


def test_it_takes_other_tools_and_another_interpreter():
    agent = make_agent(
        ["x"], cls=ReToolAgent, interpreter=python_tool(timeout_s=1.0), tools=[registry.tools.make("calculator")]
    )
    assert list(agent.tool_map) == ["python", "calculator"]
