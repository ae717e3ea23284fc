"""The embedded engine: serves a policy from your own process, on the trainer's weights.

`run`, `eval` and examples import it; it is the one part of `inference` that loads torch. Start with engine.py (what
callers use), then worker.py (the thread that steps the model) and scheduler.py; backends.py chooses the runner, such as cpu.py.
"""

from ludic.inference.local.engine import LocalEngine
from ludic.inference.local.sequence import LogitsNotFinite, RequestAborted
from ludic.inference.local.snapshot import League
from ludic.types import EngineClosed, QueueFull

__all__ = ["LocalEngine", "League", "EngineClosed", "LogitsNotFinite", "QueueFull", "RequestAborted"]
