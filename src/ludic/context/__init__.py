"""Contexts: the agent's transcript, and the part of it that goes into the prompt.

`agents` imports it; it imports nothing but `types`. Start with base.py.
"""

from ludic.context.base import ContextStrategy, FullDialog
from ludic.context.windows import SlidingWindow, SummarisedDialog, TruncatedThinkingContext

__all__ = ["ContextStrategy", "FullDialog", "TruncatedThinkingContext", "SlidingWindow", "SummarisedDialog"]
