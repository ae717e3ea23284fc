"""Selection of the rollouts that a request asks for: filters, search, order and pages. Also its parameters and errors."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import msgspec
import numpy as np

from ludic.http.errors import RequestRefused
from ludic_view.files import Card, compared_groups, is_zero_spread, strict_json
from ludic_view.index import RunIndex

JSONObject: TypeAlias = dict[str, Any]
Query: TypeAlias = Mapping[str, str]
MAX_LIMIT = 10_000
NUM_BINS = 20


class NotFound(RequestRefused):
    """There is no such run, rollout, group or task."""

    def __init__(self, message: str) -> None:
        super().__init__(404, "not_found", message)


class BadQuery(RequestRefused):
    """A parameter of a request cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "bad_query", message)


def live(index: RunIndex) -> list[Card]:
    """The rollouts of the run, without those that a resumed start has played again."""
    return index.kept("live", lambda: [card for card in index.cards if not card.is_abandoned])


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def matching_cards(index: RunIndex, query: Query) -> list[Card]:
    cards = live(index) if not flag_in(query, "abandoned") else index.cards
    tests: list[Callable[[Card], bool]] = []
    if (step := number_in(query, "step", int)) is not None:
        tests.append(lambda card: card.step == step)
    for name in ("group", "task", "stop", "agent", "env", "model"):
        if (wanted := query.get(name)) is not None and wanted != "":
            tests.append(lambda card, name=name, wanted=wanted: getattr(card, name) == wanted)  # type: ignore[misc]
    if (least := number_in(query, "reward_min", float)) is not None:
        tests.append(lambda card: card.reward >= least)
    if (most := number_in(query, "reward_max", float)) is not None:
        tests.append(lambda card: card.reward <= most)
    for flag, test in _FLAGS.items():
        if flag_in(query, flag):
            tests.append(test)
    found = [card for card in cards if all(test(card) for test in tests)]
    if flag_in(query, "zero_spread"):
        zero = index.kept("zero", lambda: _zero_spread_groups(index))
        found = [card for card in found if card.compared in zero]
    return _with_text(index, found, query["text"]) if query.get("text") else found


def _zero_spread_groups(index: RunIndex) -> set[Any]:
    return {key for key, members in compared_groups(live(index)).items() if is_zero_spread(members)}


_FLAGS: dict[str, Callable[[Card], bool]] = {
    "failed": lambda card: card.failure is not None,
    "parse_error": lambda card: card.parse_errors > 0,
    "truncated": lambda card: card.truncated,
    "trained": lambda card: card.is_trained,
}


class _TextStep(msgspec.Struct):
    action: str = ""
    next_obs: Any = None
    prev_obs: Any = None
    prompt_messages: msgspec.Raw = msgspec.Raw(b"")
    tool_results: msgspec.Raw = msgspec.Raw(b"")


class _Texts(msgspec.Struct):
    steps: list[_TextStep] = []


_decode_texts = msgspec.json.Decoder(_Texts).decode


def _with_text(index: RunIndex, cards: list[Card], wanted: str) -> list[Card]:
    """Rollouts whose prompts, replies or observations contain a text, in any case."""
    wanted = wanted.casefold()
    # A line is ASCII: a quick look at its bytes leaves out most of them before any is decoded.
    quick = wanted.encode() if wanted.isascii() and wanted.isprintable() and not set(wanted) & {'"', "\\"} else None
    found = []
    for card in cards:
        text = index.line_of(card).read()
        if quick is not None and quick not in text.lower():
            continue
        try:
            is_there = any(wanted in part.casefold() for part in _texts_of(text))
        except (ValueError, RecursionError):  # a number of 5,000 digits: found by its JSON
            is_there = wanted in text.decode("utf-8", "replace").casefold()
        if is_there:
            found.append(card)
    return found


def _texts_of(line: bytes) -> Iterable[str]:
    try:
        decoded = _decode_texts(line)
    except msgspec.DecodeError:
        decoded = _decode_texts(strict_json(line))
    for step in decoded.steps:
        yield from _texts_in(step)


def _texts_in(step: _TextStep) -> Iterable[str]:
    yield step.action
    yield from _strings([step.next_obs, step.prev_obs])
    for raw in (step.prompt_messages, step.tool_results):
        if bytes(raw):
            yield from _strings(msgspec.json.decode(raw))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            if name != "role":
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


_SORTS: dict[str, Callable[[Card], Any]] = {
    "reward": lambda card: card.reward,
    "tokens": lambda card: card.tokens,
    "time": lambda card: card.started_ns or 0,
    "step": lambda card: card.step,
    "lag": lambda card: card.lag or 0,
    "turns": lambda card: card.turns,
}


def sorted_cards(cards: list[Card], how: str) -> list[Card]:
    name, is_down = how.removeprefix("-"), how.startswith("-")
    if name == "order":
        return cards[::-1] if is_down else cards
    if name not in _SORTS:
        raise BadQuery(f"sort={how!r:.50}; there are order, {', '.join(_SORTS)}, and each with - in front.")
    return sorted(cards, key=_SORTS[name], reverse=is_down)


def histogram(values: Sequence[float]) -> JSONObject:
    """Counts in equal bins; where there are few different values, one bin for each of `values`."""
    different = sorted(set(values))
    if not different:
        return {"edges": [], "counts": []}
    if len(different) <= NUM_BINS and len(different) > 1:
        gaps = [(a + b) / 2 for a, b in pairwise(different)]
        edges = [different[0] - (gaps[0] - different[0]), *gaps, different[-1] + (different[-1] - gaps[-1])]
    else:
        low, high = different[0], different[-1]
        edges = np.linspace(low, high, NUM_BINS + 1).tolist() if high > low else [low - 0.5, low + 0.5]
    counts, _ = np.histogram(values, bins=edges)
    found = {"edges": edges, "counts": counts.tolist()}
    return found | {"values": different} if len(different) == len(counts) else found


def page_of(found: Sequence[Any], query: Query, usual: int = 100) -> Sequence[Any]:
    offset, limit = number_in(query, "offset", int) or 0, number_in(query, "limit", int)
    if offset < 0 or (limit is not None and limit < 0):
        raise BadQuery("offset and limit must be 0 or more.")
    return found[offset : offset + min(usual if limit is None else limit, MAX_LIMIT)]


def number_in(query: Query, name: str, kind: type[int] | type[float]) -> Any:
    text = query.get(name)
    if text is None or text == "":
        return None
    try:
        number = kind(text)
    except ValueError:
        raise BadQuery(f"{name}={text!r:.50} is not a number.") from None
    if not abs(number) < (2**63 if kind is int else math.inf):
        raise BadQuery(f"{name}={text!r:.50} is not a finite number.")
    return number


def flag_in(query: Query, name: str) -> bool:
    return query.get(name, "") not in ("", "0", "false")
