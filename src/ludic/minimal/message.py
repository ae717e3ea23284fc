"""Chat messages: plain dictionaries in the OpenAI shape, as in all of Ludic."""

from ludic.types import Message, ToolCall

__all__ = ["Message", "ToolCall", "message"]


def message(role: str, content: str) -> Message:
    """`role` is system, user, assistant or tool."""
    return {"role": role, "content": content}
