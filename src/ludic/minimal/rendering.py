"""Rendering between messages (envs) and tokens (training)."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from ludic.inference.templates.chat import ChatTemplate
from ludic.inference.templates.conversation import ChatDialogue, Prompt
from ludic.minimal.message import Message
from ludic.types import TokenIds, TokenTrace

ToolSpec: TypeAlias = dict[str, Any]
"""A tool's schema in the OpenAI shape; `ludic.tools.Tool.from_callable(function).schema` makes it."""
RenderedPrompt: TypeAlias = Prompt
"""`token_ids` is the policy's input; its reply follows them."""


class Dialogue(Protocol):
    """One conversation: a prompt, the reply to it, the next prompt, …"""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedPrompt:
        """`messages` is the whole conversation so far."""
        ...

    def reply(self, completion: TokenTrace) -> Message:
        """The sampled reply as an assistant message; an env appends it unchanged to the prompt's messages."""
        ...


class Renderer(Protocol):
    """Messages ↔ tokens, for any number of concurrent conversations."""

    def begin(self) -> Dialogue: ...


class ChatRenderer:
    """Renders with any chat template of the library; sampled tokens are kept and never tokenised again."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        self.template, self.decode = template, decode

    def begin(self) -> ChatDialogue:
        return ChatDialogue(self.template, self.decode)
