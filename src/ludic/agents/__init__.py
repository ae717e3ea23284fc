"""Agents: a model with memory, parser and tools."""

from ludic.agents.act import AgentActResult, AgentActStep
from ludic.agents.base_agent import Agent
from ludic.agents.folding_agent import FoldingAgent, FoldingReActAgent
from ludic.agents.react_agent import ReActAgent
from ludic.agents.retool_agent import ReToolAgent
from ludic.agents.tool_agent import ToolAgent, ToolScope

__all__ = [
    "Agent",
    "ToolAgent",
    "ReActAgent",
    "ReToolAgent",
    "FoldingAgent",
    "FoldingReActAgent",
    "AgentActStep",
    "AgentActResult",
    "ToolScope",
]
