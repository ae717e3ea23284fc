"""`ReToolAgent`: think, run code, read its output, and answer."""

from collections.abc import Sequence
from typing import Any

from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_agent import ToolLike


class ReToolAgent(ReActAgent):
    """ReAct with a Python sandbox as its tool: at most `max_react_steps` model calls, so one fewer code runs.

    `interpreter` is the tool that runs code; `ludic.tools.python_tool.python_tool(…)` makes one with other limits.
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
        from ludic.tools.python_tool import python_tool  # only this agent needs the sandbox packages

        super().__init__(
            tools=[interpreter or python_tool(), *(tools or ())],
            max_react_steps=max_react_steps,
            final_answer_prompt=final_answer_prompt,
            **agent_kwargs,
        )
