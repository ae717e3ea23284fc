"""`HFChatTemplate`: the chat template of any Hugging Face tokenizer, with token-exact continuation."""

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import Any, ClassVar

import numpy as np

from ludic.inference.templates.chat import (
    TOOL_PARSERS,
    ChatTemplate,
    TemplateResult,
    ToolParser,
    ToolParseResult,
    ToolSchemas,
    make_tool_call,
    with_argument_objects,
)
from ludic.inference.templates.conversation import CUT, ControlTokens, text_spans, token_spans
from ludic.types import (
    Message,
    MessageSpan,
    MissingExtra,
    SamplingParams,
    TemplateError,
    TokenArray,
    TokenIds,
    images_in,
    token_array,
)
from ludic.types.messages import TEMPLATE, text_of

# Placeholder for a reply while its surroundings are rendered. Letters and digits only, so that no template's
# trimming, escaping or thinking rules change it.
_REPLY = "LudicReplyGoesHere7f3a9c"
_SYSTEM: Message = {"role": "system", "content": "Be brief"}
_HELLO: Message = {"role": "user", "content": "Hello"}
_STAND_IN: Message = {"role": "assistant", "content": _REPLY}
_REPLIED: Message = {"role": "assistant", "content": "Hi"}
_PROSE = "LudicProseGoesHere"
_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [make_tool_call("look_up", {"city": _REPLY}, 0)]}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}, "required": ["city"]}
_CALL_TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look it up.", "parameters": _CITY}}]
_GARBLED = (f"'city': '{_REPLY}'", f'\\"city\\": \\"{_REPLY}')
"""Arguments printed as a Python dict, or as JSON text within JSON text: the template got the wrong form."""
END_OF_TURN = (
    "<|im_end|>", "<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<end_of_turn>", "<turn|>",
    "</s>", "<|end|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "[|endofturn|]",
    "<|end_of_msg|>",
)  # fmt: skip
"""Known end-of-turn tokens."""
_TURN_MARKER = re.compile(
    r"(?!.*(?:think|thought|answer|arg_|tool.?call|tool.?sep)|</?tool)(?:<.+>|\[.+\])", re.IGNORECASE
)
"""An added token that is not markup of a reply, nor of a tool's result in a user's text."""


class HFChatTemplate(ChatTemplate):
    """Renders with the tokenizer's own template. Share one tokenizer per process: it is the expensive part.

    `end_of_turn` names this model's end-of-turn tokens besides its eos token and the well-known ones.
    """

    def __init__(
        self, tokenizer: Any, *, tool_parser: ToolParser | None = None, end_of_turn: Sequence[str] = ()
    ) -> None:
        if find_spec("jinja2") is None:
            raise MissingExtra("hf", "HFChatTemplate")
        if not tokenizer.chat_template:
            raise TemplateError(
                f"{type(tokenizer).__name__} {tokenizer.name_or_path!r} has no chat template. Load the "
                "instruct version of the model, or write a template into chat_template.jinja in the model's folder (in Python: set "
                "tokenizer.chat_template)."
            )
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self._control = ControlTokens(tokenizer, (*END_OF_TURN, *end_of_turn))
        added = {i: token for i, token in tokenizer.added_tokens_decoder.items() if token.content}
        self._texts: dict[int, str] = {i: token.content for i, token in added.items()}
        self._special_ids = {i for i, token in added.items() if token.special}
        longest_first = sorted((self._texts[i] for i in self._special_ids), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._end_ids = {i for i, text in self._texts.items() if text in {*END_OF_TURN, *end_of_turn}}
        if tokenizer.eos_token_id is not None:
            self._end_ids.add(tokenizer.eos_token_id)
        self._call_forms: dict[bool, _CallForm] = {}
        # Some tool templates iterate over the tools without checking that there are any.
        self._no_tools: dict[str, Any] = {}
        if self._try_render([_HELLO], None, True) is None:
            self._no_tools = {"tools": []}
        self._control = ControlTokens(tokenizer, (*END_OF_TURN, *end_of_turn, *self._turn_markers()))
        # The members of a group begin with the same prompt, and tokenising it is the most expensive part of a call.
        self._encode = _RecentTexts(self._control.encode)
        self._closing, self._at_the_end = self._find_closing()
        prompt = self._render([_HELLO], None, True)
        self._check_generation_prompt(prompt)
        opened = re.search(r"<think>\s*\Z", prompt)  # some templates write the beginning of the reply
        self.reply_prefix = opened[0] if opened else ""

    # --- whole conversations ---

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        text = self._text(messages, tools, add_generation_prompt)
        ids = self._encode(text)
        text = text.replace(CUT, "")
        return TemplateResult(prompt_token_ids=ids, prompt_text=text, images=self.place_images(messages, ids))

    def _text(self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool) -> str:
        try:
            return self._render(messages, tools, add_generation_prompt)
        except TemplateError:
            if not any(message.get("tool_calls") for message in messages):
                raise
            # A model may call two tools at once where its template allows one; the history must still show what it wrote.
            return self._render([_as_prose(message) for message in messages], tools, add_generation_prompt)

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        return ToolParseResult(content=text) if self.tool_parser is None else self.tool_parser.parse(text)

    def supports_tools(self) -> bool:
        return self.tool_parser is not None

    def find_tool_parser(self) -> ToolParser | None:
        """The parser that reads back a call written by this template; None if there is none."""
        prompt = self._try_render([_HELLO], _CALL_TOOLS, True)
        whole = self._try_render([_HELLO, _CALL], _CALL_TOOLS, False)
        if prompt is None or whole is None:
            return None
        shows_tools = prompt != self._try_render([_HELLO], None, True)
        if self._call_form(False) is _as_prose and shows_tools and "<tool_call>" not in prompt:
            return None  # the prompt teaches another format than `_as_prose` writes
        reply = self._special.sub(
            "", whole[len(self._common_start(prompt, whole)) :]
        )  # replies are decoded without special tokens
        return next((parser for parser in TOOL_PARSERS if parser.parse(reply).tool_calls == _CALL["tool_calls"]), None)

    # --- what follows a reply ---

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        completion = token_array(completion_token_ids)
        found = self._text_after_reply(messages, num_sent, completion, tools)
        if found is None:
            return None
        text, closing = found
        ids = self._encode_fragment(text)
        return ids[self._num_already_sampled(completion, ids, self._encode_fragment(closing)) :]

    def _text_after_reply(
        self, messages: Sequence[Message], num_sent: int, completion: TokenArray, tools: ToolSchemas | None
    ) -> tuple[str, str] | None:
        """The rendered text from the end of the reply to the start of the next one, and the reply's closing."""
        sent, new = messages[:num_sent], messages[num_sent + 1 :]
        if messages[num_sent].get("tool_calls"):
            # Some templates look up the call when they write its result, so the real history is tried first.
            found = self._text_after_tool_calls(messages, num_sent, completion, tools)
            if found is not None:
                return found
        histories = [[*sent, _STAND_IN]]
        if self._tail_is_local:
            histories.insert(0, [_HELLO, _STAND_IN])  # equivalent, at a cost independent of the conversation's length
        for history in histories:
            # The header already has the tools; templates that write them near the last message would repeat them.
            text = self._try_render([*history, *new], None, True)
            if text is not None and text.count(_REPLY) == 1:
                return text.partition(_REPLY)[2], self._closing
        return self._text_after_tool_calls(messages, num_sent, completion, tools)

    def _text_after_tool_calls(
        self, messages: Sequence[Message], num_sent: int, completion: TokenArray, tools: ToolSchemas | None
    ) -> tuple[str, str] | None:
        """For templates that accept tool results only after an assistant message with structured calls."""
        sent = self._try_render(messages[:num_sent], tools, False)
        before = self._try_render(messages[: num_sent + 1], tools, False)
        after = self._try_render(messages, tools, True)
        if sent is None or before is None or after is None:
            return None
        before = before.removesuffix(self._at_the_end)
        if not after.startswith(before):
            return None
        closing = self._closing_of_call(before.removeprefix(sent), completion)
        return closing + after[len(before) :], closing

    def _closing_of_call(self, reply: str, completion: TokenArray) -> str:
        """The end of a rendered reply with calls, from the last special token that the model wrote or must write."""
        # Gemma 4 leaves a turn with calls open: either the model or the template writes the marker after the calls.
        written = self._special_ids.intersection(completion[-1:].tolist())
        start, _ = self._last_of(written, reply)
        if start < 0:
            start, _ = self._last_of(self._end_ids, reply)
        if start < 0:
            return self._closing if reply.endswith(self._closing) else ""
        return reply[start:]

    def _num_already_sampled(self, completion: TokenArray, following: TokenArray, closing: TokenArray) -> int:
        """Number of tokens of the reply's closing that the model has already sampled (usually its end-of-turn token)."""
        if not len(completion) or not len(following):
            return 0
        closing = following[: _common_length(following, closing)]
        # Longest first: of Cohere's two closing tokens a model may have written both or the first. If a template has no
        # closing, the model may have written the next message's first marker.
        for n in range(min(max(len(closing), 1), len(completion)), 0, -1):
            if np.array_equal(completion[-n:], following[:n]):
                return n
        if int(completion[-1]) in self._end_ids:
            # Any end-of-turn token replaces the closing: Llama 3 ends a tool call with <|eom_id|> where the closing has <|eot_id|>.
            # Text that the template writes before its own token (a space, say) is then dropped.
            ends = np.flatnonzero(closing == completion[-1])
            if not len(ends):
                ends = np.flatnonzero(np.isin(closing, list(self._special_ids)))[::-1]
            return int(ends[0]) + 1 if len(ends) else 0
        return 0

    # --- which message each token came from ---

    def spans(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> list[MessageSpan]:
        text = self._text(messages, tools, add_generation_prompt)
        opening = self._opening if add_generation_prompt and text.endswith(self._opening) else ""

        def render(shown: Sequence[Message]) -> str | None:
            try:
                return self._text(shown, tools, add_generation_prompt).removesuffix(opening)
            except TemplateError:
                return None

        header = self._header(messages[0]["role"])
        spans = text_spans(
            text.removesuffix(opening),
            render,
            messages,
            head=0,
            first=0,
            closings=self._closings,
            common=self._common_start,
        )
        first = spans[0]
        if header and first.message == 0 and text[: first.text_start].endswith(header):
            head = first.text_start - len(header)  # the template wrote something before the first message
            spans[:1] = [MessageSpan(-1, TEMPLATE, 0, head, 0, head), first._replace(start=head)]
        spans += self._opened(len(messages), text, opening)
        return token_spans(spans, self._control.starts(text))

    def delta_spans(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> list[MessageSpan]:
        completion = token_array(completion_token_ids)
        found = self._text_after_reply(messages, num_sent, completion, tools)
        if found is None:
            return []
        text, closing = found
        opening = self._opening if text.endswith(self._opening) else ""

        def render(shown: Sequence[Message]) -> str | None:
            after = self._text_after_reply([*messages[: num_sent + 1], *shown], num_sent, completion, tools)
            return None if after is None else after[0].removesuffix(opening)

        alone = render([])
        head = len(closing) if alone is None else max(len(self._common_start(text, alone)), len(closing))
        spans = [MessageSpan(num_sent, "assistant", 0, head, 0, 0)]
        new = messages[num_sent + 1 :]
        if new:
            spans += text_spans(
                text.removesuffix(opening),
                render,
                new,
                head=head,
                first=num_sent + 1,
                closings=self._closings,
                common=self._common_start,
            )
        spans += self._opened(len(messages), text, opening)
        ids = self._encode_fragment(text)
        num_dropped = self._num_already_sampled(completion, ids, self._encode_fragment(closing))
        anchor, num_anchor = self._control.anchor, self._control.num_anchor
        starts = self._control.starts(anchor + text)[num_anchor:] - len(anchor)
        return token_spans(spans, starts, num_dropped)

    def _opened(self, index: int, text: str, opening: str) -> list[MessageSpan]:
        """The span of the opening of a reply at the end of a text."""
        end = len(text)
        return [MessageSpan(index, "assistant", end - len(opening), end, end, end)] if opening else []

    @cached_property
    def _opening(self) -> str:
        """The text with which the template opens a reply."""
        prompt = self._render([_HELLO], None, True)
        return prompt[len(self._common_start(prompt, self._render([_HELLO], None, False))) :]

    def _header(self, role: str) -> str:
        """The template's text before that of a message of this role."""
        shown = self._try_render([_HELLO, _STAND_IN, {"role": role, "content": _PROSE}], None, False)
        alone = self._try_render([_HELLO, _STAND_IN], None, False)
        if shown is None or alone is None or _PROSE not in shown:
            return ""
        after, ending = shown.partition(_PROSE)[0].partition(_REPLY)[2], alone.partition(_REPLY)[2]
        return after[len(self._common_start(after, ending)) :]

    @cached_property
    def _closings(self) -> re.Pattern[str]:
        """End-of-turn tokens, with the white space behind them."""
        texts = [re.escape(self._texts[i]) for i in self._end_ids if i in self._texts]
        return re.compile(rf"(?:{'|'.join(texts)})\s*" if texts else "(?!)")

    # --- template properties, determined once ---

    def _turn_markers(self) -> set[str]:
        """Added tokens that the template writes around messages and that the tokenizer does not call special: DeepSeek R1's
        `<｜User｜>`."""
        found = {text for i, text in self._texts.items() if i not in self._special_ids and _TURN_MARKER.fullmatch(text)}
        result: Message = {"role": "tool", "tool_call_id": "call00000", "name": "look_up", "content": "Hi"}
        rounds = ([_SYSTEM, _HELLO], [_HELLO, _REPLIED, _HELLO], [_HELLO, _CALL, result, _REPLIED])
        tried = [self._try_render(one, tools, True) for one in rounds for tools in (None, _CALL_TOOLS)] if found else []
        written = "".join(text for text in tried if text is not None)
        return {text for text in found if text in written}

    def _find_closing(self) -> tuple[str, str]:
        """The template's text after a reply in any case, and its text only at the conversation's end.

        The closing extends to the end-of-turn token if there is one; that token is added to `_end_ids`.
        """
        last = self._render([_HELLO, _STAND_IN], None, False).partition(_REPLY)[2]
        nexts = [self._try_render([_HELLO, _STAND_IN, new], None, False) for new in (_HELLO, _REPLIED)]
        following = [text.partition(_REPLY)[2] for text in nexts if text is not None]
        closing = self._common_start(last, following[0]) if following else last
        if not closing and len(following) == 2:
            closing = self._common_start(*following)  # gpt-oss ends a turn and a conversation with different tokens
        start, token = self._last_of(self._end_ids, closing)
        if start < 0 and closing == last:
            start, token = self._last_of(self._special_ids, closing)
        if start >= 0:
            self._end_ids.add(token)
            closing = closing[: start + len(self._texts[token])]
        return closing, last.removeprefix(closing)

    def _common_start(self, a: str, b: str) -> str:
        """The common prefix of both, in whole special tokens."""
        length = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        cut = [token.start() for token in self._special.finditer(a) if token.start() < length < token.end()]
        return a[: cut[0] if cut else length]

    def _last_of(self, ids: Collection[int], text: str) -> tuple[int, int]:
        """(start, id) of the last of these special tokens in a text; (-1, -1) if there is none."""
        return max(((text.rfind(self._texts[i]), i) for i in ids if i in self._texts), default=(-1, -1))

    @cached_property
    def _tail_is_local(self) -> bool:
        """True if the text after a reply is the same early and late in a conversation (no numbered rounds)."""
        next_user: Message = {"role": "user", "content": "Go on"}
        early = self._try_render([_HELLO, _STAND_IN, next_user], None, True)
        late = self._try_render([_HELLO, _REPLIED, next_user, _REPLIED, next_user, _STAND_IN, next_user], None, True)
        return early is not None and late is not None and early.partition(_REPLY)[2] == late.partition(_REPLY)[2]

    def _check_generation_prompt(self, prompt: str) -> None:
        """The prompt must end where a reply begins; otherwise the model would have to write the template's markup."""
        answered = self._render([_HELLO, _STAND_IN], None, False)
        if _REPLY not in answered:
            raise TemplateError("The chat template does not show assistant messages; it cannot be used for dialogue.")
        missing = answered.partition(_REPLY)[0].removeprefix(prompt)
        # Cohere's tool templates always open the next reply, even after the last one.
        is_open = bool(self._at_the_end.strip()) and prompt.endswith(self._at_the_end)
        if prompt == self._render([_HELLO], None, False) and missing.strip() and not is_open:
            raise TemplateError(
                "The chat template ignores add_generation_prompt: its prompt does not end where the assistant begins "
                f"(missing {missing!r:.80}). Add '{{% if add_generation_prompt %}}…{{% endif %}}' to the template."
            )

    # --- the tokenizer ---

    def _render(self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool) -> str:
        shaped = [
            self._call_form(bool(message.get("content")))(message) if message.get("tool_calls") else message
            for message in messages
        ]
        return self._render_as_given(shaped, tools, add_generation_prompt)

    def _render_as_given(
        self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool
    ) -> str:
        kwargs: dict[str, Any] = {"tools": self._control.guarded(list(tools))} if tools else self._no_tools
        messages = self._control.guarded(list(self._shaped(messages)))
        try:
            text: str = self.tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
        except Exception as error:  # a template is a program and can raise anything
            roles = [message.get("role") for message in messages]
            why = f"{type(error).__name__}: {error}"
            raise TemplateError(f"The chat template failed on messages with roles {roles}: {why}") from error
        return text

    def _shaped(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages as the template takes them: text only. `VisionTemplate` takes pictures."""
        if images_in(messages):
            raise TemplateError(
                f"The conversation holds a picture, but {type(self.tokenizer).__name__} {self.tokenizer.name_or_path!r} belongs to "
                "a model of text. Use a vision-language model (docs/vision.md)."
            )
        if any(type(message.get("content")) is list for message in messages):
            return [{**message, "content": text_of(message.get("content"))} for message in messages]
        return messages

    def _call_form(self, has_prose: bool) -> "_CallForm":
        """The form in which the template shows a message with tool calls, with or without prose."""
        if has_prose not in self._call_forms:
            call = {**_CALL, "content": _PROSE if has_prose else ""}
            self._call_forms[has_prose] = next((form for form in _CALL_FORMS if self._shows(form(call))), _as_prose)
        return self._call_forms[has_prose]

    def _shows(self, call: Message) -> bool:
        try:
            text = self._render_as_given([_HELLO, call], _CALL_TOOLS, False)
        except TemplateError:
            return False
        return _REPLY in text and (call["content"] or "") in text and not any(mark in text for mark in _GARBLED)

    def _try_render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, add_generation_prompt: bool
    ) -> str | None:
        try:
            return self._render(messages, tools, add_generation_prompt)
        except TemplateError:
            return None

    def _encode_fragment(self, text: str) -> TokenArray:
        return self._encode(self._control.anchor + text)[self._control.num_anchor :]


def tool_parser_for(tokenizer: Any) -> ToolParser | None:
    """The parser for tool calls as this tokenizer's chat template writes them; None if there is none.

    Training, evaluation and serving all choose their parser here.
    """
    return HFChatTemplate(tokenizer).find_tool_parser()


class _RecentTexts:
    """Keeps the tokens of the texts that were used last, up to a number of characters in all."""

    MAX_CHARS: ClassVar[int] = 1 << 24
    ENTRY_CHARS: ClassVar[int] = 512
    """The size of an entry besides its text, in characters."""

    def __init__(self, encode: Callable[[str], TokenArray]) -> None:
        self._encode, self._lock = encode, threading.Lock()
        self._ids: OrderedDict[str, TokenArray] = OrderedDict()
        self._num_chars = 0

    def __call__(self, text: str) -> TokenArray:
        with self._lock:
            if (known := self._ids.get(text)) is not None:
                self._ids.move_to_end(text)
                return known
        ids = self._encode(text)
        with self._lock:
            self._num_chars += 0 if text in self._ids else len(text) + self.ENTRY_CHARS
            self._ids[text] = ids
            while self._num_chars > self.MAX_CHARS:
                self._num_chars -= len(self._ids.popitem(last=False)[0]) + self.ENTRY_CHARS
        return ids


# --- forms of messages with tool calls, for different templates ---

_CallForm = Callable[[Message], Message]


def _without_content(message: Message) -> Message:
    """For templates that write calls only if the content is None (DeepSeek R1)."""
    return {**message, "content": message.get("content") or None}


_CALL_FORMS: tuple[_CallForm, ...] = (
    with_argument_objects,
    lambda message: message,  # for templates that insert arguments as text (DeepSeek V3, functionary)
    lambda message: _without_content(with_argument_objects(message)),
    _without_content,
)


def _as_prose(message: Message) -> Message:
    """For templates that do not write calls: put them into the content, so that they are not lost."""
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in with_argument_objects(message)["tool_calls"]]
    calls = "".join(f"\n<tool_call>{json.dumps(function)}</tool_call>" for function in functions)
    return {"role": message["role"], "content": f"{message.get('content') or ''}{calls}".strip()}


def _common_length(a: TokenArray, b: TokenArray) -> int:
    length = min(len(a), len(b))
    differing = np.flatnonzero(a[:length] != b[:length])
    return int(differing[0]) if len(differing) else length


# --- base models, whose tokenizers have no template: they also write the user's next line, so a reply ends where it begins ---

PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
PLAIN_STOP = "\n\nUser:"


def give_plain_chat(tokenizer: Any) -> bool:
    """True if the tokenizer has this template, set now or when its model was saved; then `PLAIN_STOP` should end a reply."""
    if tokenizer.chat_template not in (None, "", PLAIN_CHAT):
        return False
    tokenizer.chat_template = PLAIN_CHAT
    return True


def with_plain_stop(sampling: SamplingParams) -> SamplingParams:
    """Add `PLAIN_STOP` to the stop texts."""
    given = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
    return replace(sampling, stop=[*given, PLAIN_STOP])
