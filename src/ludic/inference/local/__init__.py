"""The embedded engine: a policy server in your own process."""

from ludic.inference.local.engine import EngineClosed, LocalEngine, QueueFull, RequestAborted

__all__ = ["LocalEngine", "EngineClosed", "QueueFull", "RequestAborted"]
