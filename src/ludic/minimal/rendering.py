"""The seam between messages and tokens. Envs never see a token, training never sees a message."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from ludic.inference.templates.chat import ChatTemplate
from ludic.inference.templates.conversation import ChatDialogue, Prompt
from ludic.minimal.message import Message
from ludic.types import TokenIds, TokenTrace

ToolSpec: TypeAlias = dict[str, Any]
"""What the model is told of a tool, in the OpenAI shape; `ludic.tools.Tool.from_callable(function).schema` writes it."""
RenderedPrompt: TypeAlias = Prompt
"""`token_ids` is what a policy is sent; they end where its reply begins."""


class Dialogue(Protocol):
    """One conversation: a prompt, the reply to it, the next prompt, …"""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> RenderedPrompt:
        """`messages` is the whole conversation so far."""
        ...

    def reply(self, completion: TokenTrace) -> Message:
        """What was sampled, as the assistant's message; an env puts it behind the prompt's messages as it is."""
        ...


class Renderer(Protocol):
    """Messages ↔ tokens, for any number of conversations at once."""

    def begin(self) -> Dialogue: ...


class ChatRenderer:
    """Over any chat template of the library; what was sampled is kept as it is, and never tokenised again."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        self.template, self.decode = template, decode

    def begin(self) -> ChatDialogue:
        return ChatDialogue(self.template, self.decode)
