"""What an agent remembers, and which part of it the model is shown.

A context owns the transcript. It deals in messages only; turning them into tokens is the chat template's job.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from ludic.types import ChatResponse, Info, Message, Observation, ToolCall


class ContextStrategy(ABC):
    """Transcript plus the rule that makes a prompt of it.

    Messages are never changed in place. While a context only appends, the next prompt is the stored tokens plus
    what is new; where it rewrites what was already shown, a new token segment starts.
    """

    rewrites_history: ClassVar[bool] = False
    """True when `on_before_act` may show earlier messages differently from the call before. A context that does
    so without declaring it is refused."""
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
        """Forget everything; begin with the given system prompt, else the default one, else none."""
        self._messages = []
        prompt = self._default_system_prompt if system_prompt is None else system_prompt
        if prompt is not None:
            self._append({"role": "system", "content": prompt})

    # --- what happens to the agent ---

    def on_env_reset(self, obs: Observation, info: Info) -> None:
        self._append({"role": "user", "content": obs})

    @abstractmethod
    def on_before_act(self) -> list[Message]:
        """The messages the model is shown now."""

    def on_after_act(self, response: ChatResponse) -> None:
        self.add_assistant_step(response.text)

    def on_after_step(self, obs: Observation, info: Info) -> None:
        if self._messages and self._messages[-1]["role"] == "tool":
            self.add_note(obs)  # the turn ended on a tool result that no reply has followed
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

    def add_note(self, text: str) -> None:
        """Say something to the model at once. It joins what has not been shown yet, an observation or a tool result:
        many chat templates refuse two user messages in a row, or one behind a tool's."""
        if self._messages and self._messages[-1]["role"] in ("user", "tool"):
            last = self._messages.pop()
            self._append({**last, "content": f"{last['content']}\n\n{text}"})
        else:
            self._append({"role": "user", "content": text})

    def _append(self, message: Message) -> None:
        self._messages.append(message)


# ----------------------------------------------------------------------------------------------------
# The plain transcript: everything is kept, everything is shown.
# ----------------------------------------------------------------------------------------------------


class FullDialog(ContextStrategy):
    """Observations are user messages, replies assistant messages; nothing is dropped."""

    def on_before_act(self) -> list[Message]:
        return list(self._messages)
