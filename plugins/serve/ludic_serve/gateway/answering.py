"""The prompt of a node, and the reply in its sampled tokens.

A prompt continues the parent's exact tokens wherever the template allows it; otherwise the whole history is rendered, and the node
says so. The reply is split into reasoning, text and tool calls; a stream splits the growing text the same way.
"""

import hashlib
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ludic.inference import ByteTemplate, ChatTemplate, HFChatTemplate, Prompt
from ludic.inference.templates.chat import READABLE_CALLS, require_text_calls, shows_tools, tools_as_text, with_tools
from ludic.inference.templates.conversation import decode_reply
from ludic.types import (
    ChatResponse,
    ConfigError,
    Message,
    MessageView,
    TokenArray,
    TokenCompletionRequest,
    TokenLog,
    TokenTrace,
    ToolCall,
    require_trainable_reply,
    token_array,
)
from ludic.util.text_stream import TextStream, overlap
from ludic_serve.gateway.forest import Forest, Node
from ludic_serve.gateway.wire.canonical import ClientMessage, JSONObject, PieceKind, Reply
from ludic_serve.request import check_prompt

Decode = Callable[[list[int]], str]
_OPEN, _CLOSE = "<think>", "</think>"
_THINKING = re.compile(r"\s*<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_MARKERS = "<{"
"""Every format begins its tool calls with one of these."""


# --- prompts ---


class Rendered(NamedTuple):
    """The prompt of a node before the node has it."""

    sent: list[Message]
    tokens: TokenArray
    """Tokens of the whole prompt, or of what follows the parent's."""
    text: str | None
    """Text of the whole prompt; None if `tokens` continue the parent's."""


def render(node: Node, template: ChatTemplate, forest: Forest, room: int) -> Rendered:
    """Messages and tokens of a node. Changes nothing, so it may run in a thread. Raises PromptTooLong if the text is far too
    long for `room`."""
    parent, sent = node.parent, _sent_messages(node, template, forest)
    num_known = 0 if parent is None else len(parent.prompt_messages) + 1
    new_tools = node.tools if parent is None or parent.tools != node.tools else []
    check_prompt(template, sent[num_known:], new_tools, room)
    delta = _delta(node, template, sent)
    if delta is not None:
        return Rendered(sent, delta, None)
    whole = template.apply(sent, tools=_template_tools(node, template))
    return Rendered(sent, whole.prompt_token_ids, whole.prompt_text)


def take_prompt(node: Node, rendered: Rendered) -> Prompt:
    """Record what was rendered in the node; returns its prompt. A continuing call shares the buffers of its parent."""
    parent, sent = node.parent, rendered.sent
    if parent is None or rendered.text is not None:
        node.history, node.is_rerendered = sent, parent is not None
        node.tokens = TokenLog(rendered.tokens)
        node.prompt_messages = MessageView(sent)
        return Prompt(node.tokens.view(), node.prompt_messages, rendered.text)
    trace, num_sent = parent.trace, len(parent.prompt_messages)
    assert trace is not None, "only answered calls have children"
    # The first call that continues another appends to its buffers, every other one copies them.
    if len(parent.history) == num_sent and len(parent.tokens) == parent.num_tokens:
        node.history, node.tokens = parent.history, parent.tokens
        node.history += sent[num_sent:]
    else:
        node.history, node.tokens = sent, TokenLog(trace.prompt_token_ids)
        node.tokens.append(trace.completion_token_ids)
    node.tokens.append(rendered.tokens)
    node.prompt_messages = MessageView(node.history)
    return Prompt(node.tokens.view(), node.prompt_messages)


def _sent_messages(node: Node, template: ChatTemplate, forest: Forest) -> list[Message]:
    """All messages of the prompt, as the template reads them."""
    messages, parent = [_for_template(message, forest) for message in node.messages], node.parent
    if parent is not None:
        messages = [*parent.prompt_messages, parent.message, *messages]
    before = [] if parent is None else parent.tools
    if before == node.tools:
        return messages
    if node.tools and not template.supports_tools():
        raise ConfigError(
            f"Tools are offered, but tool calls of this model cannot be read. {READABLE_CALLS}: use such a model."
        )
    if _writes_tools(template):
        return messages
    if node.tools:
        require_text_calls(template)
    return with_tools(_without_tools(messages, before), node.tools)


def _delta(node: Node, template: ChatTemplate, sent: list[Message]) -> TokenArray | None:
    """The tokens that follow the parent's; None if those cannot be continued."""
    parent = node.parent
    if parent is None or parent.tools != node.tools:
        return None
    assert parent.trace is not None, "only answered calls have children"
    return template.delta(
        sent,
        num_sent=len(parent.prompt_messages),
        completion_token_ids=parent.trace.completion_token_ids,
        tools=_template_tools(node, template),
    )


# --- tools ---

_WRITES_TOOLS: WeakKeyDictionary[ChatTemplate, bool] = WeakKeyDictionary()
_ANY_TOOL = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}


def _writes_tools(template: ChatTemplate) -> bool:
    """True if the template writes tools into the prompt."""
    if template not in _WRITES_TOOLS:
        _WRITES_TOOLS[template] = shows_tools(template, [_ANY_TOOL])
    return _WRITES_TOOLS[template]


def _template_tools(node: Node, template: ChatTemplate) -> list[JSONObject] | None:
    return node.tools if node.tools and _writes_tools(template) else None


def _without_tools(messages: list[Message], tools: list[JSONObject]) -> list[Message]:
    """The messages before `with_tools`."""
    if not tools:
        return messages
    text, first = tools_as_text(tools), messages[0]
    if first["content"] == text:
        return messages[1:]
    return [{**first, "content": first["content"].removesuffix(f"\n\n{text}")}, *messages[1:]]


# --- messages ---


def _for_template(message: ClientMessage, forest: Forest) -> Message:
    shaped: Message = {"role": message.role, "content": message.content}
    if message.tool_calls:
        shaped["tool_calls"] = [{**call, "id": _short_id(call["id"], forest)} for call in message.tool_calls]
    if message.reasoning:
        shaped["reasoning_content"] = message.reasoning
    if message.tool_call_id is not None:
        shaped["tool_call_id"] = _short_id(message.tool_call_id, forest)
        call = _recorded_call(message.tool_call_id, forest)
        if call is not None:
            shaped["name"] = call["function"]["name"]
    return shaped


def _recorded_call(call_id: str, forest: Forest) -> ToolCall | None:
    """The call of a recorded reply, with the id that the template reads."""
    node, number = forest.find(call_id), call_id.rpartition("_")[2]
    calls = [] if node is None else node.message.get("tool_calls", [])
    return next((call for index, call in enumerate(calls) if str(index) == number), None)


def _short_id(call_id: str, forest: Forest) -> str:
    """Nine letters and digits: Mistral's template accepts nothing else."""
    call = _recorded_call(call_id, forest)
    return hashlib.sha256(call_id.encode(errors="replace")).hexdigest()[:9] if call is None else str(call["id"])


# --- replies ---


def take_answer(
    node: Node,
    request: TokenCompletionRequest,
    response: ChatResponse,
    template: ChatTemplate,
    *,
    model: str,
    num_calls: int,
) -> Reply:
    """Record the sampled tokens in the node; returns the reply. `num_calls`: tool calls of the session so far."""
    node.trace = TokenTrace(
        request.prompt_token_ids,
        response.completion_token_ids,
        response.completion_logprobs,
        response.finish_reason,
        response.version_runs,
        request.sampling.temperature,
        response.candidates,
        require_trainable_reply(request, response),
    )
    if len(node.tokens) == len(request.prompt_token_ids):
        node.tokens.append(response.completion_token_ids)
    text = template.reply_prefix + response.text
    reasoning, content = split_reasoning(text)
    calls: list[ToolCall] = []
    node.text, node.message = text, {"role": "assistant", "content": text}
    if node.tools:
        content = content.lstrip()  # as around calls: a stream must not depend on whether one follows
    if node.tools and response.finish_reason != "length":  # a truncated call is no call
        found = template.parse_tool_calls(content)
        if found.tool_calls and not found.parse_error:
            calls, content = found.tool_calls, found.content
            thinking = _THINKING.match(text)
            node.message = {"role": "assistant", "content": f"{thinking[0] if thinking else ''}{content}".strip()}
            node.message["tool_calls"] = [
                {**call, "id": f"call{num_calls + index:05d}"} for index, call in enumerate(calls)
            ]
    node.reply = Reply(
        token=node.token,
        model=model,
        created=int(time.time()),
        reasoning=reasoning,
        content=content,
        tool_calls=[{**call, "id": f"call_{node.token}_{index}"} for index, call in enumerate(calls)],
        finish_reason="tool_calls" if calls else "length" if response.finish_reason == "length" else "stop",
        num_prompt_tokens=len(request.prompt_token_ids),
        num_cached_tokens=0 if node.parent is None or node.is_rerendered else node.parent.num_tokens,
        num_completion_tokens=len(response.completion_token_ids),
    )
    return node.reply


def split_reasoning(text: str) -> tuple[str, str]:
    """(reasoning, the rest) of a reply that may begin with a think block."""
    found = _THINKING.match(text)
    return ("", text) if found is None else (found[1].strip(), text[found.end() :].lstrip())


def decoder_of(template: ChatTemplate) -> Decode | None:
    """Decodes sampled tokens for a stream; None if the template has no tokenizer: then the text comes at the end."""
    if isinstance(template, HFChatTemplate):
        return lambda ids: decode_reply(template.tokenizer, ids)
    if isinstance(template, ByteTemplate):
        return lambda ids: template.decode_reply(token_array(ids))
    return None


class ReplyPieces:
    """Splits a growing reply into pieces of reasoning and content that later tokens cannot change."""

    def __init__(self, decode: Decode, *, stops: Sequence[str], prefix: str, with_tools: bool) -> None:
        self._stream = TextStream(decode, stops=stops)
        self._rest = prefix
        """Text that has not been shown."""
        self._with_tools = with_tools
        self._state: PieceKind | None = None
        self._strips = with_tools
        """White space before the next piece is dropped: it is the first of its kind."""

    def push(self, ids: Sequence[int]) -> list[tuple[PieceKind, str]]:
        self._rest += self._stream.push(ids)
        pieces: list[tuple[PieceKind, str]] = []
        if self._state is None:
            start = self._rest.lstrip()
            if len(start) < len(_OPEN) and _OPEN.startswith(start):
                return pieces
            self._state = "content"
            if start.startswith(_OPEN):
                self._state, self._rest, self._strips = "reasoning", start[len(_OPEN) :], True
        if self._state == "reasoning":
            text, found, rest = self._rest.partition(_CLOSE)
            if found:
                self._take(pieces, text.rstrip())
                self._state, self._rest, self._strips = "content", rest, True
            else:
                self._take(pieces, text[: len(text) - overlap(text, _CLOSE)].rstrip())
                return pieces
        end = len(self._rest)
        if self._with_tools:
            end = min((at for marker in _MARKERS if (at := self._rest.find(marker)) >= 0), default=end)
        self._take(pieces, self._rest[:end].rstrip() if self._with_tools else self._rest[:end])
        return pieces

    def _take(self, pieces: list[tuple[PieceKind, str]], text: str) -> None:
        assert self._state is not None
        self._rest = self._rest[len(text) :]
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        if text:
            pieces.append((self._state, text))


def terminal_reply(token: str, model: str, text: str) -> Reply:
    """A reply that no model sampled: it tells the agent that its session is over."""
    return Reply(token=token, model=model, created=int(time.time()), content=text, finish_reason="stop")
