"""The chat-template interface: from messages to token ids, once and locally.

`apply` renders a whole conversation, for the first call of a segment. `delta` renders only what follows a sampled reply: the
reply's closing, the new messages, and the opening of the next reply. Its tokens are appended to the stored ones, so sent
and sampled tokens are never tokenised again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ludic.inference.templates.tool_calls import ToolParseResult
from ludic.types import Message, TokenArray, TokenIds

ToolSchemas = Sequence[dict[str, Any]]


@dataclass(kw_only=True, slots=True, eq=False)
class TemplateResult:
    """A rendered prompt."""

    prompt_token_ids: TokenArray
    prompt_text: str


class ChatTemplate(Protocol):
    """The template interface of agents. Inherit from it to get the defaults below."""

    reply_prefix: str = ""
    """Start of every reply that the prompt already writes (an opened think block); parsers and contexts see it."""

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        """The whole conversation as tokens."""
        ...

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        """The tokens that follow a sampled reply.

        `messages[:num_sent]` is the prompt that was sent, `messages[num_sent]` the reply to it, the rest is new.
        None means that the template has no delta; the caller then renders everything and starts a new segment.
        """
        return None

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        return ToolParseResult(content=text)

    def supports_tools(self) -> bool:
        """Whether tool calls can be read back from the model's text."""
        return False


def shows_tools(template: ChatTemplate, tools: ToolSchemas) -> bool:
    """Whether the template writes the tools into the prompt; otherwise the model never sees them."""
    hello: list[Message] = [{"role": "user", "content": "Hello"}]
    shown = template.apply(hello, tools=tools).prompt_token_ids
    return not np.array_equal(shown, template.apply(hello).prompt_token_ids)
