"""Messages: the chat protocol. Envs read and write them; they know nothing of tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str
    """JSON, as the model wrote it."""


@dataclass(frozen=True, slots=True)
class Message:
    role: str
    """system, user, assistant or tool."""
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """The call that a tool's message answers."""
    name: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The message in OpenAI's shape, which chat templates take."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            functions = ((call.id, {"name": call.name, "arguments": call.arguments}) for call in self.tool_calls)
            message["tool_calls"] = [{"id": id, "type": "function", "function": function} for id, function in functions]
        optional = {"tool_call_id": self.tool_call_id, "name": self.name}
        return message | {key: value for key, value in optional.items() if value is not None}

    @classmethod
    def from_dict(cls, message: Mapping[str, Any]) -> "Message":
        calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
        return cls(
            message["role"],
            str(message["content"]),
            tuple(ToolCall(id, function["name"], function["arguments"]) for id, function in calls),
            message.get("tool_call_id"),
            message.get("name"),
        )
