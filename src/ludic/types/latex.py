r"""Reading LaTeX out of a model's text: the last `\boxed{…}`.

It lives on the floor because two packages need it that may not know each other: parsers (an answer in a reply)
and envs (a reference answer in a worked solution).
"""

import re

# In this order: a box opens (`\\boxed` as well: JSON-minded models double the backslash), an escape such as `\{`
# that opens and closes nothing, a plain brace.
_TOKEN = re.compile(r"(?P<box>\\\\?(?:boxed|fbox)\s*\{)|\\.|(?P<open>\{)|(?P<close>\})", re.DOTALL)


def extract_last_boxed_content(raw: str) -> str | None:
    r"""The text inside the last well-formed `\boxed{…}` or `\fbox{…}`, without surrounding whitespace.

    Braces may nest, escaped ones do not count, an unclosed box is skipped. None when there is no box.
    One pass over the text, so a long reply full of unclosed boxes costs no more than any other.

    >>> extract_last_boxed_content(r"First \boxed{1}, no: \boxed{\frac{3}{2}}.")
    '\\frac{3}{2}'
    """
    open_groups: list[int | None] = []  # where the content of an open box begins; None for a plain brace
    last: tuple[int, int] | None = None
    for token in _TOKEN.finditer(raw):
        if token["box"]:
            open_groups.append(token.end())
        elif token["open"]:
            open_groups.append(None)
        elif token["close"] and open_groups:
            start = open_groups.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, token.start())
    return None if last is None else raw[last[0] : last[1]].strip()
