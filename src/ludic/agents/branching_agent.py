"""`BranchingAgent`: does sub-tasks in branches of its context and forgets a branch when it returns (FoldGRPO, arXiv 2510.11967).

The model calls `branch(task)` and works on, with everything before in view; `return_result(result)` takes the context back to
the call of `branch`, whose tool result is then the result. Tokens before the branch stay as they were sampled, so all samples
of an episode are paths of one token tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludic.agents.base_agent import AgentActStep, ModelCall
from ludic.agents.react_agent import ReActAgent
from ludic.agents.tool_agent import ToolLike
from ludic.inference.templates.chat import ToolParseResult
from ludic.inference.templates.conversation import Conversation
from ludic.types import ConfigError, ToolCall

BRANCH, RETURN = "branch", "return_result"


@dataclass(frozen=True, slots=True)
class _Mark:
    """Start of a branch: after the reply that calls it."""

    call_id: str
    num_messages: int
    conversation: Conversation


class BranchingAgent(ReActAgent):
    """ReActAgent with `branch` and `return_result`. Branches do not nest; one may last over several turns of the env."""

    name = "branching_agent"

    def __init__(
        self,
        *,
        tools: Sequence[ToolLike] | None = None,
        max_react_steps: int = 32,
        max_branches: int = 8,
        **agent_kwargs: Any,
    ) -> None:
        """`max_branches`: of an episode."""
        if max_branches < 1:
            raise ConfigError(f"BranchingAgent(max_branches={max_branches}): it must be at least 1.")
        ctx = agent_kwargs.get("ctx")
        if ctx is not None and ctx.rewrites_history:
            raise ConfigError(
                f"BranchingAgent goes back to earlier messages, which {type(ctx).__name__} rewrites. Give it ctx=FullDialog()."
            )
        self.max_branches = max_branches
        self._calls: list[ToolCall] = []
        self._forget_branches()

        def branch(task: str) -> str:
            """Work on a sub-task in a branch. All of it is forgotten when it returns, but for its result. Call it alone."""
            return self._start_branch(task)

        def return_result(result: str) -> str:
            """End the branch: only the result is kept. Call it alone."""
            return self._end_branch(result)

        super().__init__(tools=[branch, return_result, *(tools or ())], max_react_steps=max_react_steps, **agent_kwargs)

    def _forget_branches(self) -> None:
        self._mark: _Mark | None = None
        self._open: _Mark | None = None
        self._result: str | None = None
        self._num_branches = 0

    def reset(self, system_prompt: str | None = None) -> None:
        super().reset(system_prompt)
        self._forget_branches()

    # --- the tools ---

    def _start_branch(self, task: str) -> str:
        if self._open is not None:
            return f"Error: you are in a branch already. Finish it with {RETURN}."
        if self._num_branches >= self.max_branches:
            return f"Error: all {self.max_branches} branches are used. Go on without."
        if len(self._calls) > 1:
            return f"Error: call {BRANCH} alone."
        self._num_branches += 1
        self._open = self._mark
        return f"You are in a branch now, for this task alone: {task}\nEnd it with {RETURN}."

    def _end_branch(self, result: str) -> str:
        if self._open is None:
            return "Error: there is no branch to return from."
        if len(self._calls) > 1:
            return f"Error: call {RETURN} alone."
        self._result = result
        return ""

    # --- the loop ---

    def _remember_calls(self, call: ModelCall, parsed: ToolParseResult) -> list[ToolCall]:
        self._calls = super()._remember_calls(call, parsed)
        self._mark = _Mark(self._calls[0]["id"], len(self.ctx.messages), self._conversation.copy())
        return self._calls

    async def _step_of(self, call: ModelCall, loop_index: int, is_last: bool) -> AgentActStep:
        was_in_branch = self._open is not None
        step = await super()._step_of(call, loop_index, is_last)
        if was_in_branch:
            step.info["branch"] = self._num_branches
        if self._open is not None and self._result is not None:
            self.ctx.rewind(self._open.num_messages)
            self._conversation = self._open.conversation
            self.add_tool_result(self._open.call_id, BRANCH, self._result)
            self._open = self._result = None
        return step
