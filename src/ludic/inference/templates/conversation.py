"""The token side of one dialogue: stored ids plus the template's delta, without rendering twice.

A conversation consists of segments. Within a segment, every prompt is the tokens already sent and sampled plus new ones. When
the context shows a different history, a new segment starts with a full rendering. Spans say which token came from which message.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ludic.inference.templates.chat import ChatTemplate, ToolSchemas, require_tools
from ludic.types import (
    ChatClient,
    ImageSpan,
    Message,
    MessageSpan,
    MessageView,
    ReturnSpec,
    SamplingParams,
    TemplateError,
    TokenArray,
    TokenCompletionRequest,
    TokenIds,
    TokenLog,
    TokenTrace,
    require_trainable_reply,
    token_array,
)
from ludic.types.errors import encodable
from ludic.types.messages import joined_spans, spans_with_reply

# Letters and digits only, so that no template's trimming or escaping changes a mark.
_MARK = re.compile(r"LudicMark7f3a([BE])(\d+)x")
Render = Callable[[Sequence[Message]], str | None]
"""The text of these messages, without the opening of a reply; None if the template cannot write them."""
CommonStart = Callable[[str, str], str]


def text_spans(
    text: str,
    render: Render,
    messages: Sequence[Message],
    *,
    head: int,
    first: int,
    closings: re.Pattern[str],
    common: CommonStart,
) -> list[MessageSpan]:
    """Spans of characters in `text`, which is `render(messages)`, from `head` on; the first message has the index `first`.

    `closings` matches what ends a message, for borders that no shorter rendering shows.
    """
    found = _located(render, messages, text)
    order = _in_order(found, len(messages))
    edges = [head]
    for before, after in pairwise(order):
        lower = max(found[before][1] if before in found else edges[-1], edges[-1])
        upper = next((found[i][0] for i in order[order.index(after) :] if i in found), len(text))
        shorter = render(messages[:after]) if after == before + 1 else None
        edge = -1 if shorter is None else len(common(text, shorter))
        if not lower <= edge <= upper:
            closing = closings.search(text, lower, upper)
            edge = lower if closing is None else closing.end()
        edges.append(edge)
    edges.append(len(text))
    spans = []
    for index, (start, end) in zip(order, pairwise(edges), strict=True):
        message = messages[index]
        own = found.get(index, (start, end))
        # Calls stand behind the content and are not marked.
        text_end = end if message.get("tool_calls") else own[1]
        spans.append(MessageSpan(first + index, message["role"], start, end, max(own[0], start), min(text_end, end)))
    return spans


def _located(render: Render, messages: Sequence[Message], text: str) -> dict[int, tuple[int, int]]:
    """Index of a message -> where its content is in the text."""
    marked = [_marked(message, index) for index, message in enumerate(messages)]
    found = _between_marks(render(marked), text)
    if found is not None:
        return found
    found = {}
    for index, message in enumerate(marked):  # a template that looks into one content may still show the others
        found |= _between_marks(render([*messages[:index], message, *messages[index + 1 :]]), text) or {}
    return found


def _marked(message: Message, index: int) -> Message:
    content = message.get("content")
    if not isinstance(content, str) or not content.strip():
        return message
    inner = content.strip()  # templates trim
    start = content.index(inner)
    end = start + len(inner)
    begin_mark, end_mark = f"LudicMark7f3aB{index}x", f"LudicMark7f3aE{index}x"
    return {**message, "content": content[:start] + begin_mark + inner + end_mark + content[end:]}


def _between_marks(marked: str | None, text: str) -> dict[int, tuple[int, int]] | None:
    """None if the marks changed more than themselves."""
    if marked is None or _MARK.sub("", marked) != text:
        return None
    places: dict[tuple[str, int], int] = {}
    removed = 0
    for mark in _MARK.finditer(marked):
        places.setdefault((mark[1], int(mark[2])), mark.start() - removed)
        removed += len(mark[0])
    return {i: (place, places["E", i]) for (kind, i), place in places.items() if kind == "B" and ("E", i) in places}


def _in_order(found: dict[int, tuple[int, int]], num_messages: int) -> list[int]:
    """Messages as the text shows them; one whose text was not found stays behind the one before it."""
    keys, last = [], -1
    for index in range(num_messages):
        last = found[index][0] if index in found else last
        keys.append((last, index))
    return [index for _, index in sorted(keys)]


# --- characters to tokens ---


def token_spans(spans: Sequence[MessageSpan], starts: npt.NDArray[np.int64], num_dropped: int = 0) -> list[MessageSpan]:
    """Spans of characters as spans of the tokens that start at these characters, without the first `num_dropped` tokens."""
    edges = np.array([(s.start, s.end, s.text_start, s.text_end) for s in spans], dtype=np.int64)
    places = np.searchsorted(starts, edges)
    # A token that begins before a text and holds its first characters is part of the text.
    begins = places[:, 2]
    is_inside = (edges[:, 2] < edges[:, 3]) & (begins > places[:, 0])
    is_inside &= np.append(starts, np.iinfo(np.int64).max)[begins] > edges[:, 2]
    places[:, 2] -= is_inside
    places = np.maximum(places - num_dropped, 0)
    made = [MessageSpan(span.message, span.role, *own) for span, own in zip(spans, places.tolist(), strict=True)]
    last = made[-1]
    # Characters behind the last token's start belong to it.
    made[-1] = last._replace(end=max(len(starts) - num_dropped, 0))
    return [span for span in made if span.start < span.end]


def token_starts(tokenizer: Any, text: str, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    """The character of the text at which each of these tokens starts."""
    found = tokenizer.backend_tokenizer.encode(text, add_special_tokens=False) if tokenizer.is_fast else None
    if found is not None and found.ids == list(ids):
        pairs = np.array(found.offsets, dtype=np.int64).reshape(-1, 2)
        # Some tokenizers leave a token's spaces out of its offsets; then it starts where the token before it ends.
        starts = np.minimum(pairs[:, 0], np.concatenate([[0], pairs[:-1, 1]])[: len(pairs)])
    else:
        starts = np.array([len(tokenizer.decode(list(ids[:count]))) for count in range(len(ids))], dtype=np.int64)
    return np.maximum.accumulate(starts) if len(starts) else starts


@dataclass(slots=True, eq=False)
class Prompt:
    """The prompt of one model call."""

    token_ids: TokenArray
    messages: MessageView = field(default_factory=lambda: MessageView([]))
    text: str | None = None
    """Set only at the start of a segment."""
    rewrote_history: bool = False
    """The messages do not extend those of the previous call, so a new segment starts."""
    is_new_segment: bool = False
    """A full rendering in the middle of a conversation, for any reason."""
    images: tuple[ImageSpan, ...] = ()
    """Pictures of all its messages, and the tokens that stand for them."""
    message_spans: tuple[MessageSpan, ...] = ()
    """The message that each token came from, if it was asked for."""


class Conversation:
    """Keeps the exact tokens of a dialogue between calls."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self.reset()

    def reset(self) -> None:
        self._tokens: TokenLog | None = None
        self._messages: list[Message] = []
        self._tools: ToolSchemas | None = None
        self._reply: str | None = None
        self._completion: TokenIds = ()
        self._images: tuple[ImageSpan, ...] = ()
        self._spans: list[MessageSpan] = []

    def copy(self) -> "Conversation":
        """The conversation as it is now, to go back to."""
        made = Conversation(self._template)
        made._tokens = None if self._tokens is None else TokenLog(self._tokens.view())
        made._messages, made._tools = list(self._messages), self._tools
        made._reply, made._completion, made._images = self._reply, self._completion, self._images
        made._spans = list(self._spans)
        return made

    def next_prompt(
        self, messages: list[Message], *, tools: ToolSchemas | None = None, with_spans: bool = False
    ) -> Prompt:
        """The prompt for these messages. Call `record` after it; otherwise the next prompt starts a new segment.

        `with_spans` asks for `Prompt.message_spans`; ask for it in all calls of a conversation, or in none.
        """
        continues = self._continues(messages, tools)
        delta = self._delta(messages, tools) if continues else None
        if delta is None:
            return self._start(messages, tools, with_spans, rewrote=self._reply is not None and not continues)
        assert self._tokens is not None, "a recorded reply follows a prompt"
        found = self._template.place_images(messages[len(self._messages) + 1 :], delta)
        if found:
            self._images = (*self._images, *(span.moved(len(self._tokens)) for span in found))
        if self._spans:
            added = self._template.delta_spans(
                messages, num_sent=len(self._messages), completion_token_ids=self._completion, tools=tools
            )
            self._spans = joined_spans([*self._spans, *(span.moved(len(self._tokens)) for span in added)])
        self._tokens.append(delta)
        self._messages.extend(map(dict.copy, messages[len(self._messages) :]))
        self._reply = None
        return Prompt(
            self._tokens.view(), MessageView(self._messages), images=self._images, message_spans=tuple(self._spans)
        )

    def num_tokens(self, messages: list[Message], *, tools: ToolSchemas | None = None) -> int:
        """Number of tokens of the prompt for these messages; changes no state."""
        delta = self._delta(messages, tools) if self._continues(messages, tools) else None
        if delta is None:
            return len(self._template.apply(messages, tools=tools).prompt_token_ids)
        assert self._tokens is not None, "a recorded reply follows a prompt"
        return len(self._tokens) + len(delta)

    def record(self, completion_token_ids: TokenIds, content: str) -> None:
        """Store the sampled tokens, and the text that the context keeps as the reply's message."""
        assert self._tokens is not None, "a reply follows a prompt"
        self._tokens.append(completion_token_ids)
        if self._spans:
            self._spans = spans_with_reply(self._spans, len(completion_token_ids))
        self._completion = completion_token_ids
        self._reply = content

    def _delta(self, messages: list[Message], tools: ToolSchemas | None) -> TokenArray | None:
        return self._template.delta(
            messages, num_sent=len(self._messages), completion_token_ids=self._completion, tools=tools
        )

    def _continues(self, messages: list[Message], tools: ToolSchemas | None) -> bool:
        """True if the messages extend the last prompt and its reply."""
        sent = len(self._messages)
        return (
            self._reply is not None
            and len(messages) > sent
            and messages[sent]["role"] == "assistant"
            and messages[sent]["content"] == self._reply
            and messages[:sent] == self._messages
            and (tools is self._tools or tools == self._tools)
        )

    def _start(self, messages: list[Message], tools: ToolSchemas | None, with_spans: bool, *, rewrote: bool) -> Prompt:
        is_first = self._tokens is None
        rendered = self._template.apply(messages, tools=tools)
        self._tokens = TokenLog(rendered.prompt_token_ids)
        self._spans = self._template.spans(messages, tools=tools) if with_spans else []
        # Copies: a context that edits a message in place must not change the record of what was sent.
        self._messages = list(map(dict.copy, messages))
        self._tools = tools
        self._reply = None
        self._images = rendered.images
        return Prompt(
            token_ids=self._tokens.view(),
            messages=MessageView(self._messages),
            text=rendered.prompt_text,
            rewrote_history=rewrote,
            is_new_segment=not is_first,
            images=rendered.images,
            message_spans=tuple(self._spans),
        )


# For custom loops such as `rolo`: messages to tokens, and a policy client, without an agent of `ludic.agents`.


class ChatDialogue:
    """A conversation between messages and tokens; sampled tokens are never tokenised again."""

    def __init__(self, template: ChatTemplate, decode: Callable[[TokenIds], str]) -> None:
        """`decode` gives the text of sampled tokens, without special tokens."""
        self._template, self._decode = template, decode
        self._conversation = Conversation(template)
        self._tools: ToolSchemas = ()
        self._num_calls = 0

    def prompt(self, messages: Sequence[Message], tools: ToolSchemas = ()) -> Prompt:
        """The prompt for the whole conversation so far. Messages that do not extend the last prompt and its reply start a new
        segment."""
        if tools and tools is not self._tools:
            require_tools(self._template, tools)
        self._tools = tools
        return self._conversation.next_prompt(list(messages), tools=tools or None)

    def reply(self, completion: TokenTrace) -> Message:
        """The sampled reply as the assistant's message; append it unchanged to the messages of the next prompt."""
        text = self._template.reply_prefix + self._decode(completion.completion_token_ids)
        message: Message = {"role": "assistant", "content": text}
        if self._tools and completion.finish_reason != "length":  # a truncated call does not count
            found = self._template.parse_tool_calls(text)
            if found.tool_calls and not found.parse_error:
                calls = [{**call, "id": f"call{self._num_calls + n:05d}"} for n, call in enumerate(found.tool_calls)]
                self._num_calls += len(calls)
                message = {"role": "assistant", "content": found.content, "tool_calls": calls}
        self._conversation.record(completion.completion_token_ids, message["content"])
        return message


def find_stop(text: str, sampling: SamplingParams, num_exempt: int = 0) -> int | None:
    """Start of the first stop text that ends after the first `num_exempt` characters; None if there is none."""
    stops = [sampling.stop] if isinstance(sampling.stop, str) else sampling.stop or ()
    found = (text.find(stop, max(num_exempt - len(stop) + 1, 0)) for stop in stops)
    return min((at for at in found if at >= 0), default=None)


# --- the tokenizer: transformers' checks of its arguments take as long as its Rust code, and Python's lock with them ---


@lru_cache
def _is_rust(kind: Any) -> bool:
    """True if the methods below are those of transformers' Rust tokenizers, and not overridden."""
    if importlib.util.find_spec("transformers") is None:
        return False
    from transformers import PreTrainedTokenizerFast

    names = ("__call__", "_encode_plus", "decode", "_decode")
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, name) is getattr(PreTrainedTokenizerFast, name) for name in names
    )


_LONG_TEXT = 1 << 14


def encode_text(tokenizer: Any, text: str) -> TokenArray:
    """`tokenizer(text, add_special_tokens=False)["input_ids"]` as an array."""
    rust = tokenizer.backend_tokenizer if _is_rust(tokenizer.__class__) else None
    # An earlier call may have left its settings in the Rust tokenizer.
    if rust is None or rust.truncation or rust.padding or rust.encode_special_tokens or tokenizer.split_special_tokens:
        return token_array(tokenizer(text, add_special_tokens=False)["input_ids"])
    if len(text) > _LONG_TEXT:  # seconds, in which other threads run: a batch gives up Python's lock
        return token_array(rust.encode_batch_fast([text], add_special_tokens=False)[0].ids)
    # Not a batch for short texts: a busy engine thread takes the lock for milliseconds at every prompt.
    return token_array(rust.encode(text, add_special_tokens=False).ids)


CUT = "\ud800"
"""A lone surrogate: `ControlTokens.guarded` leaves none of the texts' own."""


TURN_MARKERS = ("<｜User｜>", "<｜Assistant｜>")
"""DeepSeek R1's, which its distilled models' tokenizers do not call special."""


class ControlTokens:
    """Keeps the texts of messages and tools from becoming control tokens, which only a template may write.

    A control token is an added token that the tokenizer calls special, or one of `more` or TURN_MARKERS. Where a text holds one,
    `guarded` puts a cut behind its first character, which templates print as they find it; `encode` encodes the pieces between
    the cuts one by one.
    """

    def __init__(self, tokenizer: Any, more: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        more = {*TURN_MARKERS, *more}
        added = [token for token in tokenizer.added_tokens_decoder.values() if token.special or token.content in more]
        texts = [
            token.content for token in added if len(token.content.strip()) > 1
        ]  # white space is not a control token
        # By first character: one alternative per token would be slow for a text full of "<".
        rests = {first: [re.escape(text[1:]) for text in texts if text[0] == first] for first in {t[0] for t in texts}}
        starts = (f"{re.escape(first)}(?={'|'.join(behind)})" for first, behind in rests.items())
        self._first = re.compile("|".join(starts) or "(?!)")
        # A token that strips adjacent white space would change what follows.
        plain = (t.content for t in added if t.special and not (t.lstrip or t.rstrip or t.single_word))
        self.anchor = next(plain, "")
        """A special token to put before a fragment, so that the tokenizer does not treat it as the start of a text."""
        self.num_anchor = len(encode_text(tokenizer, self.anchor))

    def guarded(self, value: Any) -> Any:
        """The messages or tools with cuts in their texts; equal to `value` if they hold no control token."""
        if isinstance(value, str):
            return self._first.sub(rf"\g<0>{CUT}", encodable(value))
        if isinstance(value, dict):
            return {self.guarded(key): self.guarded(item) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        # A template may join the parts of a content, and one may begin a control token that the next one ends.
        parts = [self.guarded(item) for item in value]
        texts = [part["text"] for part in value if isinstance(part, dict) and "text" in part]
        if len(texts) > 1 and self._first.search("".join(map(str, texts))):
            parts = [{**part, "text": f"{part['text']}{CUT}"} if "text" in part else part for part in parts]
        return parts

    def refuse(self, messages: Sequence[Message], tools: ToolSchemas | None) -> None:
        """For templates that encode contents themselves."""
        if CUT in json.dumps(self.guarded([*messages, *(tools or ())]), ensure_ascii=False):
            raise TemplateError(
                "A message or a tool holds the text of a control token, and a renderer would write the token itself. Use the "
                "tokenizer's own chat template, which keeps such texts apart (SECURITY.md)."
            )

    def encode(self, text: str) -> TokenArray:
        """The tokens of a rendered text."""
        first, *rest = text.split(CUT)
        behind = [encode_text(self._tokenizer, encodable(self.anchor + piece))[self.num_anchor :] for piece in rest]
        return np.concatenate([encode_text(self._tokenizer, encodable(first)), *behind])

    def starts(self, text: str) -> npt.NDArray[np.int64]:
        """The character of a rendered text, cuts counted, at which each of its tokens starts."""
        found, start, anchor, num_anchor = [], 0, "", 0
        for piece in text.split(CUT):
            ids = encode_text(self._tokenizer, anchor + piece).tolist()
            found.append(token_starts(self._tokenizer, anchor + piece, ids)[num_anchor:] - len(anchor) + start)
            start, anchor, num_anchor = start + len(piece) + 1, self.anchor, self.num_anchor
        return np.concatenate(found)


def decode_reply(tokenizer: Any, ids: list[int]) -> str:
    """`tokenizer.decode(ids, skip_special_tokens=True)`."""
    if _is_rust(tokenizer.__class__) and not tokenizer.clean_up_tokenization_spaces:
        text: str = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=True)
    else:
        text = tokenizer.decode(ids, skip_special_tokens=True)
    return text


def up_to_stop(ids: TokenIds, tokenizer: Any, sampling: SamplingParams) -> str:
    """The text before the first stop text, which stays in the tokens but not in the message.

    A stop text within the first `min_tokens` tokens did not end the reply, so it stays in the text.
    """
    text = decode_reply(tokenizer, list(ids))
    exempt = decode_reply(tokenizer, list(ids)[: sampling.min_tokens])
    return text[: find_stop(text, sampling, len(exempt))]


class ClientPolicy:
    """Samples from any `ChatClient`: the embedded engine, a server, a remote service."""

    def __init__(self, client: ChatClient, sampling: SamplingParams, model: str = "policy") -> None:
        self.client, self.sampling, self.model = client, sampling, model

    async def sample(self, prompt: Prompt, *, seed: int | None = None) -> TokenTrace:
        """Sample one reply, with the log-probs of its tokens."""
        request = TokenCompletionRequest(
            model=self.model,
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            return_=ReturnSpec.for_rl(),
            seed=seed,
            images=prompt.images,
        )
        response, _ = await self.client.complete_tokens(request)
        require_trainable_reply(request, response)
        return response.to_trace(temperature=self.sampling.temperature, images=prompt.images)
