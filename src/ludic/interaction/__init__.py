"""Interaction protocols: run agents in an environment and record their rollouts.

`batch_gen` and `run` import it; it imports `agents` and `envs`. Start with single_agent.py, then session.py (one agent's episode).
"""

from typing import TYPE_CHECKING

from ludic.interaction.base import (
    RESERVED_INFO_KEYS,
    ExternalToolHandler,
    InteractionProtocol,
    TraceCollector,
    merge_step_info,
    recorded,
    score_or_record,
    split_parser_reward,
)
from ludic.interaction.multi_agent import MultiAgentProtocol, Policies, RoleAssignment, VersionedPolicies
from ludic.interaction.single_agent import SingleAgentProtocol, SingleAgentSyncProtocol
from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic.interaction.delegating import Delegate, DelegatingProtocol, TaskEnv

__all__ = [
    "InteractionProtocol", "SingleAgentProtocol", "SingleAgentSyncProtocol", "MultiAgentProtocol",
    "MultiAgentSyncProtocol", "DelegatingProtocol", "Delegate", "TaskEnv",
    "TraceCollector", "recorded", "score_or_record", "ExternalToolHandler", "merge_step_info", "split_parser_reward",
    "RESERVED_INFO_KEYS", "Policies", "VersionedPolicies", "RoleAssignment",
]  # fmt: skip

MultiAgentSyncProtocol = MultiAgentProtocol

__getattr__ = lazy(__name__, {"delegating": "Delegate DelegatingProtocol TaskEnv"})
