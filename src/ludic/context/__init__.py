"""Contexts: what the agent remembers and what the model is shown of it."""

from ludic.context.base import ContextStrategy
from ludic.context.full_dialog import FullDialog
from ludic.context.sliding_window import SlidingWindow
from ludic.context.summarised import SummarisedDialog
from ludic.context.truncated_thinking import TruncatedThinkingContext

__all__ = ["ContextStrategy", "FullDialog", "TruncatedThinkingContext", "SlidingWindow", "SummarisedDialog"]
