"""`HFChatTemplate`: the chat template of any Hugging Face tokenizer, with token-exact continuation."""

import json
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from ludic.inference.chat_template import ChatTemplate, TemplateResult, ToolSchemas
from ludic.inference.tool_parser import ToolParser, ToolParseResult
from ludic.types import Message, MissingExtra, TemplateError, TokenArray, TokenIds, token_array

# Stands in for a reply while its surroundings are rendered. Letters and digits only, so that no template's
# trimming, escaping or thinking rules touch it.
_REPLY = "LudicReplyGoesHere7f3a9c"
_HELLO: Message = {"role": "user", "content": "Hello"}
_STAND_IN: Message = {"role": "assistant", "content": _REPLY}


class HFChatTemplate(ChatTemplate):
    """Renders with the tokenizer's own template. Share one tokenizer per process: it is the expensive part."""

    def __init__(self, tokenizer: Any, *, tool_parser: ToolParser | None = None) -> None:
        try:
            from jinja2.exceptions import TemplateError as JinjaError
        except ImportError as error:
            raise MissingExtra("hf", "HFChatTemplate") from error
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{type(tokenizer).__name__} {tokenizer.name_or_path!r} has no chat template. Set "
                "tokenizer.chat_template, or load the instruct version of the model."
            )
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self._jinja_error: type[Exception] = JinjaError
        # The members of a group begin with the same prompt; tokenising it is the dearest part of a call.
        self._encode = lru_cache(maxsize=512)(self._encode_afresh)
        self._special_ids = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        self._check_generation_prompt()

    # --- whole conversations ---

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        text = self._render(messages, tools, add_generation_prompt)
        return TemplateResult(prompt_token_ids=self._encode(text), prompt_text=text)

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        return ToolParseResult(content=text) if self.tool_parser is None else self.tool_parser.parse(text)

    def supports_tools(self) -> bool:
        return self.tool_parser is not None

    # --- what follows a reply ---

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        text = self._text_after_reply(messages, num_sent, tools)
        if text is None:
            return None
        ids = self._encode_fragment(text)
        return ids[self._num_already_sampled(token_array(completion_token_ids), ids) :]

    def _text_after_reply(self, messages: Sequence[Message], num_sent: int, tools: ToolSchemas | None) -> str | None:
        """The template's text from the end of the reply to where the next one begins."""
        sent, new = messages[:num_sent], messages[num_sent + 1 :]
        histories = [[*sent, _STAND_IN]]
        if self._tail_is_local:
            histories.insert(0, [_HELLO, _STAND_IN])  # as good, and its cost does not grow with the conversation
        for history in histories:
            text = self._try_render([*history, *new], tools, True)
            if text is not None and text.count(_REPLY) == 1:
                return text.partition(_REPLY)[2]
        return self._text_after_tool_calls(messages, num_sent, tools)

    def _text_after_tool_calls(
        self, messages: Sequence[Message], num_sent: int, tools: ToolSchemas | None
    ) -> str | None:
        """For templates that only accept tool results behind an assistant message with structured calls."""
        before = self._try_render(messages[: num_sent + 1], tools, False)
        after = self._try_render(messages, tools, True)
        if before is None or after is None or not after.startswith(before):
            return None
        return self._closing + after[len(before) :]

    def _num_already_sampled(self, completion: TokenArray, following: TokenArray) -> int:
        """How much of the reply's closing the model has written itself (usually its end-of-turn token)."""
        if not len(completion) or not len(following):
            return 0
        if int(completion[-1]) in self._special_ids and int(following[0]) in self._special_ids:
            # Any end-of-turn token will do: Llama 3 ends a tool call with <|eom_id|> where the closing has <|eot_id|>.
            return 1
        most = min(len(self._closing_ids), len(completion), len(following))
        return next((n for n in range(most, 0, -1) if np.array_equal(completion[-n:], following[:n])), 0)

    # --- facts about the template, found out once ---

    @cached_property
    def _closing(self) -> str:
        """What the template writes behind a reply that ends the conversation."""
        return self._render([_HELLO, _STAND_IN], None, False).partition(_REPLY)[2]

    @cached_property
    def _closing_ids(self) -> TokenArray:
        return self._encode_fragment(self._closing)

    @cached_property
    def _tail_is_local(self) -> bool:
        """Whether what follows a reply is the same early and late in a conversation (no numbered rounds)."""
        next_user: Message = {"role": "user", "content": "Go on"}
        reply: Message = {"role": "assistant", "content": "Hi"}
        early = self._try_render([_HELLO, _STAND_IN, next_user], None, True)
        late = self._try_render([_HELLO, reply, next_user, reply, next_user, _STAND_IN, next_user], None, True)
        return early is not None and late is not None and early.partition(_REPLY)[2] == late.partition(_REPLY)[2]

    @cached_property
    def _anchor(self) -> tuple[str, int] | None:
        """A special token to put before a fragment, so that the tokenizer does not take it for the start of a text."""
        for token in (self.tokenizer.eos_token, self.tokenizer.bos_token):
            if token is not None:
                return token, len(self._encode(token))
        return None

    def _check_generation_prompt(self) -> None:
        """The prompt must end where a reply begins, or the model would have to write the template's own markup."""
        prompt = self._render([_HELLO], None, True)
        answered = self._render([_HELLO, _STAND_IN], None, False)
        if _REPLY not in answered:
            raise TemplateError("The chat template does not show assistant messages; it cannot be used for dialogue.")
        missing = answered.partition(_REPLY)[0].removeprefix(prompt)
        if prompt == self._render([_HELLO], None, False) and missing.strip():
            raise TemplateError(
                "The chat template ignores add_generation_prompt: its prompt does not end where the assistant begins "
                f"(missing {missing!r:.80}). Add '{{% if add_generation_prompt %}}…{{% endif %}}' to the template."
            )

    # --- the tokenizer ---

    def _render(self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool) -> str:
        kwargs: dict[str, Any] = {"tools": list(tools)} if tools else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                [_with_decoded_arguments(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **kwargs,
            )
        except self._jinja_error as error:
            roles = [message.get("role") for message in messages]
            raise TemplateError(f"The chat template refused messages with roles {roles}: {error}") from error
        return text

    def _try_render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool
    ) -> str | None:
        try:
            return self._render(messages, tools, add_generation_prompt)
        except TemplateError:
            return None

    def _encode_afresh(self, text: str) -> TokenArray:
        return token_array(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_fragment(self, text: str) -> TokenArray:
        if self._anchor is None:
            return self._encode(text)
        anchor, length = self._anchor
        return self._encode(anchor + text)[length:]


def _with_decoded_arguments(message: Message) -> Message:
    """Templates write arguments with `tojson`, which would encode our JSON string a second time."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.loads(function["arguments"])}})
    return {**message, "tool_calls": calls}
