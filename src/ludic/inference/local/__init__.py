"""The embedded engine: serves a policy from your own process, on the trainer's weights.

`run`, `eval` and examples import it; it is the one part of `inference` that loads torch. Start with engine.py (what
callers use), then worker.py (the thread that steps the model) and scheduler.py; backends.py chooses the runner, such as cpu.py.
"""

from typing import TYPE_CHECKING

from ludic.inference.local.engine import LocalEngine
from ludic.inference.local.sequence import LogitsNotFinite, RequestAborted
from ludic.plugins import lazy
from ludic.types import EngineClosed, QueueFull

if TYPE_CHECKING:
    from ludic.inference.local.snapshot import League

__all__ = ["LocalEngine", "League", "EngineClosed", "LogitsNotFinite", "QueueFull", "RequestAborted"]

__getattr__ = lazy(__name__, {"snapshot": "League"})
