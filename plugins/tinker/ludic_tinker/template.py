"""Chat templates for models at Tinker: tinker_cookbook's renderers if it is installed, else the tokenizer's own.

A renderer of the cookbook turns a whole conversation into tokens. `CookbookTemplate` adds `delta`: the tokens after a sampled
reply, so that a conversation continues from its stored tokens.
"""

import importlib
import importlib.util
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ludic.inference.templates.chat import ChatTemplate, TemplateResult, ToolParseResult, ToolSchemas, make_tool_call
from ludic.inference.templates.conversation import ControlTokens, text_spans, token_spans, token_starts
from ludic.inference.templates.hf import END_OF_TURN, HFChatTemplate, tool_parser_for
from ludic.types import ConfigError, Message, MessageSpan, SamplingParams, TokenArray, TokenIds, token_array
from ludic.util.files import parse_json

_REPLY = "LudicReplyGoesHere7f3a9c"
"""Placeholder of a reply while the messages around it are rendered."""
_LONGEST_STOP = 16
"""Maximum tokens of a stop text."""


def tinker_template(base_model: str, tokenizer: Any, renderer_name: str | None = None) -> ChatTemplate:
    """`renderer_name` is one of the cookbook's; default: the one that the cookbook recommends for the model, if it has one."""
    if importlib.util.find_spec("tinker_cookbook") is None and renderer_name is None:
        return _own_template(tokenizer)
    renderers, known = _cookbook("renderers", renderer_name), _cookbook("model_info", renderer_name)
    if renderer_name is None:
        try:
            renderer_name = known.get_recommended_renderer_name(base_model)
        except (KeyError, ValueError):
            return _own_template(tokenizer)
    try:
        return CookbookTemplate(renderers.get_renderer(renderer_name, tokenizer), tokenizer)
    except ValueError as error:
        raise ConfigError(f"renderer_name={renderer_name!r}: {error}") from error


def _cookbook(part: str, renderer_name: str | None) -> Any:
    try:
        return importlib.import_module(f"tinker_cookbook.{part}")
    except ImportError as error:
        raise ConfigError(
            f"renderer_name={renderer_name!r} needs tinker_cookbook, which cannot be imported ({error}). Install it with: pip "
            "install --no-deps tinker-cookbook==0.5.8 pillow"
        ) from error


def _own_template(tokenizer: Any) -> HFChatTemplate:
    return HFChatTemplate(tokenizer, tool_parser=tool_parser_for(tokenizer))


class CookbookTemplate(ChatTemplate):
    """One of the cookbook's renderers as a chat template."""

    def __init__(self, renderer: Any, tokenizer: Any) -> None:
        self.renderer, self.tokenizer = renderer, tokenizer
        self._control = ControlTokens(tokenizer, END_OF_TURN)
        stops = renderer.get_stop_sequences()
        self._stop_ids = tuple(stop for stop in stops if isinstance(stop, int))
        self._stop_texts = tuple(stop for stop in stops if isinstance(stop, str))
        ends = [re.escape(tokenizer.decode([stop])) for stop in self._stop_ids]
        self._closings = re.compile(rf"(?:{'|'.join([*ends, '<[|]end[|]>'])})\s*")
        opened = re.search(r"<think>\s*\Z", self.apply([{"role": "user", "content": "Hello"}]).prompt_text)
        self.reply_prefix = opened.group(0) if opened else ""
        try:
            renderer.create_conversation_prefix_with_tools([], "")
            self._has_tools = True
        except NotImplementedError:
            self._has_tools = False

    def stops(self, sampling: SamplingParams) -> dict[str, Any]:
        """Fields of SamplingParams: the stops of `sampling` and those of this renderer."""
        texts = [sampling.stop] if isinstance(sampling.stop, str) else list(sampling.stop or ())
        return {
            "stop_token_ids": (*sampling.stop_token_ids, *self._stop_ids),
            "stop": [*texts, *self._stop_texts] or None,
        }

    # --- tokens ---

    def apply(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> TemplateResult:
        if not add_generation_prompt:
            raise NotImplementedError("A renderer of the cookbook always opens the next reply.")
        ids = self._rendered(messages, tools)
        return TemplateResult(prompt_token_ids=ids, prompt_text=self.tokenizer.decode(ids.tolist()))

    def delta(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> TokenArray | None:
        sent, completion = self._rendered(messages[:num_sent], tools), token_array(completion_token_ids)
        following = _behind(self._rendered(messages, tools), sent, completion)
        if following is not None:
            return following
        # Rendered from its text, the reply has other tokens than the sampled ones, and a renderer may drop the think block that
        # its prompt opens; the tokens after the reply are the same.
        stand_in: Message = {"role": "assistant", "content": _REPLY}
        following = self._behind_stand_in(
            self._rendered([*messages[:num_sent], stand_in, *messages[num_sent + 1 :]], tools)
        )
        return None if following is None else following[self._num_already_sampled(completion, following) :]

    def _behind_stand_in(self, whole: TokenArray) -> TokenArray | None:
        """None if one token holds the end of the placeholder and more; then a new segment starts."""
        decode, ids = self.tokenizer.decode, whole.tolist()
        end = bisect_left(range(len(ids)), True, key=lambda length: _REPLY in decode(ids[:length]))
        return whole[end:] if decode(ids[:end]).endswith(_REPLY) else None

    def _num_already_sampled(self, completion: TokenArray, following: TokenArray) -> int:
        """Number of following tokens that the model itself sampled to end its reply: a token, or a text such as "User:"."""
        if len(completion) and len(following) and int(completion[-1]) in self._stop_ids:
            first = int(following[0])
            if first not in self._stop_ids and self.tokenizer.decode([first]) in END_OF_TURN:
                return 1  # gpt-oss stops with <|return|>; a history has <|end|> in its place
        for count in range(1, min(len(completion), len(following), _LONGEST_STOP) + 1):
            is_stop = count == 1 and int(following[0]) in self._stop_ids
            if is_stop or self.tokenizer.decode(following[:count].tolist()) in self._stop_texts:
                return count if np.array_equal(completion[-count:], following[:count]) else 0
        return 0

    def _rendered(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenArray:
        self._control.refuse(messages, tools)
        own = [self._own(message) for message in messages]
        if tools:
            has_system = bool(own) and own[0]["role"] == "system"
            system = own[0]["content"] if has_system else ""
            offered = [tool["function"] for tool in tools]
            own = [*self.renderer.create_conversation_prefix_with_tools(offered, system), *own[has_system:]]
        return token_array(self.renderer.build_generation_prompt(own).to_ints())

    def _own(self, message: Message) -> dict[str, Any]:
        """The message in the cookbook's form, with tool calls as objects."""
        kept: dict[str, Any] = {
            name: message[name] for name in ("role", "content", "name", "tool_call_id") if name in message
        }
        if message.get("tool_calls"):
            call_type = importlib.import_module("tinker_cookbook.renderers").ToolCall
            kept["tool_calls"] = [
                call_type(id=call["id"], function=call_type.FunctionBody(**call["function"]))
                for call in message["tool_calls"]
            ]
        return kept

    # --- which message each token came from ---

    def spans(
        self, messages: Sequence[Message], *, tools: ToolSchemas | None = None, add_generation_prompt: bool = True
    ) -> list[MessageSpan]:
        ids = self.apply(messages, tools=tools, add_generation_prompt=add_generation_prompt).prompt_token_ids
        return self._spans(ids, lambda shown: self._rendered(shown, tools), messages, head=0, first=0)

    def delta_spans(
        self,
        messages: Sequence[Message],
        *,
        num_sent: int,
        completion_token_ids: TokenIds,
        tools: ToolSchemas | None = None,
    ) -> list[MessageSpan]:
        def following(shown: Sequence[Message]) -> TokenArray | None:
            whole = [*messages[: num_sent + 1], *shown]
            return self.delta(whole, num_sent=num_sent, completion_token_ids=completion_token_ids, tools=tools)

        ids, new = following(messages[num_sent + 1 :]), messages[num_sent + 1 :]
        if ids is None:
            return []
        text = self.tokenizer.decode(ids.tolist())
        closing = self._closings.match(text)
        head = closing.end() if closing is not None else len(text) - len(text.lstrip())
        if not new:
            return [MessageSpan(num_sent, "assistant", 0, len(ids), 0, 0)]
        return self._spans(ids, following, new, head=head, first=num_sent + 1)

    def _spans(
        self,
        ids: TokenArray,
        rendered: Callable[[Sequence[Message]], TokenArray | None],
        messages: Sequence[Message],
        *,
        head: int,
        first: int,
    ) -> list[MessageSpan]:
        """A renderer of the cookbook always opens the next reply, so only whole conversations can be compared."""
        text = self.tokenizer.decode(ids.tolist())

        def render(shown: Sequence[Message]) -> str | None:
            found = rendered(shown) if len(shown) == len(messages) else None
            return None if found is None else self.tokenizer.decode(found.tolist())

        spans = text_spans(
            text, render, messages, head=head, first=first, closings=self._closings, common=lambda *_: ""
        )
        last = spans[-1]
        is_found = last.text_end < len(text)
        closing = self._closings.search(text, last.text_end) if is_found else None
        end = closing.end() if closing is not None else last.text_end
        opened = MessageSpan(first + len(messages), "assistant", end, len(text), len(text), len(text))
        spans[-1:] = [last._replace(end=end), opened]
        if head:
            spans.insert(0, MessageSpan(first - 1, "assistant", 0, head, 0, 0))
        return token_spans(spans, token_starts(self.tokenizer, text, ids.tolist()))

    # --- tool calls ---

    def supports_tools(self) -> bool:
        return self._has_tools

    def parse_tool_calls(self, text: str) -> ToolParseResult:
        ids = [*self.tokenizer.encode(text, add_special_tokens=False), *self._stop_ids[:1]]
        message, _ = self.renderer.parse_response(ids)
        read = [(call.function.name, parse_json(call.function.arguments)) for call in message.get("tool_calls") or ()]
        if not all(isinstance(arguments, dict) for _, arguments in read):
            return ToolParseResult(parse_error=True, content=text)
        calls = [make_tool_call(name, arguments, index) for index, (name, arguments) in enumerate(read)]
        content = message["content"]
        plain = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        return ToolParseResult(
            tool_calls=calls or None,
            parse_error=bool(message.get("unparsed_tool_calls")),
            content=plain if calls else text,
        )


def _behind(whole: TokenArray, *parts: TokenArray) -> TokenArray | None:
    """The rest of `whole` after these parts; None if it does not begin with them."""
    start = np.concatenate(parts)
    return whole[len(start) :] if np.array_equal(whole[: len(start)], start) else None
