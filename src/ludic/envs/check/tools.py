"""The tools of an env, called as `check_env` needs it: all of them with generated arguments, or those that a reference names."""

import contextlib
import json
import random
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ludic.envs.check.report import failed
from ludic.envs.env import LudicEnv
from ludic.tools.schema import BadArguments, read_arguments
from ludic.tools.tool import Tool, as_tool

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MAX_CALLS = 200
_NUM_TRIED = 20
_MISTAKES = (ArithmeticError, AssertionError, AttributeError, ImportError, NameError, TimeoutError, TypeError)
"""Errors that a tool raises by mistake; a ValueError, LookupError or OSError may be its answer to the model."""


def tools_of(env: LudicEnv[Any, Any, Any], agent_id: str) -> dict[str, Tool]:
    tools = list(env.episode_tools(agent_id))
    for tool in tools:
        if not callable(tool):
            raise failed(env, f"episode_tools({agent_id!r}) holds {tool!r:.60}, which cannot be called.")
    return {tool.name: tool for tool in map(as_tool, tools)}


async def try_tools(env: LudicEnv[Any, Any, Any], agent_id: str, rng: random.Random) -> list[str]:
    """The answer of each tool to one call, with arguments that follow its schema."""
    answers = []
    for tool in tools_of(env, agent_id).values():
        arguments = _accepted(tool, rng)
        if arguments is None:
            why = "none of the generated arguments fits its schema. Call it in a test of your own"
            warnings.warn(f"{type(env).__name__}: the tool {tool.name} was not checked: {why}.", stacklevel=2)
            continue
        result = await tool.call(arguments)
        if result.raised is not None and issubclass(result.raised, _MISTAKES):
            what = f"{result.content.splitlines()[0].removeprefix('Error: ')} (arguments: {arguments})"
            raise failed(env, f"the tool {what}. Let it return what is wrong, or raise ValueError.")
        answers.append(result.content)
    return answers


def _accepted(tool: Tool, rng: random.Random) -> dict[str, Any] | None:
    """Arguments that reach the tool; a schema may ask for more than `_example` knows, such as a pattern."""
    for _ in range(_NUM_TRIED):
        with contextlib.suppress(BadArguments):
            read_arguments(arguments := _example(tool.parameters, rng), tool.parameters, tool.types)
            return dict(arguments)
    return None


_EDGES = {"integer": (0, 1, 7), "number": (0.0, 1.0, -2.5), "boolean": (True, False), "null": (None,)}


def _example(schema: Mapping[str, Any], rng: random.Random) -> Any:
    """A value of the schema's type; often an edge case, such as 0 and an empty text."""
    match schema:
        case {"enum": values}:
            return rng.choice(values)
        case {"anyOf": schemas} | {"oneOf": schemas}:
            return _example(rng.choice(schemas), rng)
        case {"type": "object"}:
            return {name: _example(sub, rng) for name, sub in schema.get("properties", {}).items()}
        case {"prefixItems": schemas}:
            return [_example(one, rng) for one in schemas]
        case {"type": "array"}:
            return [_example(one, rng) for one in [schema.get("items") or {}] * rng.randrange(3)]
    return rng.choice(_EDGES.get(str(schema.get("type")), ("", "a", "7")))


async def reply_of(env: LudicEnv[Any, Any, Any], agent_id: str, choose: Callable[[], str]) -> str:
    """The next action. Where a reference replies with tool calls instead, they are made, and it is asked again."""
    for _ in range(_MAX_CALLS):
        reply = choose()
        if not (calls := [json.loads(call) for call in _CALL.findall(reply)]):
            return reply
        tools = tools_of(env, agent_id)
        for call in calls:
            if call["name"] not in tools:
                raise failed(
                    env, f"the reference calls the tool {call['name']!r}; there are {', '.join(tools) or 'none'}."
                )
            await tools[call["name"]].call(call.get("arguments"))
    raise failed(env, f"reference_action({agent_id!r}) called tools {_MAX_CALLS} times in a row and named no action.")
