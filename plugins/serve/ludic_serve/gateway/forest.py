"""The model calls of a session as trees: which earlier call does a request continue?

A node is one model call: the messages that the client added, and the reply. The messages of a request are compared with the paths
from the roots. An assistant message is a node's reply if it carries an id of that reply, whatever a client did to the spelling, or,
without any id, if text and calls are the same. The deepest node whose path and reply the request repeats is its parent; if there is
none, the request starts a new root. Pure data: nothing here renders, samples or waits.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ludic.types import ConfigError, Message, MessageView, TokenLog, TokenTrace, ToolCall
from ludic.util.files import parse_json
from ludic_serve.gateway.wire.canonical import (
    ClientMessage,
    JSONObject,
    ModelRequest,
    Reply,
    new_token,
    token_in,
    tokens_in,
)

Kind = Literal["new", "continued", "healed", "forked", "foreign", "retried"]
"""The relation of a request to the calls before it.

new: the first call of a conversation. continued: repeats a path and its reply word for word. healed: the same, but the client
spelled something differently; the recorded tokens stand. forked: differs from a recorded path, or branches off one. foreign:
contains assistant messages that no call of this session sampled; they are context. retried: asks again what was answered before;
when the client goes on with the later answer, the earlier one is superseded and not trained.
"""
State = Literal["open", "delivered", "undelivered"]


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """One model call."""

    kind: Kind
    parent: "Node | None"
    messages: list[ClientMessage]
    """The messages after the parent's reply; all of them for a root."""
    tools: list[JSONObject]
    number: int
    """Order of arrival in its forest."""
    token: str = field(default_factory=new_token)
    children: list["Node"] = field(default_factory=list)
    state: State = "open"
    is_superseded: bool = False
    """The client asked again and went on with a later answer."""
    difference: "Difference | None" = None
    """The first difference of a fork whose history is not the recorded one."""
    replaces: "Node | None" = None
    """An earlier answer to the same request."""
    ended_ns: int = 0
    # The prompt and the answer, once they are known.
    prompt_messages: MessageView = field(default_factory=lambda: MessageView([]))
    history: list[Message] = field(default_factory=list)
    """Messages as the template reads them; begins with the prompt's, and a continuing call appends to it."""
    tokens: TokenLog = field(default_factory=TokenLog)
    """Begins with the prompt and the completion; a continuing call appends to it."""
    is_rerendered: bool = False
    """The parent's tokens could not be continued, so the prompt was rendered again."""
    trace: TokenTrace | None = None
    text: str = ""
    """The sampled text."""
    message: Message = field(default_factory=dict)
    """The reply as the template reads it."""
    reply: Reply | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def is_delivered(self) -> bool:
        return self.state == "delivered"

    @property
    def is_recorded(self) -> bool:
        """Its tokens are part of a rollout."""
        return self.is_delivered and not self.is_superseded and self.trace is not None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and completion."""
        assert self.trace is not None, "the call was answered"
        return len(self.trace.prompt_token_ids) + len(self.trace.completion_token_ids)

    def deliver(self) -> None:
        """The client has the reply."""
        self.state, self.ended_ns = "delivered", time.time_ns()

    def path(self) -> list["Node"]:
        """The nodes from the root to this one."""
        nodes, node = [], self
        while True:
            nodes.append(node)
            if node.parent is None:
                return nodes[::-1]
            node = node.parent


@dataclass(frozen=True, slots=True)
class Difference:
    """The first message in which a request departs from the recorded history."""

    index: int
    recorded: str
    sent: str

    def __str__(self) -> str:
        return f"message {self.index}: recorded {self.recorded!r:.300}, sent {self.sent!r:.300}"


class Forest:
    """The calls of one policy in one session."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self.nodes: list[Node] = []
        self._by_token: dict[str, Node] = {}

    def add(self, request: ModelRequest) -> Node:
        """The node of a request, open until it is answered."""
        node = self.place(request)
        self.nodes.append(node)
        self._by_token[node.token] = node
        self._siblings(node.parent).append(node)
        if node.parent is not None:
            node.parent.is_superseded = False  # the client goes on with it after all
            earlier = node.parent.replaces
            while earlier is not None:
                earlier.is_superseded = not earlier.children
                earlier = earlier.replaces
        return node

    def find(self, id: str) -> Node | None:
        """The node whose reply carries this id."""
        token = token_in(id)
        return None if token is None else self._by_token.get(token)

    def _siblings(self, parent: Node | None) -> list[Node]:
        return self.roots if parent is None else parent.children

    # --- where a request attaches ---

    def place(self, request: ModelRequest) -> Node:
        """A node at the place where the request continues; the forest does not have it yet."""
        messages = request.messages
        parent: Node | None
        if request.previous_id is not None:
            parent, new = self._after(request.previous_id, messages)
            is_exact = True
        else:
            parent, taken, is_exact = self._deepest(messages)
            new = messages[taken:]
        if not new or new[-1].role == "assistant":
            raise ConfigError(
                "The last message is the assistant's, so there is nothing to answer: prefilled replies are not supported. End "
                "with a user or tool message."
            )
        node = Node(kind="continued", parent=parent, messages=new, tools=request.tools, number=len(self.nodes))
        self._classify(node, len(messages) - len(new), is_exact)
        return node

    def _after(self, previous_id: str, messages: list[ClientMessage]) -> tuple[Node, list[ClientMessage]]:
        parent = self.find(previous_id)
        if parent is None or not parent.is_delivered:
            raise ConfigError(f"previous_response_id={previous_id!r:.80} names no reply of this session.")
        is_system = bool(messages) and messages[0].role == "system"
        repeats_system = is_system and _same_start(parent.path()[0].messages[:1], messages[:1]) is not None
        return parent, messages[1:] if repeats_system else messages

    def _deepest(self, messages: Sequence[ClientMessage]) -> tuple[Node | None, int, bool]:
        """The deepest node whose path and reply begin the messages, how many messages that are, and whether word for word."""
        best: tuple[Node | None, int, bool] = (None, 0, True)
        rank = (0, True, -1)
        open_: list[tuple[Node, int, bool]] = [(root, 0, True) for root in self.roots]
        while open_:
            node, start, is_exact = open_.pop()
            end = start + len(node.messages)
            if not node.is_delivered or end >= len(messages):
                continue
            same = _same_start(node.messages, messages[start:end])
            is_same_reply = None if same is None else _compare_reply(node, messages[end])
            if is_same_reply is None:
                continue
            is_exact = bool(is_exact and same and is_same_reply)
            # Of two equal paths the later one counts: the client asked again and went on with the last answer.
            if (end + 1, is_exact, node.number) > rank:
                best, rank = (node, end + 1, is_exact), (end + 1, is_exact, node.number)
            open_ += [(child, end + 1, is_exact) for child in node.children]
        return best

    def _classify(self, node: Node, start: int, is_exact: bool) -> None:
        """Set the node's kind, and what it differs from or replaces."""
        parent, new = node.parent, node.messages
        siblings = [other for other in self._siblings(parent) if other.state != "undelivered"]
        for other in reversed(siblings):
            is_same = _same_start(other.messages, new) if other.is_delivered else None
            if is_same is None:
                continue
            if len(other.messages) < len(new):
                at = len(other.messages)  # the client has another reply there than the recorded one
                node.kind, node.difference = "forked", Difference(start + at, _reply_text(other), _text_of(new[at]))
                return
            if is_same and other.is_recorded and not other.children and other.tools == node.tools:
                node.kind, node.replaces = "retried", other
                return
        replies = [message for message in new if message.role == "assistant"]
        for token in (token for message in reversed(replies) for token in tokens_in(message)):
            if (known := self._by_token.get(token)) is not None:
                whole = [*_messages_of_path(parent), *new]
                node.kind, node.difference = "forked", self._first_difference(known, whole)
                return
        if replies:
            node.kind = "foreign"
        elif parent is None:
            node.kind = "new"
        elif siblings:
            node.kind = "forked"  # a branch: nothing of the history differs
        else:
            node.kind = "continued" if is_exact else "healed"

    def _first_difference(self, node: Node, sent: Sequence[ClientMessage]) -> Difference | None:
        """The first message in which the request departs from the path of a node whose reply it repeats."""
        index = 0
        for step in node.path():
            for recorded in step.messages:
                if index >= len(sent) or _same_start([recorded], sent[index : index + 1]) is None:
                    return Difference(index, _text_of(recorded), _text_of(sent[index]) if index < len(sent) else "")
                index += 1
            if index >= len(sent) or _compare_reply(step, sent[index]) is None:
                return Difference(index, _reply_text(step), _text_of(sent[index]) if index < len(sent) else "")
            index += 1
        return None


# --- comparing messages: True word for word, False the same in another spelling, None different ---


def _same_start(recorded: Sequence[ClientMessage], sent: Sequence[ClientMessage]) -> bool | None:
    """The comparison of `recorded` with as many of the messages that were sent; None also if those are fewer."""
    if len(sent) < len(recorded):
        return None
    is_exact = True
    for one, other in zip(recorded, sent, strict=False):
        if (same := _compare(one, other)) is None:
            return None
        is_exact = is_exact and same
    return is_exact


def _compare(recorded: ClientMessage, sent: ClientMessage) -> bool | None:
    if recorded.role != sent.role or recorded.tool_call_id != sent.tool_call_id:
        return None
    same_calls = _compare_calls(recorded.tool_calls, sent.tool_calls)
    return None if same_calls is None else _both(_compare_text(recorded.content, sent.content), same_calls)


def _compare_reply(node: Node, sent: ClientMessage) -> bool | None:
    """True if an assistant message is the node's reply, False if it is spelled differently, None if it is another."""
    reply = node.reply
    if sent.role != "assistant" or reply is None:
        return None
    content, start = sent.content, sent.content.lstrip()
    if reply.reasoning and start.startswith("<think>"):  # some clients write the reasoning into the text
        content = start.partition("</think>")[2].lstrip()
    tokens = set(tokens_in(sent))
    if not tokens:
        same = _both(_compare_text(reply.content, content), _compare_calls(reply.tool_calls, sent.tool_calls))
        return same and (not sent.reasoning or sent.reasoning == reply.reasoning)
    if node.token not in tokens:
        return None
    # The reply by its ids. Missing parts and another spelling are the client's; a changed text or argument is an edit.
    if content.strip() and _compare_text(reply.content, content) is None:
        return None
    by_index = {_index_of(call["id"]): call for call in reply.tool_calls}
    for call in sent.tool_calls:
        recorded = by_index.get(_index_of(call["id"]))
        if recorded is None or _compare_calls([recorded], [call]) is None:
            return None
    return (
        sent.content == reply.content
        and sent.reasoning == reply.reasoning
        and _compare_calls(reply.tool_calls, sent.tool_calls) is True
    )


def _both(one: bool | None, other: bool | None) -> bool | None:
    return None if one is None or other is None else one and other


def _compare_text(recorded: str, sent: str) -> bool | None:
    """White space is spelling."""
    return True if recorded == sent else False if recorded.split() == sent.split() else None


def _compare_calls(recorded: Sequence[ToolCall], sent: Sequence[ToolCall]) -> bool | None:
    if len(recorded) != len(sent):
        return None
    is_exact = True
    for one, other in zip(recorded, sent, strict=True):
        ours, theirs = one["function"], other["function"]
        if ours == theirs:
            continue
        is_exact = False
        if ours["name"] != theirs["name"] or _value_of(ours["arguments"]) != _value_of(theirs["arguments"]):
            return None
    return is_exact


def _value_of(arguments: str) -> Any:
    try:
        return parse_json(arguments or "{}")
    except ValueError:
        return arguments


def _index_of(call_id: str) -> str:
    """The number at the end of a call's id, which every dialect writes."""
    return call_id.rpartition("_")[2]


def _messages_of_path(node: Node | None) -> Iterator[ClientMessage]:
    """The recorded messages up to and including the node's reply."""
    for step in [] if node is None else node.path():
        yield from step.messages
        reply = step.reply
        assert reply is not None, "only answered calls have children"
        ids = (step.token, *(call["id"] for call in reply.tool_calls))
        yield ClientMessage(role="assistant", content=reply.content, tool_calls=reply.tool_calls, ids=ids)


def _text_of(message: ClientMessage) -> str:
    calls = "".join(f" {call['function']['name']}({call['function']['arguments']})" for call in message.tool_calls)
    return f"{message.role}: {message.content}{calls}"


def _reply_text(node: Node) -> str:
    reply = node.reply
    assert reply is not None, "a delivered call was answered"
    return _text_of(ClientMessage(role="assistant", content=reply.content, tool_calls=reply.tool_calls))
