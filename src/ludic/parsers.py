"""Parsers: read an action from the model's text, with a reward for the format.

A parser is a callable: text -> ParseResult. `action=None` means that the text could not be parsed; `obs` is then the feedback for
the agent.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from ludic.types.errors import ConfigError, ParserContractError
from ludic.types.messages import extract_last_boxed_content

__all__ = [
    "ParseResult", "Parser", "raw_parser", "compose_parsers", "xml_parser", "xml_tag_parser",
    "think_prefix_parser", "cot_prefix_parser", "boxed_parser", "final_number_parser", "pattern_parser",
    "extract_last_boxed_content",
]  # fmt: skip

_LEAD_IN = "Invalid action format:"


class ParseResult(NamedTuple):
    """The result of parsing a reply."""

    action: str | None
    """The action for the env; None if the text could not be parsed."""
    reward: float
    """Format reward, or penalty."""
    obs: str | None
    """Feedback for the agent after a failure."""


Parser: TypeAlias = Callable[[str], ParseResult]


def raw_parser(raw: str) -> ParseResult:
    """The text is the action, unchanged."""
    return ParseResult(raw, 0.0, None)


def compose_parsers(*parsers: Parser) -> Parser:
    """Chain parsers: each reads the action of the previous one; rewards add up; the first failure ends the chain."""
    if not parsers:
        raise ConfigError("compose_parsers needs at least one parser; use raw_parser to take the text as it is.")

    def composed(raw: str) -> ParseResult:
        text, reward = raw, 0.0
        for parser in parsers:
            result = parser(text)
            if not isinstance(result, ParseResult):
                raise ParserContractError(
                    f"The parser {parser!r} returned {type(result).__name__} inside compose_parsers; a parser returns "
                    "ParseResult(action, reward, obs)."
                )
            reward += result.reward
            if result.action is None:
                return ParseResult(None, reward, result.obs)
            text = result.action
        return ParseResult(text, reward, None)

    return composed


XmlKind: TypeAlias = Literal["inner", "remainder_after_prefix"]


def xml_parser(
    tag: str,
    *,
    exact: bool = False,
    kind: XmlKind = "inner",
    success_reward: float = 0.1,
    error_reward: float = -1.0,
) -> Parser:
    """A parser for `<tag>…</tag>`.

    `inner`: the action is the content of the first tag pair; with `exact`, the whole text must be that pair.
    `remainder_after_prefix`: the text must begin with the pair, and the action is the text after it.
    """
    name = re.escape(tag)
    # The body must not contain the tag, so a match is the innermost pair and never spans two pairs.
    body = rf"((?:(?!</?{name}>).)*)"
    pair = rf"<{name}>{body}</{name}>"
    flags = re.IGNORECASE | re.DOTALL
    if kind == "inner":
        pattern = re.compile(rf"\s*{pair}\s*\Z" if exact else pair, flags)
        wanted = f"exactly <{tag}>...</{tag}> and nothing else" if exact else f"<{tag}>...</{tag}>"
        find = pattern.match if exact else pattern.search
    elif kind == "remainder_after_prefix":
        if exact:
            raise ConfigError("xml_parser: exact=True cannot go with kind='remainder_after_prefix'; drop one of them.")
        find = re.compile(rf"\s*<{name}>.*?</{name}>(.*)", flags).match
        wanted = f"<{tag}>...</{tag}> followed by the answer"
    else:
        raise ConfigError(f"xml_parser: unknown kind {kind!r}; there are 'inner' and 'remainder_after_prefix'.")
    failure = ParseResult(None, error_reward, f"{_LEAD_IN} expected {wanted}, with some text in it.")

    def parse(raw: str) -> ParseResult:
        match = find(raw)
        action = match.group(1).strip() if match else ""
        return ParseResult(action, success_reward, None) if action else failure

    return parse


def xml_tag_parser(tag: str, *, exact: bool = False, success_reward: float = 0.1, error_reward: float = -1.0) -> Parser:
    """The text inside the first `<tag>…</tag>`."""
    return xml_parser(tag, exact=exact, success_reward=success_reward, error_reward=error_reward)


def think_prefix_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    """The text must begin with a `<think>` block; the rest is the action."""
    return _think_parser(success_reward, error_reward)(raw)


cot_prefix_parser = think_prefix_parser


@lru_cache
def _think_parser(success_reward: float, error_reward: float) -> Parser:
    return xml_parser("think", kind="remainder_after_prefix", success_reward=success_reward, error_reward=error_reward)


def boxed_parser(raw: str, *, success_reward: float = 0.1, error_reward: float = -1.0) -> ParseResult:
    r"""The content of the last well-formed `\boxed{…}`."""
    content = extract_last_boxed_content(raw)
    if content is None or not content.strip():
        return ParseResult(None, error_reward, f"{_LEAD_IN} expected the final answer in \\boxed{{...}}.")
    return ParseResult(content.strip(), success_reward, None)


_NUMBER = re.compile(
    r"""(?<!\w)(?<!\d\.)                     # not inside A1 or 1.2.3; the 5 of 10-5 is positive
    (?P<minus>(?:(?<!\))[-−])?(?:[$€£][-−]?)?)
    (?P<size>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+|/\d+)?|(?<!\.)\.\d+)
    (?P<percent>%?)""",
    re.VERBOSE | re.ASCII,
)
_UNIT = re.compile(r"(?: [A-Za-z]+)*", re.ASCII)


def final_number_parser(raw: str, *, success_reward: float = 0.0, error_reward: float = 0.0) -> ParseResult:
    r"""The final number of a reply: the last `\boxed{…}`, else the last line `#### 72`, else the last number.

    A lenient parser, for evaluation and for models that have not learned a format: the format earns no reward, and a reply
    without a number counts as a wrong answer. 1,234 and $18.0 become 1234 and 18; a box with more than a number is returned
    unchanged for the grader.
    """
    boxed = extract_last_boxed_content(raw)
    if boxed:
        return ParseResult(_plain_number(boxed) or boxed, success_reward, None)
    answer = _marked_answer(raw) or _last_number(raw)
    if answer is None:
        return ParseResult(None, error_reward, f"{_LEAD_IN} expected a number as the final answer.")
    return ParseResult(answer, success_reward, None)


def _marked_answer(raw: str) -> str | None:
    """The answer after the last `####`. Models also use `####` for headings (#### 2. Add them up), which are skipped."""
    if "####" not in raw:
        return None
    for line in reversed(raw.splitlines()):
        _, marker, tail = line.rpartition("####")
        tail = tail.strip(" \t*").rstrip(".")
        match = _NUMBER.match(tail)
        if marker and match and _UNIT.fullmatch(tail, match.end()):
            return _plain_number(tail) or tail
    return None


def _last_number(raw: str) -> str | None:
    """The last number of the text. A number lies within one word, so words are searched from the end."""
    for word in reversed(raw.split()):
        if not word.isalpha() and (found := [*_NUMBER.finditer(word)]):
            return _canonical(found[-1])
    return None


def _plain_number(text: str) -> str | None:
    """The number if the text is exactly one number, else None."""
    match = _NUMBER.fullmatch(text.strip().rstrip("."))
    return None if match is None else _canonical(match)


def _canonical(match: re.Match[str]) -> str:
    """Normal form of a number, so that 18.0, $18 and 18 are the same vote."""
    whole, _, decimals = match["size"].replace(",", "").partition(".")
    whole, _, bottom = whole.partition("/")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    size = whole + (f".{decimals}" if decimals else "") + (f"/{bottom}" if bottom else "")
    minus = "-" if match["minus"].strip("$€£") and size != "0" else ""
    return minus + size + match["percent"]


def pattern_parser(pattern: str, *, success_reward: float = 0.0, error_reward: float = -1.0) -> Parser:
    """The last match of a regular expression (its first group, if any), ignoring case: `[ABC][123]` finds a cell.

    For replies with text around the action; the last match counts.
    """
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"pattern_parser: {pattern!r} is not a regular expression: {error}.") from error
    failure = ParseResult(None, error_reward, f"{_LEAD_IN} nothing in the reply matches {pattern}.")

    def parse(raw: str) -> ParseResult:
        *_, last = [None, *compiled.finditer(raw)]
        action = None if last is None else last.group(1 if compiled.groups else 0)
        return ParseResult(action, success_reward, None) if action else failure

    return parse
