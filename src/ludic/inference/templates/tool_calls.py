"""Parsers of tool calls in the model's raw text, to the OpenAI format.

One parser per dialect. All keep the text outside the calls (`content`), so that a message holds prose and structured calls
without repetition. Call ids count within the message; the agent renumbers them over the episode.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from ludic.types import Message, TemplateError, ToolCall
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
