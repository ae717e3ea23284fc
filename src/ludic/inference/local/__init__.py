"""The embedded engine: serves a policy from your own process, on the trainer's weights.

`run`, `eval` and examples import it; it is the one part of `inference` that loads torch. Start with engine.py, then scheduler.py.
"""

from ludic.inference.local.engine import EngineClosed, LocalEngine, LogitsNotFinite, QueueFull, RequestAborted
from ludic.inference.local.snapshot import League

__all__ = ["LocalEngine", "League", "EngineClosed", "LogitsNotFinite", "QueueFull", "RequestAborted"]
