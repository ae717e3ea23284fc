"""A chat template without a tokenizer: UTF-8 bytes, and one id per role.

For demonstrations, tests and benchmarks without model files. It is exact in both directions and nearly free.
"""

import json
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from ludic.inference.templates.chat import ChatTemplate, TemplateResult, ToolSchemas
from ludic.inference.templates.tool_calls import ToolParser, ToolParseResult
from ludic.types import Message, TemplateError, TokenArray, TokenIds, token_array


class ByteTemplate(ChatTemplate):
    """`<role> bytes <end>` for every message; ids 0–255 are bytes."""

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
        text = message["content"]
        if message.get("tool_calls"):
            text += "".join(f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message["tool_calls"])
        data = text.encode("utf-8", "surrogatepass")
        ids = np.empty(len(data) + 2, dtype=np.int32)
        ids[0] = role
        ids[1:-1] = np.frombuffer(data, dtype=np.uint8)
        ids[-1] = self.END
        return ids


def _text(ids: TokenArray) -> str:
    return ids.astype(np.uint8).tobytes().decode("utf-8", "replace")


_NAMES = {**{number: f"<{role}>" for role, number in ByteTemplate.ROLES.items()}, ByteTemplate.END: "\n"}
_OPEN_REPLY = token_array([ByteTemplate.ROLES["assistant"]])
_CLOSE = token_array([ByteTemplate.END])
