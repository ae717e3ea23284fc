"""The token side of one dialogue: stored ids plus the template's delta, never a second rendering.

A conversation consists of segments. Within one, every prompt is the tokens already sent and sampled, with new
ones behind them. When the context shows another history than before, a new segment starts with a fresh rendering.
"""

from dataclasses import dataclass, field

from ludic.inference.chat_template import ChatTemplate, ToolSchemas
from ludic.types import Message, MessageView, TokenArray, TokenIds, TokenLog


@dataclass(kw_only=True, slots=True, eq=False)
class Prompt:
    """What goes to the server for one model call."""

    token_ids: TokenArray
    messages: MessageView = field(default_factory=lambda: MessageView([]))
    text: str | None = None
    """At hand only at the start of a segment."""
    rewrote_history: bool = False
    """The messages did not extend those of the call before, so a new segment was started."""
    is_new_segment: bool = False
    """A fresh rendering in the middle of a conversation, for whatever reason."""


class Conversation:
    """Remembers the exact tokens of a dialogue between calls."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.reset()

    def reset(self) -> None:
        self._tokens: TokenLog | None = None
        self._messages: list[Message] = []
        self._tools: ToolSchemas | None = None
        self._reply: str | None = None
        self._completion: TokenIds = ()

    def next_prompt(self, messages: list[Message], *, tools: ToolSchemas | None = None) -> Prompt:
        """The prompt for these messages. Follow it with `record`, or the next one starts a new segment."""
        if self._reply is None:
            return self._start(messages, tools, rewrote=False)
        if not self._continues(messages, tools):
            return self._start(messages, tools, rewrote=True)
        delta = self._template.delta(
            messages, num_sent=len(self._messages), completion_token_ids=self._completion, tools=tools
        )
        if delta is None:
            return self._start(messages, tools, rewrote=False)
        assert self._tokens is not None, "a recorded reply follows a prompt"
        self._tokens.append(delta)
        self._messages.extend(map(dict, messages[len(self._messages) :]))
        self._reply = None
        return Prompt(token_ids=self._tokens.view(), messages=MessageView(self._messages), text=None)

    def num_tokens(self, messages: list[Message], *, tools: ToolSchemas | None = None) -> int:
        """How many tokens the prompt for these messages would have. Asking changes nothing."""
        if self._reply is not None and self._continues(messages, tools):
            delta = self._template.delta(
                messages, num_sent=len(self._messages), completion_token_ids=self._completion, tools=tools
            )
            if delta is not None:
                assert self._tokens is not None, "a recorded reply follows a prompt"
                return len(self._tokens) + len(delta)
        return len(self._template.apply(messages, tools=tools).prompt_token_ids)

    def record(self, completion_token_ids: TokenIds, content: str) -> None:
        """What was sampled, and the text that the context stores as the reply's message."""
        assert self._tokens is not None, "a reply follows a prompt"
        self._tokens.append(completion_token_ids)
        self._completion = completion_token_ids
        self._reply = content

    def _continues(self, messages: list[Message], tools: ToolSchemas | None) -> bool:
        sent = len(self._messages)
        return (
            len(messages) > sent
            and messages[sent]["role"] == "assistant"
            and messages[sent]["content"] == self._reply
            and messages[:sent] == self._messages
            and (tools is self._tools or tools == self._tools)
        )

    def _start(self, messages: list[Message], tools: ToolSchemas | None, *, rewrote: bool) -> Prompt:
        is_first = self._tokens is None
        rendered = self._template.apply(messages, tools=tools)
        self._tokens = TokenLog(rendered.prompt_token_ids)
        # Copies: a context that edits a message in place must not change what is on record as having been shown.
        self._messages = list(map(dict, messages))
        self._tools = tools
        self._reply = None
        return Prompt(
            token_ids=self._tokens.view(),
            messages=MessageView(self._messages),
            text=rendered.prompt_text,
            rewrote_history=rewrote,
            is_new_segment=not is_first,
        )
