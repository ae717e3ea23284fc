"""`ReActAgent`: [think, call a tool]* and then act, within a limited number of model calls; `ReToolAgent`: its tool runs code."""

from collections.abc import Sequence
from typing import Any

from ludic import registry
from ludic.agents.tool_agent import ToolAgent, ToolLike
from ludic.types import ConfigError


class ReActAgent(ToolAgent):
    """At most `max_react_steps` model calls per turn; before the last one the agent asks for the final answer.

    That request is appended as a message and kept, so that the tokens already sent (with the tool schemas) do not change. The
    reply is the action, even if it contains a tool call.
    """

    name = "react_agent"

    def __init__(
        self,
        *,
        tools: Sequence[ToolLike] | None = None,
        external_tools: Sequence[ToolLike] | None = None,
        max_react_steps: int = 5,
        final_answer_prompt: str = "You have no tool calls left. Give your final answer now.",
        **agent_kwargs: Any,
    ) -> None:
        if max_react_steps < 1:
            raise ConfigError(f"max_react_steps={max_react_steps}; a turn needs at least one model call.")
        ctx = agent_kwargs.get("ctx")
        if ctx is not None and not ctx.supports_tools:
            raise TypeError(f"{type(ctx).__name__} does not support tools (supports_tools is False).")
        super().__init__(tools=tools, external_tools=external_tools, max_model_calls=max_react_steps, **agent_kwargs)
        self.max_react_steps = max_react_steps
        self.final_answer_prompt = final_answer_prompt

    def _before_last_call(self) -> None:
        self.ctx.add_note(self.final_answer_prompt)


class ReToolAgent(ReActAgent):
    """ReAct with a Python sandbox as its tool: at most `max_react_steps` model calls, so one fewer code runs.

    `interpreter` is the tool that runs code; `ludic_sandbox.python_tool.python_tool(…)` makes one with other limits.
    """

    name = "retool_agent"

    def __init__(
        self,
        *,
        interpreter: ToolLike | None = None,
        tools: Sequence[ToolLike] | None = None,
        max_react_steps: int = 8,
        final_answer_prompt: str = "You cannot run any more code. Give your final answer now.",
        **agent_kwargs: Any,
    ) -> None:
        super().__init__(
            tools=[interpreter or registry.tools.make("python"), *(tools or ())],
            max_react_steps=max_react_steps,
            final_answer_prompt=final_answer_prompt,
            **agent_kwargs,
        )
