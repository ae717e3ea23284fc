"""Memory stays whole, but old thinking is not shown again."""

import re

from ludic.context.base import ContextStrategy
from ludic.types import Message

# Strict on purpose: a leading think block, closed, with an answer behind it. Anything else is left alone.
_THINK_THEN_ANSWER = re.compile(r"(\s*<think>)(?:(?!</?think>).)*(</think>)(\s*\S.*)\Z", re.IGNORECASE | re.DOTALL)


class TruncatedThinkingContext(ContextStrategy):
    """In the prompt, the inside of a finished think block is replaced by a placeholder."""

    rewrites_history = True

    def __init__(self, system_prompt: str | None = None, placeholder: str = "[TRUNCATED]") -> None:
        self.placeholder = placeholder
        self._shown: list[Message] = []
        super().__init__(system_prompt)

    def on_before_act(self) -> list[Message]:
        return list(self._shown)

    def reset(self, *, system_prompt: str | None = None) -> None:
        self._shown = []
        super().reset(system_prompt=system_prompt)

    def _append(self, message: Message) -> None:
        super()._append(message)
        # A message is rewritten once, when it arrives; `add_note` may have taken one back, hence the cut.
        del self._shown[len(self._messages) - 1 :]
        self._shown.append(self._truncated(message))

    def _truncated(self, message: Message) -> Message:
        if message["role"] != "assistant":
            return message
        match = _THINK_THEN_ANSWER.match(message["content"])
        if match is None:
            return message
        return {**message, "content": f"{match[1]}{self.placeholder}{match[2]}{match[3]}"}
