"""Chat templates of the `renderers` package (Prime Intellect): one hand-written renderer per model family.

A renderer writes messages as tokens, extends sampled tokens by new messages, reads replies, and says which token came from which
message. `RenderersTemplate` makes one a `ChatTemplate`. Models that the package does not know keep their tokenizer's template.
"""

import importlib
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ludic.inference.templates.chat import (
    ChatTemplate,
    TemplateResult,
    ToolParseResult,
    ToolSchemas,
    make_tool_call,
    with_argument_objects,
)
from ludic.inference.templates.conversation import ControlTokens
from ludic.inference.templates.hf import END_OF_TURN, HFChatTemplate, tool_parser_for
from ludic.types import (
    ConfigError,
    Message,
    MessageSpan,
    MissingExtra,
    SamplingParams,
    TemplateError,
    TokenArray,
    TokenIds,
    UnknownName,
    token_array,
)
from ludic.types.messages import TEMPLATE, joined_spans

_HELLO: Message = {"role": "user", "content": "Hello"}
_CALL: Message = {"role": "assistant", "content": "", "tool_calls": [make_tool_call("look_up", {"city": "Paris"}, 0)]}
_CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "Its name."}}, "required": ["city"]}
_CALL_TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Look it up.", "parameters": _CITY}}]
_STAND_INS = ("Yes", "Yes</think>")
"""Replies that nothing has ended; the second also ends a think block that the prompt opens."""


def renderers_template(tokenizer: Any, name: str | None = None, **settings: Any) -> ChatTemplate:
    """The renderer called `name` ("qwen3", "gpt-oss", …), with these fields of its config (`enable_thinking=False`).

    Without a name: that of `tokenizer.name_or_path`, or the tokenizer's own template if the package has none for that model.
    """
    try:
        base = importlib.import_module("renderers.base")
        configs = importlib.import_module("renderers.configs")
    except ImportError as error:
        raise MissingExtra("renderers", "renderers_template") from error
    if name is None:
        name = base.MODEL_RENDERER_MAP.get(tokenizer.name_or_path)
        if name is None and not settings:
            return HFChatTemplate(tokenizer, tool_parser=tool_parser_for(tokenizer))
    if name is None:
        raise ConfigError(
            f"{', '.join(settings)} are settings of a renderer, and the renderers package has none for "
            f"{tokenizer.name_or_path!r}. Name one."
        )
    base._populate_registry()
    known = sorted(set(base.RENDERER_REGISTRY) - {"default"})
    if name not in known:
        raise UnknownName.among("renderer", name, known)
    # Sampled thinking stays in the conversation, as with every template; a context may forget it.
    settings = {"thinking_retention": "all", **settings}
    kind = type(configs.config_from_name(name))
    try:
        return RenderersTemplate(base.create_renderer(tokenizer, kind(**settings)), tokenizer)
    except (AssertionError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"The renderer {name!r} cannot be made for {tokenizer.name_or_path!r}: {reason}") from error


class RenderersTemplate(ChatTemplate):
    """One of the package's renderers as a chat template."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self.renderer, self.tokenizer = renderer, tokenizer
        self._control = ControlTokens(tokenizer, END_OF_TURN)
        self._stop_ids = tuple(renderer.get_stop_token_ids())
        opened = re.search(r"<think>\s*\Z", self.apply([_HELLO]).prompt_text)
        self.reply_prefix = opened.group(0) if opened else ""
        self._has_tools: bool | None = None

    def stops(self, sampling: SamplingParams) -> dict[str, Any]:
        """Fields of SamplingParams: the stops of `sampling` and those of this renderer."""
        return {"stop_token_ids": (*sampling.stop_token_ids, *self._stop_ids)}

    # --- tokens ---

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        ids = token_array(self._rendered(messages, tools, add_generation_prompt).token_ids)
        return TemplateResult(prompt_token_ids=ids, prompt_text=self.tokenizer.decode(ids.tolist()))

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        found = self._following(messages, num_sent, token_array(completion_token_ids), tools)
        return None if found is None else token_array(found[0].token_ids[found[1] :])

    def _following(
        self, messages: Sequence[Message], num_sent: int, completion: TokenArray, tools: ToolSchemas | None
    ) -> tuple[Any, int] | None:
        """A rendering that ends with what follows the reply, and where that begins; None if the renderer has none."""
        prompt = self._rendered(messages[:num_sent], tools, True).token_ids
        new = [with_argument_objects(message) for message in messages[num_sent + 1 :]]
        self._control.refuse(new, tools)
        stand_ins = [self.tokenizer.encode(text, add_special_tokens=False) for text in _STAND_INS]
        for sampled in (completion.tolist(), *stand_ins):
            try:
                found = self.renderer.bridge_to_next_turn(prompt, sampled, new, tools=list(tools) if tools else None)
            except Exception as error:  # a renderer is a program and can raise anything
                raise TemplateError(f"The renderer failed on new messages: {type(error).__name__}: {error}") from error
            before = [*prompt, *sampled]
            if found is None or found.token_ids[: len(before)] != before:
                continue  # a reply that ended inside its think block, or behind its end
            start = len(before)
            if sampled in stand_ins and len(completion) and int(completion[-1]) in self._stop_ids:
                # The model has sampled the end that the renderer writes.
                ends = [
                    place for place, token in enumerate(found.token_ids) if place >= start and token in self._stop_ids
                ]
                start = ends[0] + 1
            return found, start
        return None

    def _rendered(self, messages: Sequence[Message], tools: ToolSchemas | None, opened: bool) -> Any:
        own = [with_argument_objects(message) for message in messages]
        self._control.refuse(own, tools)
        try:
            return self.renderer.render(own, tools=list(tools) if tools else None, add_generation_prompt=opened)
        except Exception as error:  # a renderer is a program and can raise anything
            roles = [message.get("role") for message in messages]
            why = f"{type(error).__name__}: {error}"
            raise TemplateError(f"The renderer failed on messages with roles {roles}: {why}") from error

    # --- which message each token came from ---

    def spans(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> list[MessageSpan]:
        rendered = self._rendered(messages, tools, add_generation_prompt)
        return _spans(rendered, messages, start=0, first=0, head=(-1, TEMPLATE))

    def delta_spans(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> list[MessageSpan]:
        found = self._following(messages, num_sent, token_array(completion_token_ids), tools)
        if found is None:
            return []
        return _spans(found[0], messages, start=found[1], first=num_sent + 1, head=(num_sent, "assistant"))

    # --- tool calls ---

    def supports_tools(self) -> bool:
        """True if a call that the renderer writes can be read from the text of a reply, which has no special tokens."""
        if self._has_tools is None:
            rendered = self._rendered([_HELLO, _CALL], _CALL_TOOLS, False)
            sampled = zip(rendered.token_ids, rendered.sampled_mask or [True] * len(rendered.token_ids), strict=True)
            text = self.tokenizer.decode([token for token, is_own in sampled if is_own], skip_special_tokens=True)
            self._has_tools = self.parse_tool_calls(text).tool_calls == _CALL["tool_calls"]
        return self._has_tools

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), *self._stop_ids[:1]]
        read = self.renderer.parse_response(ids)
        # Without the tools' schemas, a text between tags counts as invalid JSON; it is an argument all the same.
        good = [
            call
            for call in read.tool_calls
            if call.status in ("ok", "invalid_json") and call.name and isinstance(call.arguments, dict)
        ]
        calls = [make_tool_call(call.name, call.arguments, index) for index, call in enumerate(good)]
        thinking = f"<think>\n{read.reasoning_content}\n</think>\n\n" if read.reasoning_content else ""
        return ToolParseResult(
            tool_calls=calls or None,
            parse_error=len(good) < len(read.tool_calls),
            content=thinking + read.content if calls else text,
        )


def _spans(
    rendered: Any, messages: Sequence[Message], *, start: int, first: int, head: tuple[int, str]
) -> list[MessageSpan]:
    """The renderer's index of each token from `start` on, as spans. It has -1 where it writes for no message.

    Such tokens belong to `head` before the first message, to the next reply at the end, and else to the message before them.
    """
    runs = [(index, len(list(run))) for index, run in groupby(rendered.message_indices[start:])]
    content = np.array(rendered.is_content[start:] or [True] * len(rendered.message_indices[start:]), dtype=np.bool_)
    spans: list[MessageSpan] = []
    place, owner = 0, head
    for number, (index, length) in enumerate(runs):
        end = place + length
        is_opening = index < 0 and number == len(runs) - 1 and number > 0
        if index >= 0:
            owner = (first + index, messages[first + index]["role"])
        elif is_opening:
            owner = (len(messages), "assistant")
        own = np.flatnonzero(content[place:end]) if index >= 0 else np.empty(0, dtype=np.int64)
        if len(own):
            text = (place + int(own[0]), place + int(own[-1]) + 1)
        else:
            text = (end, end) if owner[1] == "assistant" or index >= 0 else (place, end)
        spans.append(MessageSpan(*owner, place, end, *text))
        place = end
    return joined_spans(spans)
