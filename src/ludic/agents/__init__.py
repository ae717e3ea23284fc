"""Agents: a model with a context, a parser and tools; one call, a tool loop, or a folded history.

`interaction` and `run` import it; it imports `context`, `parsers`, `tools` and `inference`. Start with base_agent.py, then
tool_agent.py.
"""

from typing import TYPE_CHECKING

from ludic.agents.base_agent import Agent, AgentActResult, AgentActStep
from ludic.agents.react_agent import ReActAgent, ReToolAgent
from ludic.agents.tool_agent import CallAgent, ToolAgent, ToolScope
from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.agents.branching_agent import BranchingAgent
    from ludic.agents.folding_agent import FoldingAgent, FoldingReActAgent

__all__ = [
    "Agent", "ToolAgent", "CallAgent", "ReActAgent", "ReToolAgent", "BranchingAgent", "FoldingAgent", "FoldingReActAgent",
    "AgentActStep", "AgentActResult", "ToolScope",
]  # fmt: skip

__getattr__ = lazy(__name__, {"branching_agent": "BranchingAgent", "folding_agent": "FoldingAgent FoldingReActAgent"})
