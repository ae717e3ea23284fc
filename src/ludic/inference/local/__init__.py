"""The embedded engine: a policy server in your own process."""

from ludic.inference.local.engine import EngineClosed, LocalEngine, LogitsNotFinite, QueueFull, RequestAborted
from ludic.inference.local.league import League

__all__ = ["LocalEngine", "League", "EngineClosed", "LogitsNotFinite", "QueueFull", "RequestAborted"]
