"""Agents: a model with a context, a parser and tools; one call, a tool loop, or a folded history.

`interaction` and `run` import it; it imports `context`, `parsers`, `tools` and `inference`. Start with base_agent.py, then
tool_agent.py.
"""

from ludic.agents.base_agent import Agent, AgentActResult, AgentActStep
from ludic.agents.branching_agent import BranchingAgent
from ludic.agents.folding_agent import FoldingAgent, FoldingReActAgent
from ludic.agents.react_agent import ReActAgent, ReToolAgent
from ludic.agents.tool_agent import CallAgent, ToolAgent, ToolScope

__all__ = [
    "Agent", "ToolAgent", "CallAgent", "ReActAgent", "ReToolAgent", "BranchingAgent", "FoldingAgent", "FoldingReActAgent",
    "AgentActStep", "AgentActResult", "ToolScope",
]  # fmt: skip
