"""The chat-template interface, from messages to token ids, its simplest implementation, `ByteTemplate`, and parsers of tool calls.

`apply` renders a whole conversation, for the first call of a segment. `delta` renders only what follows a sampled reply: the
reply's closing, the new messages, and the opening of the next reply. Its tokens are appended to the stored ones, so sent
and sampled tokens are never tokenised again.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np

from ludic.types import (
    ConfigError,
    ImageSpan,
    Message,
    MessageSpan,
    TemplateError,
    TokenArray,
    TokenIds,
    ToolCall,
    token_array,
)
from ludic.types.messages import TEMPLATE, joined_spans, text_of
from ludic.util.files import parse_json


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolParseResult:
    """The calls found in one reply."""

    tool_calls: list[ToolCall] | None = None
    """None if the text holds no call."""
    parse_error: bool = False
    """Something looked like a call but could not be read; readable calls are still listed."""
    content: str = ""
    """The text outside the calls."""


class ToolParser(Protocol):
    def parse(self, text: str) -> ToolParseResult: ...


def make_tool_call(name: str, arguments: dict[str, Any], index: int) -> ToolCall:
    """One call in the OpenAI format. The id has nine letters and digits, because Mistral's template accepts nothing else."""
    # JSON can encode lone surrogates, which would break files and tokenizers later.
    encoded = json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace").decode("utf-8")
    name = name.encode("utf-8", "replace").decode("utf-8")
    return {"id": f"call{index:05d}", "type": "function", "function": {"name": name, "arguments": encoded}}


@dataclass(slots=True)
class _Found:
    """Calls found so far, and whether any of them was unreadable."""

    calls: list[ToolCall] = field(default_factory=list)
    broken: bool = False

    def add(self, name: Any, arguments: Any) -> None:
        if isinstance(arguments, str):  # some models encode the object a second time
            arguments = _json_or_none(arguments)
        if not (isinstance(name, str) and name) or not isinstance(arguments, dict):
            self.broken = True
        else:
            self.calls.append(make_tool_call(name, arguments, len(self.calls)))

    def add_json(self, value: Any, argument_keys: Sequence[str]) -> None:
        """One call object, or a list of them."""
        for call in value if isinstance(value, list) else [value]:
            if not isinstance(call, dict):
                self.broken = True
                continue
            self.add(call.get("name"), next((call[k] for k in argument_keys if k in call), {}))

    def result(self, content: str) -> ToolParseResult:
        return ToolParseResult(tool_calls=self.calls or None, parse_error=self.broken, content=content)


def _json_or_none(text: str) -> Any:
    try:
        return parse_json(text, strict=False)  # models put raw newlines into strings
    except ValueError:
        return None


class HermesToolParser:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>` blocks, as Hermes and Qwen write them."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
    _BLOCK = re.compile(r"<tool_call>((?:(?!</?tool_call>).)*)</tool_call>", re.DOTALL)

    def parse(self, text: str) -> ToolParseResult:
        if self._OPEN not in text:
            return ToolParseResult(content=text)
        found = _Found()
        for block in self._BLOCK.findall(text):
            found.add_json(self._read(block.strip()), ("arguments", "parameters"))
        outside = self._BLOCK.sub("", text)
        if self._OPEN in outside:  # opened and never closed
            found.broken = True
        return found.result(outside.strip())

    @staticmethod
    def _read(block: str) -> Any:
        """Also of doubled braces: the template of Qwen2.5-Coder shows them by mistake, and the model copies one side or both."""
        value = _json_or_none(block)
        if value is None and block.startswith("{{"):
            once = block[1:]
            value = next((v for text in (once, once[:-1]) if (v := _json_or_none(text)) is not None), None)
        return value


class Llama3ToolParser:
    """Llama 3's JSON calls: the reply is `{"name": …, "parameters": {…}}`, several separated by `;`."""

    _PYTHON_TAG = "<|python_tag|>"
    _LOOKS_LIKE_CALL = re.compile(r'\{\s*"(?:type"\s*:\s*"function"\s*,\s*")?name"\s*:')

    def parse(self, text: str) -> ToolParseResult:
        tagged = self._PYTHON_TAG in text
        before, _, body = text.partition(self._PYTHON_TAG) if tagged else ("", "", text)
        body = body.strip()
        if not tagged and not self._LOOKS_LIKE_CALL.match(body):
            return ToolParseResult(content=text)
        found = _Found()
        decoder = json.JSONDecoder(strict=False)
        position = 0
        while position < len(body):
            try:
                call, position = decoder.raw_decode(body, position)
            except (ValueError, RecursionError):
                found.broken = True
                break
            found.add_json(call, ("parameters", "arguments"))
            while position < len(body) and body[position] in "; \n\t,":
                position += 1
        return found.result(before.strip())


class XMLToolParser:
    """`<function=NAME><parameter=KEY>VALUE</parameter></function>`, also spelled `<invoke name="NAME">` and
    `<parameter name="KEY">`; a wrapping `<tool_call>` or `<function_calls>` is ignored.

    Values stay text: only the tool's own types can tell a number from a string that looks like one.
    """

    # Bodies may not contain another opening, so that an unclosed tag is searched only up to the next one.
    _CALL = re.compile(
        r'<(function|invoke)(?:=|\s+name=")([^">\s]+)"?\s*>((?:(?!<(?:function|invoke)[=\s]).)*?)</\1>', re.DOTALL
    )
    _PARAMETER = re.compile(
        r'<parameter(?:=|\s+name=")([^">\s]+)"?\s*>((?:(?!<parameter[=\s]).)*?)</parameter>', re.DOTALL
    )
    _OPENING = re.compile(r"<(?:function|invoke)(?:=|\s+name=)|<parameter(?:=|\s+name=)")
    _WRAPPER = re.compile(r"</?(?:\w+:)?(?:tool_call|function_calls)>")  # MiniMax and Seed prefix their names

    def parse(self, text: str) -> ToolParseResult:
        if not self._OPENING.search(text):
            return ToolParseResult(content=text)
        found = _Found()
        for _, name, body in self._CALL.findall(text):
            arguments = {key: value.strip("\n") for key, value in self._PARAMETER.findall(body)}
            if self._OPENING.search(self._PARAMETER.sub("", body)):
                found.broken = True
            else:
                found.add(name, arguments)
        outside = self._CALL.sub("", text)
        if self._OPENING.search(outside):
            found.broken = True
        return found.result(self._WRAPPER.sub("", outside).strip())


TOOL_PARSERS: tuple[ToolParser, ...] = (HermesToolParser(), XMLToolParser(), Llama3ToolParser())
READABLE_CALLS = "Calls are read as Hermes and Qwen, Qwen3-Coder (XML) and Llama 3 write them"
"""For errors about a chat template that writes calls in another format."""


def with_argument_objects(message: Message) -> Message:
    """A message with the arguments of its calls as objects: for templates that write them with `tojson`, which would encode JSON
    text a second time, and for renderers."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = parse_json(function["arguments"])
        except ValueError as error:
            raise TemplateError(
                f"{function['name']}: arguments must be JSON text, not {function['arguments']!r:.80}."
            ) from error
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


ToolSchemas = Sequence[dict[str, Any]]


@dataclass(kw_only=True, slots=True, eq=False)
class TemplateResult:
    """A rendered prompt."""

    prompt_token_ids: TokenArray
    prompt_text: str
    images: tuple[ImageSpan, ...] = ()
    """Pictures of the messages, and the tokens that stand for them."""


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

    def place_images(self, messages: Sequence[Message], token_ids: TokenArray) -> tuple[ImageSpan, ...]:
        """The pictures of these messages within the tokens that `apply` or `delta` made of them. A template for text has none:
        it refuses messages with pictures, or writes them as text."""
        return ()

    def spans(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> list[MessageSpan]:
        """The message that each token of `apply` came from. The opening of the next reply is the message behind the last one."""
        raise TemplateError(f"{type(self).__name__} cannot say which token came from which message: it has no `spans`.")

    def delta_spans(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> list[MessageSpan]:
        """The same of the tokens of `delta`, counted from its first one; the reply's closing is part of the reply's message."""
        raise TemplateError(
            f"{type(self).__name__} cannot say which token came from which message: it has no `delta_spans`."
        )

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        return ToolParseResult(content=text)

    def supports_tools(self) -> bool:
        """True if tool calls can be read back from the model's text."""
        return False


def shows_tools(template: ChatTemplate, tools: ToolSchemas) -> bool:
    """True if the template writes the tools into the prompt; otherwise the model never sees them."""
    hello: list[Message] = [{"role": "user", "content": "Hello"}]
    shown = template.apply(hello, tools=tools).prompt_token_ids
    return not np.array_equal(shown, template.apply(hello).prompt_token_ids)


def tools_as_text(tools: ToolSchemas) -> str:
    """Instructions to call these tools, in the form that `HermesToolParser` reads."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        f"You can call these functions:\n{listed}\n\nTo call one, write its name and arguments as JSON in this form, once for each "
        'call:\n<tool_call>{"name": "…", "arguments": {…}}</tool_call>'
    )


def require_text_calls(template: ChatTemplate) -> None:
    """Raise unless calls in the form of `tools_as_text` can be read."""
    if not template.parse_tool_calls('<tool_call>{"name": "f", "arguments": {}}</tool_call>').tool_calls:
        raise ConfigError(
            "The chat template has no place for tools, so the system message describes them and asks for calls as "
            '<tool_call>{"name": …}</tool_call>, which the template\'s tool parser does not read. Give it one that does: '
            "tool_parser=HermesToolParser()."
        )


def with_tools(messages: Sequence[Message], tools: ToolSchemas) -> list[Message]:
    """The messages for a template without tools: the system message describes them."""
    if not tools:
        return list(messages)
    text, first = tools_as_text(tools), messages[0]
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def require_tools(template: ChatTemplate, tools: ToolSchemas) -> None:
    """Raise unless the model sees these tools and its calls can be read."""
    offered = f"Tools are offered ({', '.join(tool['function']['name'] for tool in tools)}), but the chat template"
    if not template.supports_tools():
        raise ConfigError(
            f"{offered} cannot read tool calls. {READABLE_CALLS}: use such a model, or give the template a parser, for example "
            "HFChatTemplate(tokenizer, tool_parser=HermesToolParser())."
        )
    if not shows_tools(template, tools):
        raise ConfigError(
            f"{offered} does not write them into the prompt, so the model would never hear of them. Use a model whose template "
            "supports tools."
        )


class ByteTemplate(ChatTemplate):
    """A template without a tokenizer: `<role> bytes <end>` for every message; ids 0–255 are bytes.

    For demonstrations, tests and benchmarks without model files. It is exact in both directions and nearly free.
    """

    ROLES: ClassVar[dict[str, int]] = {"system": 256, "user": 257, "assistant": 258, "tool": 259}
    END: ClassVar[int] = 260
    VOCAB_SIZE: ClassVar[int] = 261

    def __init__(self, *, tool_parser: ToolParser | None = None) -> None:
        self.tool_parser = tool_parser

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        pieces = [self.encode_message(message) for message in messages]
        if tools:
            pieces.insert(0, self.encode_message({"role": "system", "content": f"Tools: {json.dumps(list(tools))}"}))
        if add_generation_prompt:
            pieces.append(_OPEN_REPLY)
        ids = np.concatenate(pieces)
        return TemplateResult(prompt_token_ids=ids, prompt_text=self.decode(ids))

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        pieces = [self.encode_message(message) for message in messages[num_sent + 1 :]]
        pieces.append(_OPEN_REPLY)
        if not len(completion_token_ids) or completion_token_ids[-1] != self.END:
            pieces.insert(0, _CLOSE)
        return np.concatenate(pieces)

    def spans(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> list[MessageSpan]:
        header = len(self.apply([], tools=tools, add_generation_prompt=False).prompt_token_ids) if tools else 0
        spans = [MessageSpan(-1, TEMPLATE, 0, header, 0, header), *self._message_spans(messages, header, 0)]
        return joined_spans([*spans, *_opening(len(messages), spans[-1].end)] if add_generation_prompt else spans)

    def delta_spans(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> list[MessageSpan]:
        is_closed = bool(len(completion_token_ids)) and completion_token_ids[-1] == self.END
        closing = MessageSpan(num_sent, "assistant", 0, 0 if is_closed else 1, 0, 0)
        spans = [closing, *self._message_spans(messages[num_sent + 1 :], closing.end, num_sent + 1)]
        return joined_spans([*spans, *_opening(len(messages), spans[-1].end)])

    def _message_spans(self, messages: Sequence[Message], start: int, first: int) -> list[MessageSpan]:
        spans = []
        for index, message in enumerate(messages, start=first):
            end = start + len(self.encode_message(message))
            spans.append(MessageSpan(index, message["role"], start, end, start + 1, end - 1))
            start = end
        return spans

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        return ToolParseResult(content=text) if self.tool_parser is None else self.tool_parser.parse(text)

    def supports_tools(self) -> bool:
        return self.tool_parser is not None

    # --- tokenizer ---

    def encode(self, text: str) -> TokenArray:
        return np.frombuffer(text.encode("utf-8", "surrogatepass"), dtype=np.uint8).astype(np.int32)

    def decode(self, ids: TokenIds) -> str:
        """Readable text: markers become `<role>` and newlines."""
        array = token_array(ids)
        pieces, start = [], 0
        for position in np.flatnonzero(array >= 256).tolist():
            pieces += [_text(array[start:position]), _NAMES.get(int(array[position]), "<?>")]
            start = position + 1
        return "".join([*pieces, _text(array[start:])])

    def decode_reply(self, ids: TokenIds) -> str:
        """The text of a completion, without markers."""
        array = token_array(ids)
        return _text(array[array < 256])

    def encode_message(self, message: Message) -> TokenArray:
        role = self.ROLES.get(message["role"])
        if role is None:
            raise TemplateError(f"ByteTemplate has no role {message['role']!r}; it has {', '.join(self.ROLES)}.")
        text = text_of(message["content"])  # it has no pictures, only their hashes
        if message.get("tool_calls"):
            text += "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message["tool_calls"])
        data = text.encode("utf-8", "surrogatepass")
        ids = np.empty(len(data) + 2, dtype=np.int32)
        ids[0] = role
        ids[1:-1] = np.frombuffer(data, dtype=np.uint8)
        ids[-1] = self.END
        return ids


def _opening(index: int, start: int) -> list[MessageSpan]:
    return [MessageSpan(index, "assistant", start, start + 1, start + 1, start + 1)]


def _text(ids: TokenArray) -> str:
    return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")


_NAMES = {**{number: f"<{role}>" for role, number in ByteTemplate.ROLES.items()}, ByteTemplate.END: "\n"}
_OPEN_REPLY = token_array([ByteTemplate.ROLES["assistant"]])
_CLOSE = token_array([ByteTemplate.END])
