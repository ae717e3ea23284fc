"""The gateway: an unchanged agent talks to a model API over HTTP, and every call becomes part of a rollout.

Loads without torch. Start with forest.py (where a
request continues), then session.py, server.py and wire/ (one file per API dialect). protocol.py plays episodes with agents.py's
functions and commands; training.py has `train` and `evaluate`, which do all of it in one call; online.py
makes batches of sessions that agents outside have finished.
"""

from typing import TYPE_CHECKING

from ludic.plugins import lazy

if TYPE_CHECKING:
    from ludic_serve.gateway.agents import AgentCommand, AgentFunction
    from ludic_serve.gateway.online import SessionBatchSource
    from ludic_serve.gateway.protocol import GatewayProtocol
    from ludic_serve.gateway.server import Gateway
    from ludic_serve.gateway.session import Policy, Session, SessionLimits
    from ludic_serve.gateway.threads import session_rollouts
    from ludic_serve.gateway.training import evaluate, train

__all__ = [
    "AgentCommand", "AgentFunction", "Gateway", "GatewayProtocol", "Policy", "Session", "SessionBatchSource", "SessionLimits",
    "evaluate", "session_rollouts", "train",
]  # fmt: skip

__getattr__ = lazy(  # the server needs aiohttp, and `train` torch
    __name__,
    {
        "agents": "AgentCommand AgentFunction",
        "server": "Gateway",
        "protocol": "GatewayProtocol",
        "session": "Policy Session SessionLimits",
        "online": "SessionBatchSource",
        "threads": "session_rollouts",
        "training": "evaluate train",
    },
)
