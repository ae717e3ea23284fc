"""Contexts hold an agent's transcript and choose the messages of the next prompt.

They deal in messages only; the chat template turns messages into tokens.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ludic.types import ChatResponse, Info, Message, Observation, ToolCall
from ludic.types.messages import joined


class ContextStrategy(ABC):
    """A transcript and the rule that makes a prompt from it.

    Messages are never changed in place. While a context only appends, the next prompt is the stored tokens plus the new
    messages; if it rewrites messages that were already sent, a new token segment starts.
    """

    rewrites_history: ClassVar[bool] = False
    """True if `on_before_act` may change messages that were already sent. The agent raises ContextError for a context that does
    so without declaring it."""
    supports_tools: ClassVar[bool] = True

    def __init__(self, system_prompt: str | None = None) -> None:
        self._default_system_prompt = system_prompt
        self._messages: list[Message] = []
        self.reset()

    @property
    def default_system_prompt(self) -> str | None:
        return self._default_system_prompt

    @property
    def messages(self) -> list[Message]:
        """The whole transcript, as a copy."""
        return list(self._messages)

    def reset(self, *, system_prompt: str | None = None) -> None:
        """Clear the transcript and start with the given system prompt, by default with `default_system_prompt`."""
        self._messages = []
        prompt = self._default_system_prompt if system_prompt is None else system_prompt
        if prompt is not None:
            self._append({"role": "system", "content": prompt})

    # --- called by the agent ---

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        self._append({"role": "user", "content": obs})

    @abstractmethod
    def on_before_act(self) -> list[Message]:
        """The messages of the next prompt."""

    def on_after_act(self, response: ChatResponse) -> None:
        self.add_assistant_step(response.text)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        if self._messages and self._messages[-1]["role"] == "tool":
            self.add_note(obs)  # the turn ended on a tool result without a reply
        else:
            self._append({"role": "user", "content": obs})

    def add_assistant_step(self, content: str, tool_calls: Sequence[ToolCall] | None = None) -> None:
        message: Message = {"role": "assistant", "content": content}
        if tool_calls:
            message["tool_calls"] = list(tool_calls)
        self._append(message)

    def add_tool_result(self, tool_call_id: str, tool_name: str, result: Any) -> None:
        content = result if isinstance(result, str) else str(result)
        self._append({"role": "tool", "tool_call_id": tool_call_id, "name": tool_name, "content": content})

    def add_note(self, text: Observation) -> None:
        """Add text, or texts and pictures, to the next prompt. It is appended to a pending observation or tool result, because
        many chat templates reject two user messages in a row, or a user message after a tool message."""
        if self._messages and self._messages[-1]["role"] in ("user", "tool"):
            last = self._messages.pop()
            self._append({**last, "content": joined([last["content"], text])})
        else:
            self._append({"role": "user", "content": text})

    def rewind(self, num_messages: int) -> None:
        """Forget all but the first `num_messages` messages (`BranchingAgent`)."""
        self._messages = self._messages[:num_messages]

    def _append(self, message: Message) -> None:
        self._messages.append(message)


class FullDialog(ContextStrategy):
    """The whole transcript: observations are user messages, replies are assistant messages."""

    def on_before_act(self) -> list[Message]:
        return list(self._messages)
