"""Which token of a rendered conversation came from which message.

A template is a program that can trim, escape, move or drop what a message says. So the text of a message is located by rendering
the conversation again with marks around every content, and the border between two messages by rendering only the first ones.
Characters become tokens by the places where tokens start: a token belongs to the message of its first character.
"""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ludic.types import Message, MessageSpan

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
