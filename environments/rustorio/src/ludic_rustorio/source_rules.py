"""Constructs that a program may not contain, checked before it is compiled.

The compiler does the rest: the first lines make it refuse unsafe code and exclude the standard library. This module refuses the
words with which a program could get around those lines, and those that the known soundness holes of the compiler need
(rust-lang/rust issues 25860 and 57893): both make goods out of nothing.
"""

import re
from collections.abc import Sequence

_REFUSED = {
    r"\bextern\b": "`extern`",
    r"\binclude(_str|_bytes)?\b": "`include`",
    r"\bpath\s*=": "`path =`",
    r"#\s*!": "an inner attribute (`#![…]`)",
    r"\bdyn\b": "`dyn`",
    r"'(?!static\b|_\b)\w": "a named lifetime or loop label",
}
_OPENING = re.compile(r"""/\*|//|(?<!')\b[bc]?r#*"|"|'(?:\\[^\n]{1,20}?|[^\\'\n])'""")
_STRING_END = re.compile(r'(?:\\.|[^"\\])*"', re.DOTALL)
_BLOCK_MARK = re.compile(r"/\*|\*/")
MAX_SOURCE_CHARS = 100_000


def refusal(source: str, head: Sequence[str]) -> str | None:
    """Why a program is not compiled; None if it may be."""
    if len(source) > MAX_SOURCE_CHARS:
        return f"The program has {len(source)} characters; at most {MAX_SOURCE_CHARS} are allowed."
    lines = source.split("\n")  # as Rust counts lines: for it, a comment goes on behind a carriage return
    position = 0
    for wanted in head:
        while position < len(lines) and _is_skipped(lines[position]):
            position += 1
        if position == len(lines) or lines[position].strip(" \t\r") != wanted:
            return f"The program must begin with these lines, unchanged and in this order:\n{chr(10).join(head)}"
        position += 1
    code = code_only("\n".join(lines[position:]))
    found = next((name for pattern, name in _REFUSED.items() if re.search(pattern, code)), None)
    return None if found is None else f"The program has {found} behind the first lines, which is not allowed here."


def _is_skipped(line: str) -> bool:
    bare = line.strip(" \t\r")
    return not bare or (bare.startswith("//") and not bare.startswith("//!"))


def code_only(source: str) -> str:
    """The source with a blank for each comment, string and character. What has no end counts as code."""
    pieces = []
    position = 0
    while found := _OPENING.search(source, position):
        end = _end(source, found)
        if end is None:
            break
        pieces += [source[position : found.start()], " "]
        position = end
    return "".join([*pieces, source[position:]])


def _end(source: str, opening: re.Match[str]) -> int | None:
    """The end of the comment, string or character that begins there; None if it has none."""
    mark = opening[0]
    if mark == "//":
        newline = source.find("\n", opening.end())
        return len(source) if newline < 0 else newline
    if mark == "/*":
        return _end_of_block(source, opening.start())
    if mark == '"':
        string = _STRING_END.match(source, opening.end())
        return None if string is None else string.end()
    if mark.endswith('"'):
        closing = '"' + "#" * mark.count("#")
        found = source.find(closing, opening.end())
        return None if found < 0 else found + len(closing)
    return opening.end()


def _end_of_block(source: str, start: int) -> int | None:
    """Block comments nest."""
    depth = 0
    for mark in _BLOCK_MARK.finditer(source, start):
        depth += 1 if mark[0] == "/*" else -1
        if depth == 0:
            return mark.end()
    return None
