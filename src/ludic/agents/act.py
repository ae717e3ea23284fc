"""The result of an agent's turn: one record per model call."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ludic.parsers import ParseResult
from ludic.types import ActionTarget, Info, MessageView, TokenTrace, ToolCall


@dataclass(kw_only=True, slots=True)
class AgentActStep:
    """One model call."""

    prompt_messages: MessageView
    action: str
    """Raw text of the reply."""
    trace: TokenTrace
    parse_result: ParseResult | None
    """Result of the action parser; None for calls that are not meant for the env."""
    action_target: ActionTarget = "env"
    loop_index: int = 0
    info: Info = field(default_factory=dict)
    tool_calls: Sequence[ToolCall] | None = None
    tool_results: Sequence[dict[str, Any]] | None = None


@dataclass(slots=True)
class AgentActResult:
    """All steps of one `act`, in order."""

    steps: list[AgentActStep]

    @property
    def final_step(self) -> AgentActStep:
        return self.steps[-1]
