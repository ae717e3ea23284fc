"""The gateway: an unchanged agent talks to a model API over HTTP, and every call becomes part of a rollout.

`run` and `cli` import it; it imports interaction, inference and what is below. Loads without torch. Start with forest.py (where a
request continues), then session.py, server.py and wire/ (one file per API dialect). protocol.py plays episodes with agents.py's
functions and commands; training.py has `train` and `evaluate`, the short way to all of it; online.py
makes batches of sessions that agents outside have finished.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ludic.gateway.agents import AgentCommand, AgentFunction
    from ludic.gateway.online import SessionBatchSource
    from ludic.gateway.protocol import GatewayProtocol
    from ludic.gateway.server import Gateway
    from ludic.gateway.session import Policy, Session, SessionLimits
    from ludic.gateway.threads import session_rollouts
    from ludic.gateway.training import evaluate, train

__all__ = [
    "AgentCommand", "AgentFunction", "Gateway", "GatewayProtocol", "Policy", "Session", "SessionBatchSource", "SessionLimits",
    "evaluate", "session_rollouts", "train",
]  # fmt: skip

_MODULES = {
    "AgentCommand": "agents", "AgentFunction": "agents", "Gateway": "server", "GatewayProtocol": "protocol", "Policy": "session",
    "Session": "session", "SessionBatchSource": "online", "SessionLimits": "session", "evaluate": "training",
    "session_rollouts": "threads", "train": "training",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Names are loaded when they are used: the server needs aiohttp, and `train` torch."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ludic.gateway.{_MODULES[name]}"), name)
