"""`HFChatTemplate`: the chat template of any Hugging Face tokenizer, with token-exact continuation."""

import json
import re
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
_END_OF_TURN = (
    "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "</s>", "<|end|>", "<|return|>", "<|call|>",
)  # fmt: skip


class HFChatTemplate(ChatTemplate):
    """Renders with the tokenizer's own template. Share one tokenizer per process: it is the expensive part.

    `end_of_turn` names tokens by which this model ends a turn, beside its eos token and the well-known ones.
    """

    def __init__(
        self, tokenizer: Any, *, tool_parser: ToolParser | None = None, end_of_turn: Sequence[str] = ()
    ) -> None:
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
        added = tokenizer.added_tokens_decoder
        self._special_ids = {i for i, token in added.items() if token.special}
        self._end_ids = {i for i, token in added.items() if token.content in {*_END_OF_TURN, *end_of_turn}}
        if tokenizer.eos_token_id is not None:
            self._end_ids.add(tokenizer.eos_token_id)
        self._check_generation_prompt()
        self._end_ids |= {i for i in self._closing_ids.tolist() if i in self._special_ids}
        self.reply_prefix = self._find_reply_prefix()

    # --- whole conversations ---

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        try:
            text = self._render(messages, tools, add_generation_prompt)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # A model may call two tools at once where its template allows one; what it wrote is still its history.
            text = self._render([_with_calls_as_text(message) for message in messages], tools, add_generation_prompt)
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
        if messages[num_sent].get("tool_calls"):
            # Some templates look the call up when they write its result, so the real history comes first.
            text = self._text_after_tool_calls(messages, num_sent, tools)
            if text is not None:
                return text
        histories = [[*sent, _STAND_IN]]
        if self._tail_is_local:
            histories.insert(0, [_HELLO, _STAND_IN])  # as good, and its cost does not grow with the conversation
        for history in histories:
            # The tools are in the header already; templates that write them beside the last message would repeat them.
            text = self._try_render([*history, *new], None, True)
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
        closing = following[: _common_length(following, self._closing_ids)]
        if int(completion[-1]) in self._end_ids:
            # Any end-of-turn token stands in for the closing's own: Llama 3 ends a tool call with <|eom_id|> where the
            # closing has <|eot_id|>. What the template writes before its own (a space, say) is then out of place.
            ends = [n for n, token in enumerate(closing.tolist(), start=1) if token in self._special_ids]
            if ends:
                return ends[0]
        # No token of its own: the model may have written the closing's text, or the next message's first marker.
        most = min(max(len(closing), 1), len(completion))
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
        for token in self.tokenizer.added_tokens_decoder.values():
            # One that swallows the white space beside it would change what follows.
            if token.special and not (token.lstrip or token.rstrip or token.single_word):
                return token.content, len(self._encode(token.content))
        return None

    def _find_reply_prefix(self) -> str:
        """What the generation prompt writes of the reply itself: some models are made to think by an opened block."""
        prompt = self._render([_HELLO], None, True)
        match = re.search(r"<think>\s*\Z", prompt)
        return match.group(0) if match else ""

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
        if not text.isascii():
            text = text.encode("utf-8", "replace").decode("utf-8")  # tokenizers refuse lone surrogates
        return token_array(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _encode_fragment(self, text: str) -> TokenArray:
        if self._anchor is None:
            return self._encode(text)
        anchor, length = self._anchor
        return self._encode(anchor + text)[length:]


def _with_calls_as_text(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = "".join(f"\n<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message["tool_calls"])
    return {"role": message["role"], "content": (message["content"] + calls).strip()}


def _common_length(a: TokenArray, b: TokenArray) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


def _with_decoded_arguments(message: Message) -> Message:
    """Templates write arguments with `tojson`, which would encode our JSON string a second time."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.loads(function["arguments"])}})
    return {**message, "tool_calls": calls}
